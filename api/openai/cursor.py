"""Event cursors: ids `epoch:number:run` of a job's events, by which a client resumes a stream. Opaque to clients.

The events of a job are a log: `queued`, then for each run `started` and its deltas, then the end. Each has a number of
its own, and later events have greater ones. They follow from what is stored, so that a finished job shows the same log
as a running one, with f the number of a run's first delta:

| event                              | number    | run                        |
|------------------------------------|-----------|----------------------------|
| queued                             | 1         | -                          |
| started, of the i-th run           | f + i     | that run                   |
| delta s, of the i-th run           | s + i + 1 | that run                   |
| the end, behind delta s and k runs | s + k + 2 | the last run, or - (k = 0) |

The run identifies the worker run that wrote the last event a reader has. A cursor whose epoch or run the store does not
know is answered with `stream.reset`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from api.openai.errors import invalid_request
from streaming.jobs.codec import Run, Section, Terminal
from streaming.jobs.job import JobState
from streaming.jobs.records import MALFORMED, JobRecord
from streaming.jobs.relay import GONE

START, QUEUED = 0, 1
NO_RUN = "-"
CUT_SHORT = 10**12
"""Number of the last event of a job that a script ended after a worker had started it (its log may be trimmed), or
whose record is unreadable or lost (its runs are unknown)."""

_SYNTAX = re.compile(r"([0-9]{1,15}):([0-9]{1,15})(?::([0-9a-zA-Z.-]{1,64}))?")


class Cursor(NamedTuple):
    """One event's id."""

    epoch: int
    number: int
    run: str = NO_RUN

    def __str__(self) -> str:
        return f"{self.epoch}:{self.number}:{self.run}"


class ResumePoint(NamedTuple):
    """Position in the log from which a reader resumes."""

    after: int = 0
    """Number of the last delta that the reader has."""
    runs: tuple[Run, ...] = ()
    """Runs whose `started` the reader has."""
    queued: bool = False
    """The reader has `queued`."""
    over: bool = False
    """The reader has every event."""


def read(text: str, param: str = "Last-Event-ID") -> Cursor:
    """Parse a client's cursor. Raises ApiError (400): a guess would repeat or skip events."""
    match = _SYNTAX.fullmatch(text)
    if match is None:
        raise invalid_request(f"{param} must be the id of an event, as it was received.", param)
    return Cursor(int(match[1]), int(match[2]), match[3] or "")


def queued(epoch: int) -> Cursor:
    return Cursor(epoch, QUEUED)


def started(epoch: int, ordinal: int, first: int, run: Run) -> Cursor:
    """Return the id of `started` of the run `ordinal` (counted from 1), whose first delta is `first`."""
    return Cursor(epoch, first + ordinal, str(run))


def delta(epoch: int, ordinal: int, seq: int, run: Run) -> Cursor:
    """Return the id of delta `seq`, written by the run `ordinal`."""
    return Cursor(epoch, seq + ordinal + 1, str(run))


def end(epoch: int, runs: Sequence[Run], terminal: Terminal | None) -> Cursor:
    """Return the id of the last event of a job that has ended."""
    if terminal is not None and terminal.failure is not None and terminal.failure.code in (MALFORMED.code, GONE.code):
        return Cursor(epoch, CUT_SHORT)
    if not runs:
        return Cursor(epoch, QUEUED + 1)
    if terminal is None or not terminal.sections:
        return Cursor(epoch, CUT_SHORT, str(runs[-1]))
    return Cursor(epoch, terminal.seq + len(runs) + 2, str(runs[-1]))


def latest_of(record: JobRecord) -> Cursor | None:
    """Return the id of a job's newest event; None while it runs, because only its log has it."""
    if record.state.final:
        return end(record.epoch, [logged.run for logged in record.runs], record.terminal)
    return queued(record.epoch) if record.state is JobState.QUEUED and not record.runs else None


def resume(cursor: Cursor, record: JobRecord) -> ResumePoint | None:
    """Return the position after a cursor; None if the store does not know the events that the reader has."""
    if cursor.epoch != record.epoch:
        return None
    if cursor.run == NO_RUN and cursor.number <= QUEUED:
        return ResumePoint(queued=cursor.number == QUEUED)
    runs = [logged.run for logged in record.runs]
    if record.state.final and (cursor.number == CUT_SHORT or cursor == end(record.epoch, runs, record.terminal)):
        return ResumePoint(over=True)
    ordinal = next((ordinal for ordinal, run in enumerate(runs, 1) if str(run) == cursor.run), 0)
    after = cursor.number - ordinal - 1
    if not ordinal or after < 0:
        return None
    sections = record.terminal.sections if record.terminal else ()
    if record.terminal and sections and not _wrote(sections, ordinal, after, record.terminal.seq):
        return None
    return ResumePoint(after, tuple(runs[:ordinal]), queued=True)


def _wrote(sections: Sequence[Section], ordinal: int, after: int, last: int) -> bool:
    """Whether the run `ordinal` wrote delta `after`, or starts right after it."""
    beyond = sections[ordinal].first if ordinal < len(sections) else last + 1
    return sections[ordinal - 1].first - 1 <= after < beyond
