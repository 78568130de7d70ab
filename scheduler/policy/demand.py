"""Demand estimator: smoothed estimates of a model's arrivals, job sizes and pace, updated from each snapshot.

A job's size is its tokens, prompt and answer together. A slot's pace is completed tokens per second that jobs held it,
so a job of mean size takes size / pace seconds in a slot (Little's law).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from scheduler.policy import rush
from scheduler.policy.limits import ScalingLimits
from scheduler.policy.rush import BUCKET_S, BurstConfig, Rush
from scheduler.policy.snapshot import LaneLoad, Snapshot
from streaming.fleet.process import Process, Served

RATE_WINDOW_S = 60.0
"""Time constant of arrival rates."""
SIZE_WINDOW_S = 600.0
"""Time constant of job sizes and of the pace."""
MIN_WEIGHT = 1e-100
"""A decayed weight below this counts as zero (after days without a job): dividing by it would overflow."""
MIN_QUEUED_S = 2.0
"""A job that has waited longer shows that slots which look free are not usable."""
MAX_KV_SHARE = 0.9
"""Share of the KV cache that may be planned with, because jobs grow."""
KEEP_COLD_STARTS = 5.0
"""A spare worker is kept for at least this many cold starts."""
MAX_REMEMBERED = 256
"""Workers whose counters are remembered."""
NEWEST_WEIGHT = 0.3
"""Weight of the newest start in the moving average."""
ORDER_TIMEOUT_S = 3600.0
"""An order older than this is dropped."""


@dataclass(frozen=True, slots=True)
class Starts:
    """Cold starts, each from ordering a worker until it is ready: the open orders, and the average of past starts."""

    ordered: tuple[float, ...] = ()
    """Times of the open orders, oldest first."""
    known: frozenset[str] | None = None
    """Workers seen ready; None before the first snapshot."""
    cold_s: float | None = None
    """Moving average of recent starts in seconds; None: none was seen yet."""

    def wake_s(self, assumed_s: float, now: float) -> float:
        """Estimated seconds until the next worker is ready; a whole cold start if none is ordered."""
        cold_s = assumed_s if self.cold_s is None else self.cold_s
        return max(0.0, cold_s - (now - self.ordered[0])) if self.ordered else cold_s

    def with_ready(self, ready: Iterable[str], now: float) -> Starts:
        """Match workers that are ready for the first time with the oldest orders."""
        ready = frozenset(ready)
        if self.known is None:
            return replace(self, known=ready)
        ordered = [when for when in self.ordered if now - when < ORDER_TIMEOUT_S]
        cold_s = self.cold_s
        for _ in range(min(len(ready - self.known), len(ordered))):
            took = now - ordered.pop(0)
            cold_s = took if cold_s is None else (1 - NEWEST_WEIGHT) * cold_s + NEWEST_WEIGHT * took
        return Starts(tuple(ordered), ready | self.known if len(self.known) < 1000 else ready, cold_s)

    def with_orders(self, change: int, now: float) -> Starts:
        """Order `change` more workers, or cancel the newest orders if it is negative."""
        if change >= 0:
            return replace(self, ordered=(*self.ordered, *[now] * change))
        return replace(self, ordered=self.ordered[: max(0, len(self.ordered) + change)])


@dataclass(frozen=True, slots=True)
class Flow:
    """Estimates of one lane's jobs."""

    added: int = 0
    rate: float = 0.0
    """Arrivals a second."""
    jobs: float = 0.0
    tokens: float = 0.0
    """Tokens of jobs that ended, and in `jobs` their number; both decay with age."""
    there: int = 0
    """Jobs running or waiting in the last snapshot."""
    running: int = 0
    offered: float = 0.0
    """Jobs that would run now had each been begun on arrival."""

    @property
    def size(self) -> float:
        """Mean tokens of a job; 0 while none has ended."""
        return self.tokens / self.jobs if self.jobs > MIN_WEIGHT else 0.0


