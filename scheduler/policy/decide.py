"""How many workers a model should have, and why. Pure: no clock, no wire, no memory but the state handed back.

Up at once, to the most of: room for the last peak of jobs that cannot wait for a new worker, and for the rush that the
recent past has shown on top of such a peak; room for the jobs that are here now; enough to begin what waits within its
targets and deadlines. Down to the most that was needed in the last while, and not by little within an hour of a turn
upwards. docs/scheduling.md has the formulas and their sources.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from scheduler.policy import health, starts
from scheduler.policy.demand import Demand, asking, in_slots, keep_s, learn, tight
from scheduler.policy.forecast import constraints, wait_s, workers_for
from scheduler.policy.health import PoolHealth
from scheduler.policy.limits import ScalingLimits
from scheduler.policy.plan import LaneOutlook, PolicyState, PoolPlan
from scheduler.policy.rush import highest, noted
from scheduler.policy.snapshot import Snapshot

SPARE = 0.25
"""Of a worker, in jobs: so much room must be left on the others before one is too many."""
SMALL = 1 / 3
"""Of the workers: giving back no more than this, or one, is a small step."""
REGRET_S = 3600.0
"""After the number has risen again there is no small step for so long: a constant load, be it noisy, turns it at most
twice in that time."""


@dataclass(frozen=True, slots=True)
class Need:
    """Workers that one consideration asks for, as a fraction, and its reason."""

    workers: float
    why: str
    lasting: bool = False
    """It speaks of the last while, not only of this moment."""
    spare: float = 0.0
    """So much less than it must be needed before a worker is one too many."""

    @property
    def kept(self) -> float:
        return self.workers + self.spare


def decide(snapshot: Snapshot, limits: ScalingLimits, state: PolicyState | None, now: float) -> PoolPlan:
    """The number of workers this model should have at `now` (seconds of any clock that only goes forward).

    `state` is the last plan's; None at first, which takes over the workers there are.
    """
    snapshot, state = _looked(snapshot, limits, state, now)
    if limits.paused:
        return _plan(snapshot, limits, state, state.want, "paused: nothing is changed", now)
    if limits.pinned is not None:
        return _plan(snapshot, limits, state, limits.clamp(limits.pinned), f"{limits.pinned} set by hand", now)
    needs = needed(snapshot, limits, state, now)
    momentary = max((need.kept for need in needs if not need.lasting), default=0.0)
    state = replace(state, needs=noted(state.needs, momentary, now, keep_s(state.demand, limits)))
    return _follow(snapshot, limits, state, needs, now)


def rest(snapshot: Snapshot, limits: ScalingLimits, state: PolicyState | None, now: float, why: str) -> PoolPlan:
    """The same for a pool whose jobs go elsewhere: down to its minimum once no more was needed in the last while."""
    snapshot, state = _looked(snapshot, limits, state, now)
    if limits.paused:
        return _plan(snapshot, limits, state, state.want, "paused: nothing is changed", now)
    state = replace(state, needs=noted(state.needs, 0.0, now, keep_s(state.demand, limits)))
    want = limits.clamp(min(state.want, _whole(highest(state.needs))))
    return _plan(snapshot, limits, state, want, why, now)


def _looked(
    snapshot: Snapshot, limits: ScalingLimits, state: PolicyState | None, now: float
) -> tuple[Snapshot, PolicyState]:
    """What there is to decide on, and what is known after the look."""
    if state is None:
        state = PolicyState(len(snapshot.ready) + snapshot.starting)
    judged = health.judge(state.health, snapshot.workers, now)
    snapshot = _without_cordoned(snapshot, judged)
    return snapshot, replace(state, demand=learn(state.demand, snapshot, limits, now), health=judged)


def _follow(
    snapshot: Snapshot, limits: ScalingLimits, state: PolicyState, needs: Sequence[Need], now: float
) -> PoolPlan:
    """Up to the need at once; down with patience."""
    need = max(needs, key=lambda need: need.workers)
    have, want = limits.clamp(state.want), limits.clamp(_whole(need.workers))
    if want > have:
        return _plan(snapshot, limits, _turned(state, now), want, need.why, now)
    if have != state.want:
        return _plan(snapshot, limits, state, have, f"the limits are {limits.min} to {limits.most}", now)
    lately = max(highest(state.needs), *(need.kept for need in needs)) if need.workers else 0.0
    fewer = limits.clamp(_whole(lately))
    if fewer >= have:
        return _plan(snapshot, limits, state, have, _why_stay(snapshot, limits, have, need), now)
    if fewer and _small(have, fewer) and now < state.no_small_step_until:
        left = state.no_small_step_until - now
        why = f"{fewer} would do, but as few were too few before: not for {left:.0f} s ({need.why})"
        return _plan(snapshot, limits, state, have, why, now)
    why = f"{fewer} were enough for {keep_s(state.demand, limits):.0f} s ({need.why})"
    return _plan(snapshot, limits, replace(state, fell=True), fewer, why, now)


def _turned(state: PolicyState, now: float) -> PolicyState:
    """Workers were given back, and now there are to be more again."""
    return replace(state, fell=False, no_small_step_until=now + REGRET_S) if state.fell else state


def _small(have: int, fewer: int) -> bool:
    return have - fewer <= max(1, have * SMALL)


def _whole(workers: float) -> int:
    return math.ceil(workers - 1e-9)


# --- what is needed --------------------------------------------------------------------------------------------------


def needed(snapshot: Snapshot, limits: ScalingLimits, state: PolicyState, now: float) -> Sequence[Need]:
    """What each consideration asks for, before any limit."""
    demand, have = state.demand, limits.clamp(state.want)
    quiet_s = now - demand.busy_at
    if not snapshot.waiting and not snapshot.running and (quiet_s >= limits.sleep_s or not have):
        return [Need(0, f"no job for {quiet_s:.0f} s")]
    if not demand.capacity:
        return [Need(1, f"{_jobs(snapshot)}, and what a worker can do is not known yet")]
    if snapshot.running and not snapshot.ready and not snapshot.elsewhere:
        # Somebody runs them and cannot be seen: no time to shrink.
        return [Need(max(have, 1), f"{snapshot.running} running with workers that are silent")]
    awake = Need(
        1, _jobs(snapshot) if snapshot.running + snapshot.waiting else f"no job for only {quiet_s:.0f} s", True
    )
    return [awake, *_for_load(snapshot, limits, demand), *_for_targets(snapshot, limits, demand)]


def _for_load(snapshot: Snapshot, limits: ScalingLimits, demand: Demand) -> list[Need]:
    """Room for jobs that cannot wait for a worker, now and in a rush, beside the others' usual share."""
    others = _others(snapshot, limits, demand)
    beside = f" beside {others:.0f} that can wait" if others >= 0.5 else ""
    each, held, jobs = demand.capacity, asking(snapshot, demand), 0.0
    needs = [Need(others / each, f"{others:.0f} jobs that can wait, {each} to a worker", spare=SPARE)]
    for lane, rush in demand.rushes.items():
        jobs += held[lane]
        rushed = f"at most {rush.usual:.0f} {lane} jobs at once lately, up to {rush.room:.0f} while a worker starts"
        needs.append(Need((jobs + others) / each, f"{jobs:.0f} {lane} jobs{beside}, {each} to a worker", spare=SPARE))
        needs.append(
            Need((rush.room + others) / each, f"{rushed}{beside}, {each} to a worker", lasting=True, spare=SPARE)
        )
    return needs


