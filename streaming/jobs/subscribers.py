"""Subscribers of one job in one API process: which runs they read, and which logged runs they still need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from streaming.jobs.frames import MAX_ROWS_PER_FRAME, Delta, Opening, Run, author
from streaming.jobs.history import LoggedRun
from streaming.jobs.records import JobRecord
from streaming.jobs.reorder_buffer import ReorderBuffer


@dataclass(slots=True)
class Subscribers:
    """The subscribers of one job, and the runs that its workers have opened."""

    buffers: tuple[ReorderBuffer, ...] = ()
    streams: list[tuple[str, int]] = field(default_factory=list)
    """(worker, number of the run) of each run that a worker has opened."""
    openings: dict[Run, Opening] = field(default_factory=dict)
    """The opening of each run, which says whose deltas the run copied."""


def author_of(buffer: ReorderBuffer, row: Delta, worker: str) -> Run:
    """The run that wrote a row of a worker's frame."""
    run = Run(worker, row.stream)
    opening = buffer.openings.get(run)
    return (opening and author(opening.copied, row.seq)) or run


def missing_runs(buffer: ReorderBuffer, record: JobRecord) -> Sequence[LoggedRun]:
    """The runs whose logs may hold deltas that a buffer lacks, each from the first missing frame."""
    if buffer.whole or buffer.rewound:
        return ()
    current = Run(buffer.worker, buffer.stream)
    for place, logged in enumerate(record.runs):
        if logged.run == current and buffer.number:
            first = buffer.number if logged.frame else 0  # 0: the job was put back, and its deltas are parked
            return (LoggedRun(current, first), *record.runs[place + 1 :])
    return record.runs


def first_frame(buffer: ReorderBuffer, logged: LoggedRun) -> int:
    """The first frame of the run's log that may hold a delta which a buffer lacks. A parked log holds all deltas of its
    job in order, MAX_ROWS_PER_FRAME in each frame but the last."""
    return logged.frame or buffer.seq // MAX_ROWS_PER_FRAME + 1
