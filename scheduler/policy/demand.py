"""Demand estimator: a model's arrivals, job sizes, pace, bursts and cold starts, and how many workers clear its queue.

A job's size is its tokens, prompt and answer together. A slot's pace is completed tokens per second that jobs held it,
so a job of mean size takes size / pace seconds in a slot (Little's law).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from scheduler.policy.snapshot import ScalingLimits, Snapshot
from streaming.fleet.process import Process, Served
from streaming.order import LaneDepth, Priority, WaitingDeadline

BUCKET_S = 5.0
"""Time resolution of peaks."""
HISTORY_S = 3 * 3600.0
"""How far back bursts are remembered."""
MAX_SAMPLES = 1000
"""Maximum of windows remembered."""
SMOOTHING_JOBS = 8
"""Jobs added to both sides of a growth ratio, so that one job becoming three is no burst; at most one worker's jobs."""
PEAK_CAP = 1.25
"""A burst is expected to end at this factor of the highest peak in the history."""
INITIAL_GROWTH = 1.4
"""The growth assumed while there is no history."""
MIN_WINDOWS = 30
"""Windows from which on the history alone determines the growth."""

Peaks: TypeAlias = tuple[tuple[float, float], ...]
"""(time, value) pairs with falling values: the first is the maximum of the time looked back on."""


def with_peak(peaks: Peaks, value: float, now: float, while_s: float) -> Peaks:
    """Add a value to the peaks, and drop those older than `while_s` seconds."""
    begin = next((i for i, (at, _) in enumerate(peaks) if at > now - while_s), len(peaks))
    end = len(peaks)
    while end > begin and peaks[end - 1][1] <= value:
        end -= 1
    if end > begin and now - peaks[end - 1][0] < BUCKET_S and end == len(peaks):
        return peaks[begin:]  # a lower value within the resolution
    return (*peaks[begin:end], (now, value))


def highest(peaks: Peaks) -> float:
    """The highest peak; 0 if there is none."""
    return peaks[0][1] if peaks else 0.0


@dataclass(frozen=True, slots=True)
class Rush:
    """State of the burst estimator. Times in seconds of the caller's clock."""

    peaks: Peaks = ()
    """Recent peaks of concurrent jobs."""
    began: float | None = None
    """Start of the current window, which lasts one horizon."""
    base: float = 0.0
    """The highest peak at its start."""
    peak: float = 0.0
    """The maximum of concurrent jobs in it."""
    past: tuple[tuple[float, float], ...] = ()
    """(growth, base) of each past window."""
    heights: Peaks = ()
    """Peaks of the whole remembered history."""
    growth: float = INITIAL_GROWTH
    """The quantile `cover` of past growth."""
    smoothing: int = SMOOTHING_JOBS

    @property
    def usual(self) -> float:
        """The highest recent peak of concurrent jobs."""
        return highest(self.peaks)

    @property
    def room(self) -> float:
        """Jobs to have room for: the last peak and a burst on top of it, capped by the history once there is enough."""
        if self.usual <= 0:
            return 0.0
        grown = (self.usual + self.smoothing) * self.growth - self.smoothing
        return max(self.usual, min(grown, PEAK_CAP * highest(self.heights))) if len(self.past) >= MIN_WINDOWS else grown


