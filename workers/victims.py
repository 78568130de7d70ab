"""Victim choice: which running batch jobs a worker preempts when interactive jobs need their slots. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from streaming.order import Priority

MAX_PARKED_DELTAS = 20_000
"""Deltas that one call puts back with a job: a few hundred kB, encoded in some ten ms."""


MAX_VICTIMS = 16
"""Jobs that one job of lane interactive may preempt for its place in the KV cache: a long prompt needs that of several
short texts."""


MIN_RUN_S = 30.0
"""A job that continues earlier runs is not preempted in its first seconds here, so that it makes progress: at most one
preemption of a job in this time."""


@dataclass(frozen=True, slots=True)
class RunningJob:
    """What the choice needs to know of a job that this worker runs."""

    id: str
    lane: Priority
    began_s: float
    """Monotonic time at which this worker gave it to the engine."""
    texts: int
    """Choices that the engine runs or has queued."""
    is_continued: bool
    """Whether other runs of it came before this one."""
    is_resumable: bool
    """Whether another run can continue it exactly."""
    deltas: int = 0
    """Deltas that all its runs have logged."""


@dataclass(frozen=True, slots=True)
class Victims:
    """The jobs to preempt, in this order, and why these or why none."""

    jobs: tuple[str, ...]
    reason: str


def obstacle(job: RunningJob, now_s: float) -> str:
    """Why a job must not be preempted now; "" if it may be."""
    if job.lane is not Priority.BATCH:
        return f"lane {job.lane} is not preempted"
    if not job.is_resumable:
        return "it cannot be continued exactly"
    if job.deltas > MAX_PARKED_DELTAS:
        return f"it has more than {MAX_PARKED_DELTAS} deltas to put back"
    if job.is_continued and now_s - job.began_s < MIN_RUN_S:
        return f"it was put back before and has run for less than {MIN_RUN_S:.0f} s"
    return ""


def preemptible(jobs: Iterable[RunningJob], now_s: float) -> list[RunningJob]:
    """The jobs that may be preempted, the youngest first: these lose the least work."""
    allowed = [job for job in jobs if job.texts and not obstacle(job, now_s)]
    return sorted(allowed, key=lambda job: (-job.began_s, job.id))


def choose_victims(jobs: Sequence[RunningJob], texts: int, now_s: float) -> Victims:
    """Choose the youngest batch jobs whose choices together free `texts` places; fewer if there are no more."""
    if texts <= 0:
        return Victims((), "no place is needed")
    chosen: list[RunningJob] = []
    for job in preemptible(jobs, now_s):
        if sum(each.texts for each in chosen) >= texts:
            break
        chosen.append(job)
    if not chosen:
        return Victims((), f"{texts} places are needed, and none of {len(jobs)} jobs may be preempted")
    freed = sum(each.texts for each in chosen)
    return Victims(
        tuple([job.id for job in chosen]),
        f"{texts} places are needed for lane interactive: the {len(chosen)} youngest batch jobs free {freed}",
    )
