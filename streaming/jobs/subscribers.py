"""Subscribers of one job in one API process: whose deltas each of them gets, and which runs it still lacks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from streaming.jobs.frames import Delta, Opening, Run, author
from streaming.jobs.history import LoggedRun
from streaming.jobs.records import JobRecord
from streaming.jobs.reorder_buffer import ReorderBuffer


@dataclass(slots=True)
class Subscribers:
    """Who listens to one job."""

    inboxes: tuple[ReorderBuffer, ...] = ()
    streams: list[tuple[str, int]] = field(default_factory=list)
    """The workers that have opened runs of it, each with the number that stands for the run."""
    openings: dict[Run, Opening] = field(default_factory=dict)
    """Its runs, and what stands for copies of their deltas."""


def author_of(inbox: ReorderBuffer, row: Delta, worker: str) -> Run:
    """The run that wrote a row of a worker's frame."""
    run = Run(worker, row.stream)
    opening = inbox.openings.get(run)
    return (opening and author(opening.copied, row.seq)) or run


def missing_runs(inbox: ReorderBuffer, record: JobRecord) -> Sequence[LoggedRun]:
    """The runs whose logs may hold what an inbox lacks, each from the first frame it lacks."""
    if inbox.whole or inbox.rewound:
        return ()
    current = Run(inbox.worker, inbox.stream)
    for place, logged in enumerate(record.runs):
        if logged.run == current and inbox.number:
            return (LoggedRun(current, inbox.number), *record.runs[place + 1 :])
    return record.runs