@dataclass(frozen=True, slots=True)
class Demand:
    """All estimates of one model; `learn` updates them."""

    at: float | None = None
    flows: Mapping[str, Flow] = field(default_factory=dict)
    served: Mapping[str, Mapping[str, Served]] = field(default_factory=dict)
    """Last values of the counters, by worker and lane."""
    held_s: float = 0.0
    """Seconds that jobs held slots, summed over jobs; decays with age."""
    slots: int = 0
    """Slots of one worker, as last reported."""
    kv_share: float = 0.0
    """Mean share of a worker's KV cache that one job takes; 0: not limited."""
    learned: int | None = None
    """Jobs that one worker was seen to hold while others waited; None: not seen."""
    busy_at: float = 0.0
    """When a job was last present."""
    rushes: Mapping[str, Rush] = field(default_factory=dict)
    """For each lane whose jobs cannot wait for a new worker: bursts of its jobs and those of higher lanes."""
    starts: Starts = field(default_factory=Starts)

    @property
    def capacity(self) -> int:
        """Jobs that one worker runs at once: the least of its slots, its KV cache and what was seen; 0: unknown."""
        capacity = self.slots
        if self.kv_share > 0:
            capacity = min(capacity, max(1, int(MAX_KV_SHARE / self.kv_share)))
        return capacity if self.learned is None else min(capacity, self.learned)

    @property
    def pace(self) -> float:
        """Tokens a second of one occupied slot; 0: unknown."""
        tokens = sum(flow.tokens for flow in self.flows.values())
        return tokens / self.held_s if self.held_s > MIN_WEIGHT else 0.0

    def size(self, lane: str) -> float:
        """Mean tokens of a job of this lane, or of all lanes while none of it has ended; 0: unknown."""
        flow = self.flows.get(lane)
        if flow is not None and flow.jobs > MIN_WEIGHT:
            return flow.size
        jobs = sum(flow.jobs for flow in self.flows.values())
        return sum(flow.tokens for flow in self.flows.values()) / jobs if jobs > MIN_WEIGHT else 0.0

    def rate(self, lane: str) -> float:
        """Arrivals a second."""
        flow = self.flows.get(lane)
        return 0.0 if flow is None else flow.rate

    def cold_s(self, limits: ScalingLimits) -> float:
        """Seconds of a cold start, as measured or as the settings assume."""
        return limits.cold_start_s if self.starts.cold_s is None else self.starts.cold_s


def keep_s(demand: Demand, limits: ScalingLimits) -> float:
    """How long an unneeded worker is kept, in seconds, given what a new cold start would cost."""
    return max(limits.idle_s, KEEP_COLD_STARTS * demand.cold_s(limits))


def cannot_wait(lane: str, demand: Demand, limits: ScalingLimits) -> bool:
    """Whether the lane's queue-time target is shorter than a cold start, so that only existing workers meet it."""
    return limits.targets.get(lane, math.inf) <= demand.cold_s(limits)


def learn(demand: Demand, snapshot: Snapshot, limits: ScalingLimits, now: float) -> Demand:
    """Update the estimates with a snapshot taken at `now` (seconds of any monotonic clock)."""
    demand = replace(demand, starts=demand.starts.with_ready((worker.worker_id for worker in snapshot.ready), now))
    since_s = max(0.0, now - demand.at) if demand.at is not None else 0.0
    first = demand.at is None
    ended = {} if first else _ended(demand.served, snapshot.workers)
    keep = math.exp(-since_s / SIZE_WINDOW_S)
    running = sum(worker.running for worker in snapshot.workers)
    flows = {lane.name: _flow(demand.flows.get(lane.name), lane, ended, since_s) for lane in snapshot.lanes}
    demand = replace(demand, flows=flows)
    held = concurrent_demand(snapshot, demand)
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
    """By lane, jobs that occupy slots. Jobs that workers hold beyond their slots are prefetched and do not count."""
    room = len(snapshot.ready) * demand.capacity + snapshot.elsewhere
    share = min(1.0, room / snapshot.running) if snapshot.running and snapshot.ready and room else 1.0
    return {lane.name: lane.running * share for lane in snapshot.lanes}


def concurrent_demand(snapshot: Snapshot, demand: Demand) -> dict[str, float]:
    """By lane, jobs that need a slot now: those that run, and the waiting ones that would run had there been room.

    The other waiting jobs are a backlog that grew for lack of room; it is cleared within its targets, not at once.
    """
    run = in_slots(snapshot, demand)
    late = {name: max(0.0, flow.offered - flow.running) for name, flow in demand.flows.items()}
    return {lane.name: run[lane.name] + min(lane.waiting, late[lane.name]) for lane in snapshot.lanes}


