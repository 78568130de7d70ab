"""Scaling policy of one model: decides which of its pools (shapes) take new jobs, and how many workers each has.

Pure: state goes in and comes back. It decides on each shape as on a separate model, which sees the same lanes but only
its own workers, because slots, pace and cold starts differ. The shape that the load calls for, and those that still
take jobs, follow the demand; the others shrink to their minimum. A model without shapes has one pool.

A pool scales up at once, to the maximum of: the last peak of jobs that cannot wait for a new worker, plus the burst
that recent history shows on top of such a peak; the jobs present now; the workers that begin all waiting jobs within
their targets and deadlines. It scales down to the maximum needed in the last `keep_s` seconds, and takes no small step
down within an hour after a rise. docs/scaling.md has the formulas.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from msgspec import structs

from penstock.text import counted
from scheduler.policy.demand import (
    Demand,
    Peaks,
    cannot_wait,
    concurrent_demand,
    constraints,
    highest,
    in_slots,
    keep_s,
    learn,
    wait_s,
    with_peak,
    workers_for,
)
from scheduler.policy.health import PoolHealth, judge
from scheduler.policy.snapshot import ScalingLimits, ShapeChoice, Snapshot, route, takers
from streaming.fleet.process import Cordoned, Process, Prospect
from streaming.order import FLOOR

SPARE_SHARE = 0.25
"""Share of one worker's capacity that must be free on the other workers before one is removed."""
SMALL_STEP_SHARE = 1 / 3
"""Removing at most this share of the workers, or one, is a small step."""
SMALL_STEP_HOLDOFF_S = 3600.0
"""No small step down for this long after the number rose again: noise on a constant load changes it at most twice in
that time."""


@dataclass(frozen=True, slots=True)
class PolicyState:
    """State that one decision of a pool passes to the next."""

    want: int
    demand: Demand = field(default_factory=Demand)
    needs: Peaks = ()
    """Peaks of the workers needed in the last `keep_s` seconds."""
    fell: bool = False
    """Whether the last change was downwards."""
    no_small_step_until: float = -math.inf
    health: PoolHealth = field(default_factory=PoolHealth)


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """The number of workers that a pool should have, and the reason."""

    want: int
    """Not counting cordoned workers."""
    reason: str
    state: PolicyState
    """Input of the next decision."""
    cordon: tuple[Cordoned, ...] = ()
    lanes: Mapping[str, Prospect] = field(default_factory=dict)
    """By lane, what a job put now may expect."""
    wake_s: float = 0.0
    """Seconds until the first worker is ready; 0 if one is."""
    cold_start_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Need:
    """Workers that one rule asks for, as a fraction, and its reason."""

    workers: float
    why: str
    lasting: bool = False
    """Whether it covers the last `keep_s` seconds, not only this moment."""
    spare: float = 0.0
    """Hysteresis: added to the need when scaling down."""

    @property
    def kept(self) -> float:
        return self.workers + self.spare


@dataclass(frozen=True, slots=True)
class Switch:
    """State that one decision of a model passes to the next."""

    pools: Mapping[str, PolicyState] = field(default_factory=dict)
    """By shape."""
    route: ShapeChoice | None = None
    takes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SwitchDecision:
    """The decision for one model."""

    model: str
    pools: Mapping[str, PoolPlan]
    """By shape; "" for a model without shapes."""
    state: Switch
    """Input of the next decision."""
    shape: str = ""
    """The shape the load calls for."""
    takes: tuple[str, ...] = ("",)
    """The shapes that take new jobs."""
    why: str = ""
    """Why that shape."""

    @property
    def want(self) -> int:
        return sum(plan.want for plan in self.pools.values())

    @property
    def reason(self) -> str:
        """The reason of the pool that the load calls for."""
        why = self.pools[self.shape].reason
        return f"{self.shape}: {why}" if self.shape else why

    @property
    def cordon(self) -> tuple[Cordoned, ...]:
        return tuple(cordon for plan in self.pools.values() for cordon in plan.cordon)

    @property
    def main(self) -> PoolPlan:
        """The pool whose forecast applies to new jobs: that of `shape` if it takes them, else the first that does."""
        return self.pools[self.shape if self.shape in self.takes else self.takes[0]]


