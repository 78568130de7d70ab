"""Scaling policy of one model: decides which of its pools (shapes) take new jobs, and the size of each. Pure.

It decides on each shape as on a separate model, which sees the same lanes but only its own workers, because slots, pace
and cold starts differ. The shape that the load calls for, and those that still take jobs, follow the demand; the others
shrink to their minimum. A model without shapes has one pool.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from msgspec import structs

from penstock.text import counted
from scheduler.policy import decide as policy
from scheduler.policy.decide import PolicyState, PoolPlan
from scheduler.policy.snapshot import ScalingLimits, ShapeChoice, Snapshot, route, takers
from streaming.fleet.process import Cordoned


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
        plan = policy.decide(snapshot, limits, state.pools.get(""), now)
        return SwitchDecision(snapshot.model, {"": plan}, Switch({"": plan.state}))
    choice, names = _route(snapshot, limits, state, now), [shape.name for shape in limits.shapes]
    ready = {name: sum(each.state == "ready" and each.shape == name for each in snapshot.workers) for name in names}

    def follow(name: str) -> PoolPlan:
        seen = _view(snapshot, name, took=not state.takes or name in state.takes)
        return policy.decide(seen, limits.pools[name], state.pools.get(name), now)

    def rest(name: str) -> PoolPlan:
        seen, why = _view(snapshot, name, took=False), f"new jobs go to {', '.join(takes)}"
        return policy.rest(seen, limits.pools[name], state.pools.get(name), now, why)

    aimed = follow(choice.shape)
    takes = takers(names, choice.shape, state.takes, ready, aimed.want)
    busy = {name for name in takes if ready[name]}
    pools = {name: aimed if name == choice.shape else follow(name) if name in busy else rest(name) for name in names}
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
    workers = (structs.replace(each, state="draining") if each.state == "ready" and not took else each for each in own)
    elsewhere = sum(worker.running for worker in snapshot.workers if worker.shape != shape)
    return replace(snapshot, workers=tuple(workers), elsewhere=elsewhere)
