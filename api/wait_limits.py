"""Wait limits: finds out, before anything is queued, that a request cannot start in the time that it allows.

A request is refused if no worker would begin it at once, which the store finds out as it would accept it, and if the
waits that were measured lately say so: nine of ten jobs with its estimate wait longer than its limit. Without enough
measured waits, it is refused if the estimate is more than TRUSTED_FACTOR times the limit and no further worker is on
its way. Without a fresh plan, or while the model sleeps (its first job wakes it), the request is accepted.
"""

from __future__ import annotations

from typing import NamedTuple

from api.openai.wait import Wait
from api.services import Services
from api.waits.calibration import TRUSTED_FACTOR
from streaming.errors import Unavailable
from streaming.jobs.job import Job


class WaitLimit(NamedTuple):
    """The time that a request allows until its start."""

    field: str
    ms: int


class OutOfReach(NamedTuple):
    """A limit within which a job would not start, unless it starts at once, and its expected wait."""

    limit: WaitLimit
    wait: Wait


def limit_of(job: Job) -> WaitLimit | None:
    """Return the tighter limit of a job; None if it has none. The time to compute the answer is not counted."""
    if job.max_queue_ms is None and job.deadline_ms is None:
        return None
    limits = (("queue.max_queue_ms", job.max_queue_ms), ("queue.deadline_ms", job.deadline_ms))
    given = [WaitLimit(field, ms) for field, ms in limits if ms is not None]
    return min(given, key=lambda limit: limit.ms, default=None)


def exceeds(wait: Wait | None, limit: WaitLimit, *, settled: bool = False) -> bool:
    """Whether even the low end of the wait's band is longer than the limit. `settled`: no worker is on its way, so that
    an estimate without a band can be far too long."""
    if wait is None:
        return False
    if wait.low_ms is not None:
        return wait.low_ms > limit.ms
    return settled and wait.eta_ms > TRUSTED_FACTOR * limit.ms


async def out_of_reach(services: Services, job: Job) -> OutOfReach | None:
    """Return the limit that the job exceeds unless it starts at once; None if it may start in time.

    The lane's wait alone refuses nothing, because jobs may have left the lane since, and because a job with a tight
    limit goes before others: those that would start before it are counted now.
    """
    limit, waits = limit_of(job), services.waits
    if limit is None or not waits.plans.can_judge(job.model):
        return None
    settled = waits.has_all_workers(job.model)
    if not exceeds(waits.wait(job), limit, settled=settled):
        return None
    try:
        waiting = await services.job_reader.expected_place(job, services.cards.get(job.model))
    except Unavailable:
        return None  # the put will find out
    wait = waits.wait(job, waiting)
    return OutOfReach(limit, wait) if wait is not None and exceeds(wait, limit, settled=settled) else None