def decide(snapshot: Snapshot, limits: ScalingLimits, state: Switch | None, now: float) -> SwitchDecision:
    """Decide for one model. `state`: that of the last decision, None at first; `now`: seconds of a monotonic clock."""
    state = state or Switch()
    if not limits.shapes:
        plan = decide_pool(snapshot, limits, state.pools.get(""), now)
        return SwitchDecision(snapshot.model, {"": plan}, Switch({"": plan.state}))
    choice, names = _route(snapshot, limits, state, now), [shape.name for shape in limits.shapes]
    ready = {name: sum(each.state == "ready" and each.shape == name for each in snapshot.workers) for name in names}

    def decided(name: str, rests: str = "") -> PoolPlan:
        seen = _view(snapshot, name, took=not rests and (not state.takes or name in state.takes))
        return decide_pool(seen, limits.pools[name], state.pools.get(name), now, rests)

    pools = {choice.shape: decided(choice.shape)}
    takes = takers(names, choice.shape, state.takes, ready, pools[choice.shape].want)
    rests = f"new jobs go to {', '.join(takes)}"
    for name in names:
        pools[name] = pools.get(name) or decided(name, "" if name in takes and ready[name] else rests)
    pools = {name: pools[name] for name in names}
    states = {name: plan.state for name, plan in pools.items()}
    why = f"{counted(round(choice.load), 'job')} at once"
    return SwitchDecision(snapshot.model, pools, Switch(states, choice, takes), choice.shape, takes, why)


def _route(snapshot: Snapshot, limits: ScalingLimits, state: Switch, now: float) -> ShapeChoice:
    """Choose the shape for the load; a paused model keeps its shape."""
    names = [shape.name for shape in limits.shapes]
    if limits.paused and state.route is not None and state.route.shape in names:
        return state.route
    return route(state.route, limits.shapes, snapshot.running + snapshot.waiting, now)


def _view(snapshot: Snapshot, shape: str, *, took: bool) -> Snapshot:
    """One shape's part of a snapshot. If the shape took no new jobs, its ready workers count as draining: jobs that
    waited although these workers had room say nothing about their capacity."""
    own = (worker for worker in snapshot.workers if worker.shape == shape)
    workers = (_draining(each) if each.state == "ready" and not took else each for each in own)
    elsewhere = sum(worker.running for worker in snapshot.workers if worker.shape != shape)
    return replace(snapshot, workers=tuple(workers), elsewhere=elsewhere)


def _draining(worker: Process) -> Process:
    return structs.replace(worker, state="draining")


def decide_pool(
    snapshot: Snapshot, limits: ScalingLimits, state: PolicyState | None, now: float, rests: str = ""
) -> PoolPlan:
    """Decide how many workers one pool should have.

    Args:
        state: that of the last plan; None at first: start from the existing workers.
        now: seconds of any monotonic clock.
        rests: why it gets no new jobs: it shrinks to its minimum once the last `keep_s` seconds needed no more.
    """
    snapshot, state = _updated(snapshot, limits, state, now)
    if limits.paused:
        return _plan(snapshot, limits, state, state.want, "paused: nothing is changed", now)
    if rests:
        state = replace(state, needs=with_peak(state.needs, 0.0, now, keep_s(state.demand, limits)))
        want = limits.clamp(min(state.want, _whole(highest(state.needs))))
        return _plan(snapshot, limits, state, want, rests, now)
    if limits.pinned is not None:
        return _plan(snapshot, limits, state, limits.clamp(limits.pinned), f"{limits.pinned} set by hand", now)
    if snapshot.away:
        why = f"no server is there for the workers, and further ones would have none either: {snapshot.away[0]}"
        return _plan(snapshot, limits, state, limits.clamp(state.want), why, now)
    needs = needed(snapshot, limits, state, now)
    momentary = max((need.kept for need in needs if not need.lasting), default=0.0)
    state = replace(state, needs=with_peak(state.needs, momentary, now, keep_s(state.demand, limits)))
    return _follow(snapshot, limits, state, needs, now)