def _ended(before: Mapping[str, Mapping[str, Served]], workers: tuple[Process, ...]) -> dict[str, tuple[int, int]]:
    """Jobs and tokens by lane that ended since the last snapshot. All counts of a new worker are included; those that a
    lost worker made after its last report are missing."""
    ended: dict[str, tuple[int, int]] = {}
    for worker in workers:
        known = before.get(worker.worker_id, {})
        for lane, served in worker.served.items():
            past = known.get(lane, Served())
            jobs, tokens = ended.get(lane, (0, 0))
            ended[lane] = (
                jobs + max(0, served.jobs - past.jobs),
                tokens + max(0, served.tokens - past.tokens),
            )
    return ended


def _remembered(
    before: Mapping[str, Mapping[str, Served]], workers: tuple[Process, ...]
) -> Mapping[str, Mapping[str, Served]]:
    """The counters to remember. A worker that is missing for a moment is kept, so that its jobs do not count twice."""
    now = {worker.worker_id: worker.served for worker in workers}
    return {**before, **now} if len(before) < MAX_REMEMBERED else now


def _flow(flow: Flow | None, lane: LaneLoad, ended: Mapping[str, tuple[int, int]], since_s: float) -> Flow:
    there = lane.running + lane.waiting
    if flow is None:
        return Flow(lane.added, there=there, running=lane.running, offered=there)
    keep = math.exp(-since_s / SIZE_WINDOW_S)
    jobs, tokens = ended.get(lane.name, (0, 0))
    rate, came = flow.rate, max(0, lane.added - flow.added)  # fewer than before: the store has lost data
    if since_s > 0:
        share = -math.expm1(-since_s / RATE_WINDOW_S)
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
    """Assumes that waiting jobs would have ended at the same rate as the running ones."""
    gone = max(0, flow.there + came - lane.running - lane.waiting)
    stay = 1 - min(1.0, gone / flow.running) if flow.running else 1.0
    return max(flow.offered * stay + came, lane.running) if lane.waiting else lane.running


def _rushes(demand: Demand, held: Mapping[str, float], limits: ScalingLimits, now: float) -> dict[str, Rush]:
    """Bursts of each lane that cannot wait. Their horizon is a cold start minus the lane's queue-time target."""
    rushes, jobs, cold_s = {}, 0.0, demand.cold_s(limits)
    for lane, more in held.items():
        jobs += more
        if cannot_wait(lane, demand, limits):
            horizon_s = max(cold_s - limits.targets[lane], BUCKET_S)
            config = BurstConfig(horizon_s, keep_s(demand, limits), limits.cover, demand.capacity)
            rushes[lane] = rush.follow(demand.rushes.get(lane, Rush()), jobs, config, now)
    return rushes


def _slots(snapshot: Snapshot, known: int) -> int:
    ready = [worker.slots for worker in snapshot.ready if worker.slots]
    if not ready and not known:  # those of a shape that is about to take jobs for the first time
        ready = [worker.slots for worker in snapshot.workers if worker.slots and worker.shape]
    return sum(ready) // len(ready) if ready else known


def _kv_share(snapshot: Snapshot, known: float, since_s: float) -> float:
    """Mean share of a KV cache that a running job takes, smoothed."""
    limited = [worker for worker in snapshot.ready if worker.kv_tokens and worker.running]
    if not limited:
        return known
    used = sum(worker.kv_used / worker.kv_tokens for worker in limited) / sum(worker.running for worker in limited)
    return used if known == 0 else known + (1 - math.exp(-since_s / RATE_WINDOW_S)) * (used - known)


def _learned(snapshot: Snapshot, known: int | None) -> int | None:
    """Jobs that a full worker holds; raised whenever a worker holds more. Not updated while another shape holds jobs,
    because workers report their numbers only every two seconds."""
    if not snapshot.ready or not snapshot.running or snapshot.elsewhere:
        return known
    seen = max(1, snapshot.running // len(snapshot.ready))
    if snapshot.waiting and snapshot.oldest_s >= MIN_QUEUED_S:
        return seen
    return None if known is None else max(known, seen)
