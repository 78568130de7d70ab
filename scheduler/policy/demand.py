"""What was learned of a model's demand and of its workers' pace: windowed estimates, handed from one look to the next.

A job's size is tokens, prompt and answer together. A slot's pace is tokens ended over the time jobs were held, so a
job of the mean size takes size / pace seconds in a slot (Little's law).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from scheduler.policy import rush, starts
from scheduler.policy.limits import ScalingLimits
from scheduler.policy.rush import BUCKET_S, BurstConfig, Rush
from scheduler.policy.snapshot import LaneLoad, ServedCount, Snapshot, WorkerLoad
from scheduler.policy.starts import Starts

RATE_S = 60.0
"""Time constant of arrival rates."""
SIZE_S = 600.0
"""Time constant of what is known of jobs' sizes and slots' pace."""
FADED = 1e-100
"""What fades is gone below this, after days without a job: to divide by it would overflow."""
PATIENCE_S = 2.0
"""A job that has waited longer is not just about to be claimed: the slots that look free are not to be had."""
KV_SHARE = 0.9
"""Of a cache that may be counted on: jobs grow."""
IDLE_STARTS = 5.0
"""A spare worker is kept for so many cold starts at the least."""
MAX_REMEMBERED = 256
"""Workers whose counters are kept."""


@dataclass(frozen=True, slots=True)
class Flow:
    """What is known of one lane's jobs."""

    added: int = 0
    rate: float = 0.0
    """Arrivals a second."""
    jobs: float = 0.0
    tokens: float = 0.0
    """Of jobs that ended lately; older ones count less."""
    there: int = 0
    """Jobs run or waiting at the last look."""
    running: int = 0
    offered: float = 0.0
    """Jobs that would run now had each been begun when it came."""

    @property
    def size(self) -> float:
        """Tokens of a job in the mean; 0 while none has ended."""
        return self.tokens / self.jobs if self.jobs > FADED else 0.0


@dataclass(frozen=True, slots=True)
class Demand:
    """Made by `learn`, from nothing at first."""

    at: float | None = None
    flows: Mapping[str, Flow] = field(default_factory=dict)
    served: Mapping[str, Mapping[str, ServedCount]] = field(default_factory=dict)
    """The counters last seen, by worker and lane."""
    held_s: float = 0.0
    """Seconds jobs were held lately, summed over jobs; older ones count less."""
    slots: int = 0
    """Of one worker, as last seen."""
    kv_share: float = 0.0
    """Of a worker's cache that one job takes in the mean; 0: not limited."""
    learned: int | None = None
    """Jobs one worker was seen to hold while others waited; None: not seen."""
    busy_at: float = 0.0
    """When there last was a job."""
    rushes: Mapping[str, Rush] = field(default_factory=dict)
    """Of the jobs of a lane and those above it, for each lane whose jobs cannot wait for a new worker."""
    starts: Starts = field(default_factory=Starts)

    @property
    def capacity(self) -> int:
        """Jobs one worker runs at once: its slots, or as many as its cache holds, or as were seen; 0: unknown."""
        capacity = self.slots
        if self.kv_share > 0:
            capacity = min(capacity, max(1, int(KV_SHARE / self.kv_share)))
        return capacity if self.learned is None else min(capacity, self.learned)

    @property
    def pace(self) -> float:
        """Tokens a second of one slot that is held; 0: unknown."""
        tokens = sum(flow.tokens for flow in self.flows.values())
        return tokens / self.held_s if self.held_s > FADED else 0.0

    def size(self, lane: str) -> float:
        """Tokens of a job of this lane in the mean, or of any lane while none of it has ended; 0: unknown."""
        flow = self.flows.get(lane)
        if flow is not None and flow.jobs > FADED:
            return flow.size
        jobs = sum(flow.jobs for flow in self.flows.values())
        return sum(flow.tokens for flow in self.flows.values()) / jobs if jobs > FADED else 0.0

    def rate(self, lane: str) -> float:
        """Arrivals a second."""
        flow = self.flows.get(lane)
        return 0.0 if flow is None else flow.rate

    def cold_s(self, limits: ScalingLimits) -> float:
        """From deciding on a worker to having it: as measured, or as the settings assume."""
        return limits.cold_start_s if self.starts.cold_s is None else self.starts.cold_s


def keep_s(demand: Demand, limits: ScalingLimits) -> float:
    """How long a worker that is not needed is kept, for what it would cost to get it back."""
    return max(limits.idle_s, IDLE_STARTS * demand.cold_s(limits))


def tight(lane: str, demand: Demand, limits: ScalingLimits) -> bool:
    """Whether jobs of this lane may wait less than a new worker takes to start: only workers that are there help."""
    return limits.targets.get(lane, math.inf) <= demand.cold_s(limits)


def learn(demand: Demand, snapshot: Snapshot, limits: ScalingLimits, now: float) -> Demand:
    """What is known after one more look at `now` (seconds of any clock that only goes forward)."""
    demand = replace(demand, starts=starts.seen(demand.starts, (worker.id for worker in snapshot.ready), now))
    since_s = max(0.0, now - demand.at) if demand.at is not None else 0.0
    first = demand.at is None
    ended = {} if first else _ended(demand.served, snapshot.workers)
    keep = math.exp(-since_s / SIZE_S)
    running = sum(worker.running for worker in snapshot.workers)
    flows = {lane.name: _flow(demand.flows.get(lane.name), lane, ended, since_s) for lane in snapshot.lanes}
    demand = replace(demand, flows=flows)
    held = asking(snapshot, demand)
    return replace(
        demand,
        at=now,
        served=_remembered(demand.served, snapshot.workers),
        held_s=demand.held_s * keep + running * since_s,
        slots=_slots(snapshot, demand.slots),
        kv_share=_kv_share(snapshot, demand.kv_share, since_s),
        learned=_learned(snapshot, demand.learned),
        busy_at=now if first or snapshot.waiting or snapshot.running else demand.busy_at,
        rushes=_rushes(demand, held, limits, now),
    )