def _updated(
    snapshot: Snapshot, limits: ScalingLimits, state: PolicyState | None, now: float
) -> tuple[Snapshot, PolicyState]:
    """The snapshot without cordoned workers, and the state updated with it."""
    if state is None:
        state = PolicyState(len(snapshot.ready) + snapshot.starting)
    judged = judge(state.health, snapshot.workers, now)
    if names := {cordon.worker for cordon in judged.cordons}:  # they count as draining, because they claim nothing
        drained = [_draining(each) if each.worker_id in names else each for each in snapshot.workers]
        snapshot = replace(snapshot, workers=tuple(drained))
    return snapshot, replace(state, demand=learn(state.demand, snapshot, limits, now), health=judged)


def _follow(
    snapshot: Snapshot, limits: ScalingLimits, state: PolicyState, needs: Sequence[Need], now: float
) -> PoolPlan:
    """Scale up to the need at once; scale down with a delay."""
    need = max(needs, key=lambda need: need.workers)
    have, want = limits.clamp(state.want), limits.clamp(_whole(need.workers))
    if want > have:
        if state.fell:
            state = replace(state, fell=False, no_small_step_until=now + SMALL_STEP_HOLDOFF_S)
        return _plan(snapshot, limits, state, want, need.why, now)
    if have != state.want:
        return _plan(snapshot, limits, state, have, f"the limits are {limits.min} to {limits.ceiling}", now)
    lately = max(highest(state.needs), *(need.kept for need in needs)) if need.workers else 0.0
    fewer = limits.clamp(_whole(lately))
    if fewer >= have:
        return _plan(snapshot, limits, state, have, _why_stay(snapshot, limits, have, need), now)
    small = have - fewer <= max(1, have * SMALL_STEP_SHARE)
    if fewer and small and now < state.no_small_step_until:
        left = state.no_small_step_until - now
        why = f"{fewer} would do, but as few were too few before: not for {left:.0f} s ({need.why})"
        return _plan(snapshot, limits, state, have, why, now)
    why = f"{fewer} were enough for {keep_s(state.demand, limits):.0f} s ({need.why})"
    return _plan(snapshot, limits, replace(state, fell=True), fewer, why, now)


def _whole(workers: float) -> int:
    return math.ceil(workers - 1e-9)


# --- what is needed --------------------------------------------------------------------------------------------------


def needed(snapshot: Snapshot, limits: ScalingLimits, state: PolicyState, now: float) -> Sequence[Need]:
    """The workers that each rule asks for, before any limit."""
    demand, have = state.demand, limits.clamp(state.want)
    quiet_s = now - demand.busy_at
    if not snapshot.waiting and not snapshot.running and (quiet_s >= limits.sleep_s or not have):
        return [Need(0, f"no job for {quiet_s:.0f} s")]
    if not demand.capacity:
        return [Need(1, f"{_jobs(snapshot)}; how much work a worker does is not measured yet")]
    if snapshot.running and not snapshot.ready and not snapshot.elsewhere:
        # Jobs run on workers that do not report themselves: do not shrink.
        return [Need(max(have, 1), "jobs run with workers that are silent")]
    awake = Need(
        1, _jobs(snapshot) if snapshot.running + snapshot.waiting else f"the last job ended {quiet_s:.0f} s ago", True
    )
    return [awake, *_for_load(snapshot, limits, demand), *_for_targets(snapshot, limits, demand)]


def _for_load(snapshot: Snapshot, limits: ScalingLimits, demand: Demand) -> list[Need]:
    """Room for jobs that cannot wait for a worker, now and in a burst, on top of the usual share of the others."""
    others = _others(snapshot, limits, demand)
    beside = f" beside {others:.0f} that can wait" if others >= 0.5 else ""
    each, held, jobs = demand.capacity, concurrent_demand(snapshot, demand), 0.0
    waits = counted(round(others), "job")
    needs = [Need(others / each, f"{waits} that can wait, {each} to a worker", spare=SPARE_SHARE)]
    for lane, rush in demand.rushes.items():
        jobs += held[lane]
        noun = f"{lane} job"
        usual = counted(round(rush.usual), noun)
        rushed = f"at most {usual} at once lately, up to {rush.room:.0f} while a worker starts"
        now = f"{counted(round(jobs), noun)}{beside}, {each} to a worker"
        needs.append(Need((jobs + others) / each, now, spare=SPARE_SHARE))
        needs.append(
            Need((rush.room + others) / each, f"{rushed}{beside}, {each} to a worker", lasting=True, spare=SPARE_SHARE)
        )
    return needs


