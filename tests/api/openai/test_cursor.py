"""Ids of a job's events: each its own, each greater than the last, and each leads back to its place."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.openai import cursor
from api.openai.cursor import Cursor, ResumePoint
from api.openai.errors import ApiError
from penstock.engine import ChatTurn
from streaming.jobs.codec import Run, Section, Terminal
from streaming.jobs.history import LoggedRun
from streaming.jobs.job import Chat, Job, JobState
from streaming.jobs.records import JobRecord
from streaming.order import Priority

JOB = Job(id="j", model="m", tenant="t", priority=Priority.STANDARD, prompt=Chat((ChatTurn("user", "x"),)))


def record_of(lengths: list[int], *, state: JobState = JobState.COMPLETED, stored: bool = True) -> JobRecord:
    """A job whose runs wrote so many deltas each; `stored`: a worker wrote its end."""
    firsts = [1 + sum(lengths[:place]) for place in range(len(lengths))]
    runs = [Run(f"w{place % 2}", place) for place in range(len(lengths))]
    sections = tuple(Section(first, run) for first, run in zip(firsts, runs, strict=True))
    seq = sum(lengths)
    terminal = Terminal("j", state, seq if stored else 0, sections=sections if stored else ())
    logged, ended = tuple(LoggedRun(run, 1) for run in runs), terminal if state.final else None
    return JobRecord(job=JOB, state=state, attempt=len(runs), epoch=4, resets=1, keep_s=1, runs=logged, terminal=ended)


def log_of(record: JobRecord, lengths: list[int]) -> list[tuple[Cursor, ResumePoint]]:
    """Every event of a job, in order, with the place behind it."""
    events = [(cursor.queued(record.epoch), ResumePoint(queued=True))]
    runs, seq = [logged.run for logged in record.runs], 0
    for place, (run, length) in enumerate(zip(runs, lengths, strict=True), 1):
        seen = tuple(runs[:place])
        events.append((cursor.started(record.epoch, place, seq + 1, run), ResumePoint(seq, seen, queued=True)))
        for _ in range(length):
            seq += 1
            events.append((cursor.delta(record.epoch, place, seq, run), ResumePoint(seq, seen, queued=True)))
    if record.state.final:
        events.append((end_of(record), ResumePoint(over=True)))
    return events


def end_of(record: JobRecord) -> Cursor:
    return cursor.end(record.epoch, [logged.run for logged in record.runs], record.terminal)


runs = st.lists(st.integers(0, 4), max_size=5)


@given(runs, st.sampled_from([JobState.COMPLETED, JobState.FAILED, JobState.RUNNING]), st.booleans())
def test_ids_grow_and_each_leads_back_to_its_place(lengths: list[int], state: JobState, stored: bool) -> None:
    """Whether the job runs, was ended by a worker or by a script; runs that wrote nothing have their events too."""
    record = record_of(lengths, state=state, stored=stored and bool(lengths))
    events = log_of(record, lengths)
    numbers = [each.number for each, _ in events]
    assert numbers == sorted(set(numbers))
    if state is JobState.COMPLETED and stored and lengths:
        assert numbers == list(range(1, len(numbers) + 1))
    for each, place in events:
        assert cursor.read(str(each)) == each
        assert cursor.resume(each, record) == place


@given(runs.filter(any), st.data())
def test_a_cursor_of_what_is_not_stored_leads_nowhere(lengths: list[int], data: st.DataObject) -> None:
    """Another epoch, another run, a delta that another run wrote, an id without a run: told, never guessed."""
    record = record_of(lengths)
    each, place = data.draw(st.sampled_from(log_of(record, lengths)[1:-1]))
    assert cursor.resume(each._replace(epoch=3), record) is None
    assert cursor.resume(each._replace(run="w7-7"), record) is None
    assert cursor.resume(cursor.read(f"{each.epoch}:{each.number}"), record) is None
    assert cursor.resume(end_of(record)._replace(number=end_of(record).number + 1), record) is None
    later = [run for run in lengths[len(place.runs) :] if run]
    if later and place.after:
        assert cursor.resume(each._replace(number=each.number + sum(lengths)), record) is None


def test_a_record_that_lost_deltas_knows_no_cursor_behind_them() -> None:
    """The first run wrote five, of which the store kept three: who saw the fourth saw what is not in the result."""
    record = record_of([3, 4])
    first = record.runs[0].run
    assert cursor.resume(cursor.delta(4, 1, 3, first), record) == ResumePoint(3, (first,), queued=True)
    assert cursor.resume(cursor.delta(4, 1, 4, first), record) is None


def test_the_latest_id_of_a_running_job_is_not_known() -> None:
    """Its log would have to be read for it."""
    assert cursor.latest_of(record_of([3], state=JobState.RUNNING)) is None
    assert cursor.latest_of(record_of([], state=JobState.QUEUED)) == Cursor(4, 1)
    assert cursor.latest_of(record_of([], state=JobState.CANCELLED, stored=False)) == Cursor(4, 2)
    assert cursor.latest_of(replace(record_of([2]), epoch=9)) == Cursor(9, 5, "w0-0")


@pytest.mark.parametrize(
    "text", ["", "-1", "1", "1:", ":1", "1:-1", "1:2:", " 1:2", "1:2\n", "a:b", "١:٢", "1234567890123456:1", "1:2:a:b"]
)
def test_a_malformed_cursor_is_refused(text: str) -> None:
    """Never a silent full replay."""
    with pytest.raises(ApiError) as raised:
        cursor.read(text, "after")
    assert (raised.value.status, raised.value.param) == (400, "after")
