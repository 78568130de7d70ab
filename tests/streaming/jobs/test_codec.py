"""The codec: what is sent is what arrives, and anything else is a DecodeError, never another exception."""

from __future__ import annotations

import contextlib
import zlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine import MEDIA_KINDS, ChatTurn, Sampling, Task
from penstock.loops import at_once
from penstock.tools import Tool, ToolCall, Tools
from streaming.errors import DecodeError, NewerMessage
from streaming.jobs.codec import (
    TAGS,
    Delta,
    Frame,
    Opening,
    Run,
    Section,
    Terminal,
    Usage,
    decode_control,
    decode_job,
    decode_record_rows,
    decode_reply,
    decode_terminal,
    encode,
    encode_record_rows,
    kept_form,
)
from streaming.jobs.job import JOB_VERSION, Chat, Inputs, Job, JobState, MessageForm, TaskForm, Text, version_of
from streaming.order import Priority

TEXT = st.text(alphabet=st.characters(exclude_categories=("Cs",)), max_size=40)
DELTAS = st.builds(
    Delta,
    run_number=st.integers(1, 2**40),
    seq=st.integers(1, 2**31),
    index=st.integers(0, 7),
    text=TEXT,
    ids=st.lists(st.integers(0, 2**31), max_size=3).map(tuple),
    n=st.integers(0, 9),
    finish=st.sampled_from(["", "stop", "length"]),
)


RUNS = st.builds(Run, TEXT, st.integers(1, 2**40))
SECTIONS = st.lists(st.builds(Section, st.integers(1, 2**31), RUNS), max_size=3).map(tuple)
OPENINGS = st.builds(Opening, TEXT, st.integers(1, 2**31), st.none() | RUNS, SECTIONS)


@given(
    st.lists(DELTAS, max_size=5).map(tuple),
    TEXT,
    st.dictionaries(st.integers(-(2**40), 2**40), OPENINGS, max_size=3),
    SECTIONS,
)
def test_frames_and_terminals_survive_the_wire(
    rows: tuple[Delta, ...], worker: str, openings: dict[int, Opening], sections: tuple[Section, ...]
) -> None:
    """Any text in any delta."""
    frame = Frame(worker, 7, rows, openings)
    end = Terminal("j", JobState.COMPLETED, len(rows), ("stop",), Usage(1, 2, 3), None, worker, 5, sections, rows)
    assert decode_reply(encode(frame)) == frame
    assert decode_terminal(encode(end)) == end and decode_reply(encode(end)) == end


@given(st.lists(DELTAS | TEXT, max_size=40), st.sampled_from([1, 7, 5_000]))
def test_a_record_keeps_the_deltas_of_its_job(found: list[Delta | str], rows_at_once: int) -> None:
    """All but the ids of those that are one token of the first choice; in slices or at once."""
    rows = [Delta(1, 0, each, (9,), 0) if isinstance(each, str) else each for each in found]
    rows = [msgspec.structs.replace(row, seq=seq) for seq, row in enumerate(rows, 1)]
    data = encode_record_rows([kept_form(row) for row in rows])
    for now, row in zip(at_once(decode_record_rows(data, rows_at_once)), rows, strict=True):
        is_text = now == Delta(0, row.seq, row.text, (), 0)
        assert now == row or (is_text and msgspec.structs.replace(row, run_number=0, ids=()) == now)


@given(st.binary(max_size=200))
def test_rows_nobody_can_read_are_a_decode_error(data: bytes) -> None:
    for garbage in (data, b"\x48" + data, zlib.compress(data)):
        with contextlib.suppress(DecodeError):
            at_once(decode_record_rows(garbage, 7))