def _others(snapshot: Snapshot, limits: ScalingLimits, demand: Demand) -> float:
    """Slots for the usual share of jobs that can wait for a worker: arrival rate times the seconds a job is held, at
    most the jobs that run. Waiting jobs are covered by `_for_targets`."""
    slots, held = 0.0, in_slots(snapshot, demand)
    for lane in snapshot.lanes:
        if not cannot_wait(lane.priority, demand, limits):
            usual = demand.rate(lane.priority) * demand.size(lane.priority) / demand.pace if demand.pace else math.inf
            slots += min(held[lane.priority], usual)
    return slots


def _for_targets(snapshot: Snapshot, limits: ScalingLimits, demand: Demand) -> list[Need]:
    """Workers that begin all waiting jobs within their targets and deadlines."""
    needs = []
    for ahead in constraints(snapshot, demand, limits):
        workers = workers_for(ahead, demand, snapshot.running, limits.ceiling)
        needs.append(Need(workers, f"{ahead.why}: {counted(workers, 'worker does', 'workers do')} that"))
    return needs


# --- the answer ------------------------------------------------------------------------------------------------------


def _plan(
    snapshot: Snapshot, limits: ScalingLimits, state: PolicyState, want: int, reason: str, now: float
) -> PoolPlan:
    demand = replace(state.demand, starts=state.demand.starts.with_orders(want - state.want, now))
    wake_s = 0.0 if snapshot.ready else demand.starts.wake_s(limits.cold_start_s, now)
    return PoolPlan(
        want,
        reason,
        replace(state, want=want, demand=demand),
        state.health.cordons,
        dict(_prospects(snapshot, limits, demand, len(snapshot.ready) or want, wake_s)),
        wake_s,
        demand.cold_s(limits),
    )


def _prospects(
    snapshot: Snapshot, limits: ScalingLimits, demand: Demand, workers: int, wake_s: float
) -> Iterator[tuple[str, Prospect]]:
    """By lane, how long a job put now waits: for the wake-up, then for the jobs ahead. A sleeping model wakes one
    worker. While the pace of work is unknown, only the wake-up time is known. However busy higher lanes are, the floor
    of the queue's order gives a lane its share of the work."""
    workers = workers or min(1, limits.ceiling)
    waits = wait_s(snapshot, demand, workers)
    rate = workers * demand.capacity * demand.pace
    for lane in snapshot.lanes:
        lane_wait_s = wake_s + waits[lane.priority] if workers and not snapshot.away else math.inf
        each_s = demand.size(lane.priority) / rate if rate else 0.0
        floor_each_s = (FLOOR + 1) * each_s
        floor_s = wake_s + (lane.waiting + 1) * floor_each_s
        if each_s and floor_s < lane_wait_s:
            lane_wait_s, each_s = floor_s, floor_each_s
        elif not math.isfinite(lane_wait_s):
            lane_wait_s, each_s = wake_s, 0.0
        yield lane.priority, Prospect(lane_wait_s, each_s, lane.waiting)


def _jobs(snapshot: Snapshot) -> str:
    """What there is. How many run is not said: screens show a plan beside a newer count, which differs."""
    if not snapshot.waiting:
        return "jobs run" if snapshot.running else "no jobs"
    waiting = f"{snapshot.waiting} waiting (oldest {snapshot.oldest_s:.1f} s)"
    return f"{waiting}, others run" if snapshot.running else waiting


def _why_stay(snapshot: Snapshot, limits: ScalingLimits, have: int, need: Need) -> str:
    idle = not snapshot.waiting and not snapshot.running
    if idle and not have:
        return "idle, asleep until the first job"
    if idle and need.workers < limits.min:
        return f"idle, {have} kept ready"
    if _whole(need.workers) > limits.ceiling:
        return f"{have} is the most allowed ({need.why})"
    return need.why
