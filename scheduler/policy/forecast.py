"""Queue-time forecast: the time until waiting jobs are begun by a given number of workers, and the workers needed.

The work ahead of a job is what waits in its lane and in higher ones, in tokens; while it waits, new jobs of higher
lanes overtake it. With n workers of c slots, each slot computing p tokens a second,

    time to clear = work not taken by free slots / (n c p - tokens a second arriving in higher lanes)
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

from scheduler.policy.demand import Demand, cannot_wait
from scheduler.policy.limits import ScalingLimits
from scheduler.policy.snapshot import LaneLoad, Snapshot

MIN_TARGET_SHARE = 0.1
"""Minimum share of its target that a late lane still gets, so that it asks for at most ten times the workers."""
RESERVED_FROM = "batch"
"""The lane that may not fill the slots which workers reserve."""


@dataclass(frozen=True, slots=True)
class Ahead:
    """The work to be done before a job is begun, and the time limit for it."""

    lane: str
    jobs: int
    """Including the job itself."""
    tokens: float
    overtaking: float
    """Tokens a second that arrive in higher lanes."""
    within_s: float
    why: str


def clear_s(ahead: Ahead, workers: int, demand: Demand, running: int) -> float:
    """Seconds until `workers` ready workers have begun the last of these jobs; infinite: never.

    While the pace is unknown, jobs begin at once in free slots, or never.
    """
    slots = workers * demand.capacity
    free = max(0, slots - running)
    if ahead.jobs <= free:
        return 0.0
    rate = slots * demand.pace - ahead.overtaking
    return ahead.tokens * (1 - free / ahead.jobs) / rate if rate > 0 else math.inf


def wait_s(snapshot: Snapshot, demand: Demand, workers: int) -> dict[str, float]:
    """Seconds, by lane, until `workers` workers begin a job put now, after all in its lane and in higher ones. Slots
    that workers reserve from lane batch are not free for it."""
    reserved = workers * sum(worker.reserved for worker in snapshot.ready) / max(1, len(snapshot.ready))
    waits, jobs, tokens, overtaking = {}, 0, 0.0, 0.0
    for lane in snapshot.lanes:
        size = demand.size(lane.name)
        jobs, tokens = jobs + lane.waiting, tokens + lane.waiting * size
        ahead = Ahead(lane.name, jobs + 1, tokens + size, overtaking, 0.0, "")
        kept = lane.running + round(reserved) if lane.name == RESERVED_FROM else 0
        waits[lane.name] = clear_s(ahead, workers, demand, max(snapshot.running, kept))
        overtaking += demand.rate(lane.name) * size
    return waits


def workers_for(ahead: Ahead, demand: Demand, running: int, max_workers: int) -> int:
    """The fewest workers that begin these jobs within their time limit, at most `max_workers`."""
    return bisect_left(range(max_workers), True, key=lambda n: clear_s(ahead, n, demand, running) <= ahead.within_s)


def constraints(snapshot: Snapshot, demand: Demand, limits: ScalingLimits) -> Iterator[Ahead]:
    """The work with a time limit: each lane's queue under its queue-time target, and the nearest deadlines."""
    jobs, tokens, overtaking = 0, 0.0, 0.0
    for lane in snapshot.lanes:
        size = demand.size(lane.name)
        if lane.waiting:
            whole = jobs + lane.waiting, tokens + lane.waiting * size
            yield Ahead(lane.name, *whole, overtaking, *_target(lane, demand, limits))
            for due in lane.due:
                before = min(due.ahead, lane.waiting - 1) + 1
                why = f"{before} must be begun within {due.in_s:.0f} s for a deadline"
                yield Ahead(lane.name, jobs + before, tokens + before * size, overtaking, max(0.0, due.in_s), why)
        jobs, tokens = jobs + lane.waiting, tokens + lane.waiting * size
        overtaking += demand.rate(lane.name) * size


def _target(lane: LaneLoad, demand: Demand, limits: ScalingLimits) -> tuple[float, str]:
    target = limits.targets.get(lane.name, math.inf)
    waiting = f"{lane.waiting} {lane.name} waiting (oldest {lane.oldest_s:.1f} s)"
    if target == math.inf:
        return target, waiting
    if cannot_wait(lane.name, demand, limits):  # too late for these jobs: a new worker only shortens the delay
        return demand.cold_s(limits), f"{waiting}, to be begun while one more would start"
    return max(target - lane.oldest_s, MIN_TARGET_SHARE * target), f"{waiting}, to be begun within {target:g} s"
