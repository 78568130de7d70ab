"""How long what waits will take: the time to clear a lane with a given number of workers, and how many it takes.

Work that goes before a job is what waits in its lane and in higher ones, in tokens; while it waits, new jobs of higher
lanes overtake it. With n workers of c slots, each slot giving p tokens a second,

    time to clear = work not taken by free slots / (n c p - tokens a second arriving in higher lanes)
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

from scheduler.policy.demand import Demand, tight
from scheduler.policy.limits import ScalingLimits
from scheduler.policy.snapshot import LaneLoad, Snapshot

LEAST_SHARE = 0.1
"""Of its target that a lane behind its target is still given: catching up costs at most ten times the pace."""


@dataclass(frozen=True, slots=True)
class Ahead:
    """What is to be done before a job is begun, and the time there is for it."""

    lane: str
    jobs: int
    """With the job itself."""
    tokens: float
    overtaking: float
    """Tokens a second that arrive in higher lanes."""
    within_s: float
    why: str


def clear_s(ahead: Ahead, workers: int, demand: Demand, running: int) -> float:
    """Seconds until the last of these jobs is begun by so many workers, all of them ready; infinite: never.

    Before the pace of slots is known, jobs are begun at once in free slots, or never.
    """
    slots = workers * demand.capacity
    free = max(0, slots - running)
    if ahead.jobs <= free:
        return 0.0
    rate = slots * demand.pace - ahead.overtaking
    return ahead.tokens * (1 - free / ahead.jobs) / rate if rate > 0 else math.inf


def wait_s(snapshot: Snapshot, demand: Demand, workers: int) -> dict[str, float]:
    """Seconds, by lane, until so many workers begin a job that is put now, behind everything in its lane and above."""
    waits, jobs, tokens, overtaking = {}, 0, 0.0, 0.0
    for lane in snapshot.lanes:
        size = demand.size(lane.name)
        jobs, tokens = jobs + lane.waiting, tokens + lane.waiting * size
        ahead = Ahead(lane.name, jobs + 1, tokens + size, overtaking, 0.0, "")
        waits[lane.name] = clear_s(ahead, workers, demand, snapshot.running)
        overtaking += demand.rate(lane.name) * size
    return waits


def workers_for(ahead: Ahead, demand: Demand, running: int, most: int) -> int:
    """The fewest workers, at most `most`, that begin these jobs within the time there is; `most` if none can."""
    return bisect_left(range(most), True, key=lambda n: clear_s(ahead, n, demand, running) <= ahead.within_s)


def constraints(snapshot: Snapshot, demand: Demand, limits: ScalingLimits) -> Iterator[Ahead]:
    """Everything that has to be begun by some time: each lane's queue-time target, and the nearest deadlines."""
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
    if tight(lane.name, demand, limits):  # a worker ordered now is too late for these: it is to end the delay soon
        return demand.cold_s(limits), f"{waiting}, to be begun while one more would start"
    return max(target - lane.oldest_s, LEAST_SHARE * target), f"{waiting}, to be begun within {target:g} s"
