"""The codec: what is sent is what arrives, and anything else is a DecodeError, never another exception."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streaming.errors import DecodeError
from streaming.keys import new_job_id, partition_of
from streaming.messages import (
    Chat,
    Delta,
    Frame,
    Job,
    Priority,
    Sampling,
    State,
    Terminal,
    Turn,
    Usage,
    decode_control,
    decode_job,
    decode_reply,
    decode_terminal,
    encode,
)

TEXT = st.text(alphabet=st.characters(exclude_categories=("Cs",)), max_size=40)
DELTAS = st.builds(
    Delta,
    stream=st.integers(1, 2**40),
    seq=st.integers(1, 2**31),
    index=st.integers(0, 7),
    text=TEXT,
    ids=st.lists(st.integers(0, 2**31), max_size=3).map(tuple),
    n=st.integers(0, 9),
    finish=st.sampled_from(["", "stop", "length"]),
)


@given(st.lists(DELTAS, max_size=5).map(tuple), TEXT, st.dictionaries(st.integers(1, 2**40), TEXT, max_size=3))
def test_frames_and_terminals_survive_the_wire(rows: tuple[Delta, ...], worker: str, names: dict[int, str]) -> None:
    """Any text in any delta."""
    frame = Frame(worker, 7, rows, names)
    end = Terminal("j", State.COMPLETED, len(rows), ("stop",), Usage(1, 2, 3), None, worker, 5, rows)
    assert decode_reply(encode(frame)) == frame
    assert decode_terminal(encode(end)) == end and decode_reply(encode(end)) == end


@given(TEXT, st.sampled_from(Priority), st.integers(1, 8))
def test_jobs_survive_the_wire(text: str, priority: Priority, n: int) -> None:
    """Any prompt in any lane."""
    job = Job(
        id="j", model="m", tenant="t", priority=priority, prompt=Chat((Turn("user", text),)), sampling=Sampling(n=n)
    )
    assert decode_job(encode(job)) == job and job.choices == n


@given(st.binary(max_size=200))
def test_garbage_is_a_decode_error(data: bytes) -> None:
    """Whatever arrives, only DecodeError comes out."""
    for decode in (decode_job, decode_reply, decode_control, decode_terminal):
        with contextlib.suppress(DecodeError):
            decode(data)
    with pytest.raises(DecodeError):
        decode_job(b"\xc1" + data)


def test_an_id_leads_to_its_partition() -> None:
    """And nothing that is not an id of ours leads anywhere."""
    assert [partition_of(new_job_id(partition)) for partition in (0, 1, 255)] == [0, 1, 255]
    for text in ("", "job_", "job_" + "g" * 32, "job_" + "0" * 31, "x" * 36, "job_00" + "0" * 30 + "\n"):
        assert partition_of(text) is None