def in_slots(snapshot: Snapshot, demand: Demand) -> dict[str, float]:
    """Jobs by lane that are run. What workers hold beyond their slots is prefetched and no reason to grow."""
    room = len(snapshot.ready) * demand.capacity + snapshot.elsewhere
    share = min(1.0, room / snapshot.running) if snapshot.running and snapshot.ready and room else 1.0
    return {lane.name: lane.running * share for lane in snapshot.lanes}


def asking(snapshot: Snapshot, demand: Demand) -> dict[str, float]:
    """Jobs by lane there should be room for at once: those that are run, and of those that wait as many as would run
    now had there been room. The rest is a queue that grew because there was none: to be cleared, but not at once."""
    run = in_slots(snapshot, demand)
    late = {name: max(0.0, flow.offered - flow.running) for name, flow in demand.flows.items()}
    return {lane.name: run[lane.name] + min(lane.waiting, late[lane.name]) for lane in snapshot.lanes}


def _ended(
    before: Mapping[str, Mapping[str, ServedCount]], workers: tuple[WorkerLoad, ...]
) -> dict[str, tuple[int, int]]:
    """Jobs and tokens by lane since the last look. What a worker that was never seen before has ended counts too: it
    is new. What one ended after it was last seen is lost with it."""
    ended: dict[str, tuple[int, int]] = {}
    for worker in workers:
        known = before.get(worker.id, {})
        for lane, served in worker.served.items():
            past = known.get(lane, ServedCount())
            jobs, tokens = ended.get(lane, (0, 0))
            ended[lane] = (
                jobs + max(0, served.jobs - past.jobs),
                tokens + max(0, served.tokens - past.tokens),
            )
    return ended


def _remembered(
    before: Mapping[str, Mapping[str, ServedCount]], workers: tuple[WorkerLoad, ...]
) -> Mapping[str, Mapping[str, ServedCount]]:
    """A worker that is not seen for a moment must not count twice when it is back; those long gone are forgotten."""
    now = {worker.id: worker.served for worker in workers}
    return {**before, **now} if len(before) < MAX_REMEMBERED else now


def _flow(flow: Flow | None, lane: LaneLoad, ended: Mapping[str, tuple[int, int]], since_s: float) -> Flow:
    there = lane.running + lane.waiting
    if flow is None:
        return Flow(lane.added, there=there, running=lane.running, offered=there)
    keep = math.exp(-since_s / SIZE_S)
    jobs, tokens = ended.get(lane.name, (0, 0))
    rate, came = flow.rate, max(0, lane.added - flow.added)  # fewer than before: the store has lost data
    if since_s > 0:
        share = -math.expm1(-since_s / RATE_S)
        rate += came * (share / since_s) - share * rate  # in this order: `came` over next to no time would overflow
    return Flow(
        lane.added,
        rate,
        flow.jobs * keep + jobs,
        flow.tokens * keep + tokens,
        there,
        lane.running,
        _offered(flow, lane, came),
    )


def _offered(flow: Flow, lane: LaneLoad, came: int) -> float:
    """Jobs that wait would have ended in the same share as those that ran."""
    gone = max(0, flow.there + came - lane.running - lane.waiting)
    stay = 1 - min(1.0, gone / flow.running) if flow.running else 1.0
    return max(flow.offered * stay + came, lane.running) if lane.waiting else lane.running


def _rushes(demand: Demand, held: Mapping[str, float], limits: ScalingLimits, now: float) -> dict[str, Rush]:
    """A job that may wait for a while needs room only for what comes within a cold start less that while."""
    rushes, jobs, cold_s = {}, 0.0, demand.cold_s(limits)
    for lane, more in held.items():
        jobs += more
        if tight(lane, demand, limits):
            horizon_s = max(cold_s - limits.targets[lane], BUCKET_S)
            lens = BurstConfig(horizon_s, keep_s(demand, limits), limits.cover, demand.capacity)
            rushes[lane] = rush.follow(demand.rushes.get(lane, Rush()), jobs, lens, now)
    return rushes


def _slots(snapshot: Snapshot, known: int) -> int:
    ready = [worker.slots for worker in snapshot.ready if worker.slots]
    if not ready and not known:  # those of a shape that is about to take jobs for the first time
        ready = [worker.slots for worker in snapshot.workers if worker.slots and worker.shape]
    return sum(ready) // len(ready) if ready else known


def _kv_share(snapshot: Snapshot, known: float, since_s: float) -> float:
    """What the running jobs take of the caches, smoothed."""
    limited = [worker for worker in snapshot.ready if worker.kv_tokens and worker.running]
    if not limited:
        return known
    used = sum(worker.kv_used / worker.kv_tokens for worker in limited) / sum(worker.running for worker in limited)
    return used if known == 0 else known + (1 - math.exp(-since_s / RATE_S)) * (used - known)


def _learned(snapshot: Snapshot, known: int | None) -> int | None:
    """What one worker holds when it can hold no more; corrected upwards whenever one is seen to hold more. Nothing is
    learned while some jobs are another shape's: workers say how many they hold only every two seconds."""
    if not snapshot.ready or not snapshot.running or snapshot.elsewhere:
        return known
    seen = max(1, snapshot.running // len(snapshot.ready))
    if snapshot.waiting and snapshot.oldest_s >= PATIENCE_S:
        return seen
    return None if known is None else max(known, seen)