def follow(rush: Rush, jobs: float, now: float, *, horizon_s: float, while_s: float, cover: float, each: int) -> Rush:
    """Add an observation to a burst estimate: `jobs` concurrent jobs at `now`.

    A worker ordered now is ready one cold start later. Jobs that may not wait so long are begun in time only if the
    pool already has room for all that arrive until then: the last peak of concurrent jobs times the growth on top of
    such a peak that recent history shows.

    Args:
        horizon_s: length of a window: room is needed for the jobs that arrive within this time.
        while_s: how long a peak is remembered.
        cover: share of the history, weighted by jobs, that stays within the growth.
        each: jobs that one worker runs at once.
    """
    before, smoothing = rush.usual, max(1, min(SMOOTHING_JOBS, each))
    peaks = with_peak(rush.peaks, jobs, now, while_s)
    heights = with_peak(rush.heights, jobs, now, HISTORY_S)
    rush = replace(rush, peaks=peaks, heights=heights, peak=max(rush.peak, jobs), smoothing=smoothing)
    if rush.began is None:
        return replace(rush, began=now, base=jobs, peak=jobs)
    if now - rush.began < horizon_s:
        return rush
    past = rush.past
    if rush.base > 0:
        most = max(MIN_WINDOWS, min(MAX_SAMPLES, int(HISTORY_S / horizon_s)))
        past = (*past, ((rush.peak + smoothing) / (rush.base + smoothing), rush.base))[-most:]
    growth = max(1.0, quantile(past, cover))
    if len(past) < MIN_WINDOWS:
        growth = max(growth, INITIAL_GROWTH)
    return replace(rush, began=now, base=max(before, jobs), peak=jobs, past=past, growth=growth)