@given(TEXT, st.sampled_from(Priority), st.integers(1, 8))
def test_jobs_survive_the_wire(text: str, priority: Priority, n: int) -> None:
    """Any prompt in any lane."""
    job = Job(
        id="j", model="m", tenant="t", priority=priority, prompt=Chat((ChatTurn("user", text),)), sampling=Sampling(n=n)
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


@given(st.from_regex(r"[a-z][0-9]{0,3}", fullmatch=True), st.lists(st.integers() | st.text(), max_size=3))
def test_a_tag_that_is_not_known_is_a_newer_message(tag: str, fields: list[int | str]) -> None:
    """A later version of a message, or a new kind: set aside, not taken for garbage."""
    data = msgspec.msgpack.encode([tag, *(each for each in fields if not isinstance(each, int) or abs(each) < 2**63)])
    for decode in (decode_reply, decode_control, decode_terminal):
        try:
            decode(data)
        except DecodeError as error:
            assert isinstance(error, NewerMessage) is (tag not in TAGS)


def test_a_job_says_its_version() -> None:
    """Without one it is of the first; each up to this one is read; a newer one is told from garbage."""
    job = Job(id="j", model="m", tenant="t", priority=Priority.BATCH, prompt=Chat((ChatTurn("user", "x"),)))
    fields = msgspec.msgpack.decode(encode(job))
    assert "v" not in fields
    for version in range(1, JOB_VERSION + 1):
        read = decode_job(msgspec.msgpack.encode(fields | {"v": version}))
        assert msgspec.structs.replace(read, v=1) == job
    for newer in ({"v": JOB_VERSION + 1}, fields | {"v": JOB_VERSION + 1}, fields | {"v": 9, "prompt": 7}):
        with pytest.raises(NewerMessage):
            decode_job(msgspec.msgpack.encode(newer))
    for garbage in ({"v": 0}, {"v": "2"}, fields | {"prompt": 7}, []):
        with pytest.raises(DecodeError) as caught:
            decode_job(msgspec.msgpack.encode(garbage))
        assert not isinstance(caught.value, NewerMessage)


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": Tools(offered=(Tool("f", "", {"type": "object"}),), named="f", choice="required")},
        {"prompt": Chat((ChatTurn("assistant", "", (ToolCall("c", "f", "{}"),)), ChatTurn("tool", "4", call_id="c")))},
        {"sampling": Sampling(top_k=0, min_p=0.1, logit_bias={1: 2.5, 50256: -100.0}, ignore_eos=True)},
        {"prompt": Inputs((("a", (1, 2)), ("b",))), "task": Task(kind="embed"), "task_form": TaskForm(base64=True)},
        {"passed": {"custom": "y"}},
    ],
)
def test_what_a_job_asks_for_comes_back(fields: dict[str, Any]) -> None:
    fields = {"prompt": Text(("x",)), **fields}
    job = Job(id="j", model="m", tenant="t", priority=Priority.BATCH, **fields)
    assert decode_job(encode(job)) == job


IMAGE = {"type": "image_url", "image_url": {"url": "media:0"}}


@pytest.mark.parametrize(
    ("fields", "version"),
    [
        ({}, 1),
        ({"sampling": Sampling(logprobs=3), "tools": Tools(offered=(Tool("f"),)), "echo": True}, 1),
        ({"prompt": Inputs((("a",),)), "task": Task(kind="embed")}, 1),
        ({"adapter": "a"}, 7),
        ({"message": MessageForm()}, 7),
        ({"sampling": Sampling(prompt_logprobs=True)}, 7),
        ({"prompt": Chat((ChatTurn("user", "x"), ChatTurn("user", "", parts=(IMAGE,))))}, 7),
        *(({"task": Task(kind=kind)}, 7) for kind in sorted(MEDIA_KINDS)),
    ],
)
def test_older_processes_leave_what_they_would_lose(fields: dict[str, Any], version: int) -> None:
    """A job says so by its version: a process that knows only lower ones puts it back for a newer one."""
    job = Job(id="j", model="m", tenant="t", priority=Priority.BATCH, **{"prompt": Text(("x",)), **fields})
    assert version_of(job) == version