def _others(snapshot: Snapshot, limits: ScalingLimits, demand: Demand) -> float:
    """Slots for the usual share of jobs that can wait for a worker: arrivals times the seconds each is held, and no
    more than there are, for what waits is reckoned by its time to clear."""
    slots, held = 0.0, in_slots(snapshot, demand)
    for lane in snapshot.lanes:
        if not tight(lane.name, demand, limits):
            usual = demand.rate(lane.name) * demand.size(lane.name) / demand.pace if demand.pace else math.inf
            slots += min(held[lane.name], usual)
    return slots


def _for_targets(snapshot: Snapshot, limits: ScalingLimits, demand: Demand) -> list[Need]:
    """Enough to begin what waits within its targets and deadlines."""
    needs = []
    for ahead in constraints(snapshot, demand, limits):
        workers = workers_for(ahead, demand, snapshot.running, limits.most)
        needs.append(Need(workers, f"{ahead.why}: {workers} workers do that"))
    return needs


# --- the answer ------------------------------------------------------------------------------------------------------


def _without_cordoned(snapshot: Snapshot, judged: PoolHealth) -> Snapshot:
    """Cordoned workers take nothing: they count as draining."""
    names = {cordon.worker for cordon in judged.cordons}
    if not names:
        return snapshot
    workers = (replace(each, state="draining") if each.id in names else each for each in snapshot.workers)
    return replace(snapshot, workers=tuple(workers))


def _plan(
    snapshot: Snapshot, limits: ScalingLimits, state: PolicyState, want: int, reason: str, now: float
) -> PoolPlan:
    demand = replace(state.demand, starts=starts.ordered(state.demand.starts, want - state.want, now))
    wake_s = 0.0 if snapshot.ready else demand.starts.wake_s(limits.cold_start_s, now)
    return PoolPlan(
        snapshot.model,
        want,
        reason,
        replace(state, want=want, demand=demand),
        state.health.cordons,
        _outlook(snapshot, limits, demand, len(snapshot.ready) or want, wake_s),
        wake_s,
        demand.cold_s(limits),
        want * limits.cost,
    )


def _outlook(
    snapshot: Snapshot, limits: ScalingLimits, demand: Demand, workers: int, wake_s: float
) -> dict[str, LaneOutlook]:
    """What a job put now may expect: the wake-up, and then what is before it. A sleeping model wakes one worker."""
    workers = workers or min(1, limits.most)
    waits = wait_s(snapshot, demand, workers)
    rate = workers * demand.capacity * demand.pace
    return {
        lane.name: LaneOutlook(
            waiting=lane.waiting,
            tokens=lane.waiting * demand.size(lane.name),
            arrivals=demand.rate(lane.name),
            wait_s=wake_s + waits[lane.name] if workers else math.inf,
            each_s=demand.size(lane.name) / rate if rate else 0.0,
        )
        for lane in snapshot.lanes
    }


def _jobs(snapshot: Snapshot) -> str:
    if not snapshot.waiting:
        return f"{snapshot.running} running"
    waiting = f"{snapshot.waiting} waiting (oldest {snapshot.oldest_s:.1f} s)"
    return f"{waiting} and {snapshot.running} running" if snapshot.running else waiting


def _why_stay(snapshot: Snapshot, limits: ScalingLimits, have: int, need: Need) -> str:
    idle = not snapshot.waiting and not snapshot.running
    if idle and not have:
        return "idle, asleep until the first job"
    if idle and need.workers < limits.min:
        return f"idle, {have} kept ready"
    if _whole(need.workers) > limits.most:
        return f"{have} is the most allowed ({need.why})"
    return need.why