def quantile(past: Sequence[tuple[float, float]], share: float) -> float:
    """The weighted quantile of (value, weight) entries; 0 if there are none."""
    left = share * sum(weight for _, weight in past)
    for value, weight in sorted(past):
        left -= weight
        if left <= 1e-9:
            return value
    return 0.0


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
"""Weight of the newest cold start in the moving average."""
ORDER_TIMEOUT_S = 3600.0
"""An order of a worker that is older than this is dropped."""


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
            return flow.tokens / flow.jobs
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
    keep = math.exp(-since_s / SIZE_WINDOW_S)
    running = sum(worker.running for worker in snapshot.workers)
    flows: dict[str, Flow] = {lane.priority: _flow(demand, lane, snapshot.workers, since_s) for lane in snapshot.lanes}
    demand = replace(demand, flows=flows)
    held = concurrent_demand(snapshot, demand)
    # A worker that is missing for a moment is remembered, so that its jobs do not count twice.
    before = demand.served if len(demand.served) < MAX_REMEMBERED else {}
    return replace(
        demand,
        at=now,
        served={**before, **{worker.worker_id: worker.served for worker in snapshot.workers}},
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
    return {lane.priority: lane.running * share for lane in snapshot.lanes}


def concurrent_demand(snapshot: Snapshot, demand: Demand) -> dict[str, float]:
    """By lane, jobs that need a slot now: those that run, and the waiting ones that would run had there been room.

    The other waiting jobs are a backlog that grew for lack of room; it is cleared within its targets, not at once.
    """
    run = in_slots(snapshot, demand)
    late = {name: max(0.0, flow.offered - flow.running) for name, flow in demand.flows.items()}
    return {lane.priority: run[lane.priority] + min(lane.waiting, late[lane.priority]) for lane in snapshot.lanes}


def _ended(before: Mapping[str, Mapping[str, Served]], workers: tuple[Process, ...], lane: str) -> tuple[int, int]:
    """Jobs and tokens of a lane that ended since the last snapshot. All counts of a new worker are included; those that
    a lost worker made after its last report are missing."""
    pairs = [(each.served.get(lane, Served()), before.get(each.worker_id, {}).get(lane, Served())) for each in workers]
    return (
        sum(max(0, served.jobs - past.jobs) for served, past in pairs),
        sum(max(0, served.tokens - past.tokens) for served, past in pairs),
    )


def _flow(demand: Demand, lane: LaneDepth, workers: tuple[Process, ...], since_s: float) -> Flow:
    flow, there = demand.flows.get(lane.priority), lane.running + lane.waiting
    if flow is None:
        return Flow(lane.added, there=there, running=lane.running, offered=there)
    keep = math.exp(-since_s / SIZE_WINDOW_S)
    jobs, tokens = _ended(demand.served, workers, lane.priority)
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


def _offered(flow: Flow, lane: LaneDepth, came: int) -> float:
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
            rushes[lane] = follow(
                demand.rushes.get(lane, Rush()), jobs, now, horizon_s=horizon_s, while_s=keep_s(demand, limits),
                cover=limits.cover, each=demand.capacity,
            )  # fmt: skip
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


MIN_TARGET_SHARE = 0.1
"""Minimum share of its target that a late lane still gets, so that it asks for at most ten times the workers."""
RESERVED_FROM = Priority.BATCH
"""The lane that may not fill the slots which workers reserve."""


@dataclass(frozen=True, slots=True)
class Ahead:
    """The work that waits before a job, in its lane and in higher ones, and the time limit for it."""

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

    With n workers of c slots, each slot computing p tokens a second, it is the work not taken by free slots divided by
    n c p less the tokens a second that arrive in higher lanes. While the pace is unknown, jobs begin at once in free
    slots, or never.
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
    waits: dict[str, float] = {}
    for lane, size, jobs, tokens, overtaking in _in_order(snapshot, demand):
        ahead = Ahead(lane.priority, jobs + lane.waiting + 1, tokens + lane.waiting * size + size, overtaking, 0.0, "")
        kept = lane.running + round(reserved) if lane.priority == RESERVED_FROM else 0
        waits[lane.priority] = clear_s(ahead, workers, demand, max(snapshot.running, kept))
    return waits


def _in_order(snapshot: Snapshot, demand: Demand) -> Iterator[tuple[LaneDepth, float, int, float, float]]:
    """Each lane with the size of its jobs, and of the higher lanes: waiting jobs, their tokens, arriving tokens a
    second."""
    jobs, tokens, overtaking = 0, 0.0, 0.0
    for lane in snapshot.lanes:
        size = demand.size(lane.priority)
        yield lane, size, jobs, tokens, overtaking
        jobs, tokens = jobs + lane.waiting, tokens + lane.waiting * size
        overtaking += demand.rate(lane.priority) * size


def workers_for(ahead: Ahead, demand: Demand, running: int, max_workers: int) -> int:
    """The fewest workers that begin these jobs within their time limit, at most `max_workers`."""
    return bisect_left(range(max_workers), True, key=lambda n: clear_s(ahead, n, demand, running) <= ahead.within_s)


def constraints(snapshot: Snapshot, demand: Demand, limits: ScalingLimits) -> Iterator[Ahead]:
    """The work with a time limit: each lane's queue under its queue-time target, and the nearest deadlines."""
    for lane, size, jobs, tokens, overtaking in _in_order(snapshot, demand):
        if lane.waiting:
            whole = jobs + lane.waiting, tokens + lane.waiting * size
            yield Ahead(lane.priority, *whole, overtaking, *_target(lane, demand, limits))
            for due in snapshot.due:
                if due.priority is lane.priority:
                    before, in_s = _up_to(due, lane), due.in_ms / 1000
                    why = f"{before} must be begun within {in_s:.0f} s for a deadline"
                    yield Ahead(lane.priority, jobs + before, tokens + before * size, overtaking, in_s, why)


def _up_to(due: WaitingDeadline, lane: LaneDepth) -> int:
    """Estimated number of jobs of its lane up to this one, if they arrived evenly since the oldest."""
    younger = min(1.0, due.age_ms / lane.oldest_ms) if lane.oldest_ms else 1.0
    return min(int(lane.waiting * (1 - younger)), lane.waiting - 1) + 1


def _target(lane: LaneDepth, demand: Demand, limits: ScalingLimits) -> tuple[float, str]:
    target = limits.targets.get(lane.priority, math.inf)
    waiting = f"{lane.waiting} {lane.priority} waiting (oldest {lane.oldest_s:.1f} s)"
    if target == math.inf:
        return target, waiting
    if cannot_wait(lane.priority, demand, limits):  # too late for these jobs: a new worker only shortens the delay
        return demand.cold_s(limits), f"{waiting}, to be begun while one more would start"
    return max(target - lane.oldest_s, MIN_TARGET_SHARE * target), f"{waiting}, to be begun within {target:g} s"
