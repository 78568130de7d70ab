"""Worker pools: what executes the scheduler's plans, the dry run, and the steps of a scale-down.

In the local pool each machine's supervisor reads the published plan, and starts and stops workers. A dry run only logs
what it would do. `kubernetes.py` has the pool of pods.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from penstock.text import counted
from streaming.fleet.plans import Action, Plan, PoolKind
from streaming.fleet.process import Process

log = logging.getLogger(__name__)


class PoolError(Exception):
    """Raised when a pool cannot or may not be changed as planned."""


@dataclass(frozen=True, slots=True)
class Move:
    """A plan to publish, and the actions that its pool will take for it."""

    plan: Plan
    actions: tuple[Action, ...] = ()


class Pool:
    """Executes plans in two steps, so that the scheduler publishes every action, fenced, before the pool takes it.

    By itself it is the pool of `penstock up`, on one machine or several, whose supervisors read the published plan.
    """

    kind: PoolKind = "local"

    async def moves(self, plans: Sequence[Plan], workers: Sequence[Process], epoch: int) -> list[Move]:
        """Decide what to do for each plan, at least one move per plan, without changing anything."""
        return [Move(plan) for plan in plans]

    async def carry_out(self, moves: Sequence[Move], epoch: int) -> None:
        """Execute the moves; called only after they were published."""

    async def close(self) -> None:
        """Release what the pool holds."""


class DryRunPool(Pool):
    """Logs each change of a plan once, and starts, drains or cordons nothing."""

    kind: PoolKind = "dry-run"

    def __init__(self) -> None:
        self._logged: dict[str, str] = {}

    async def carry_out(self, moves: Sequence[Move], epoch: int) -> None:
        for move in moves:
            words = describe(move.plan)
            if words != self._logged.get(move.plan.model):
                log.info("%s: would have %s (%s)", move.plan.model, words, move.plan.reason)
            self._logged[move.plan.model] = words


def describe(plan: Plan) -> str:
    """Describe a plan in words, without its reason, which changes all the time."""
    sizes = (counted(want, f"{shape} worker".lstrip()) for shape, want in plan.pools.items())
    taken = f", new jobs with {', '.join(plan.takes)}" if plan.takes else ""
    cordoned = f", and {', '.join(each.worker for each in plan.cordon)} cordoned" if plan.cordon else ""
    return f"{' and '.join(sizes)}{taken}{cordoned}"


@dataclass(frozen=True, slots=True)
class Member:
    """One pod."""

    name: str
    ready: bool
    since: float
    """Creation time in Unix seconds."""
    running: int = 0
    """Jobs that its worker holds."""
    drained: bool = False
    """Whether its worker holds no jobs and claims none."""


@dataclass(frozen=True, slots=True)
class LeavingStep:
    """The next step of a scale-down.

    A chosen member claims no more jobs, finishes those it has, and only then is removed. Members that are not ready are
    chosen first, because the cluster's controllers would remove them first too.
    """

    leaving: tuple[str, ...]
    """Chosen members that still exist."""
    replicas: int
    cheapest: tuple[str, ...] = ()
    """Drained members that the next lowering of the scale should remove."""
    remove: tuple[str, ...] = ()
    """Drained members to delete by name, because a lowering of the scale might remove others."""


def next_step(
    members: Sequence[Member], want: int, leaving: Collection[str], cordoned: Collection[str] = ()
) -> LeavingStep:
    """One step towards `want` members that stay. `leaving`: chosen before; `cordoned`: to be replaced.

    The controller removes pods that are not ready before the cheapest ones, so the scale is lowered only while all
    members that stay are ready.
    """
    chosen = [each for each in members if each.name in leaving or each.name in cordoned]
    staying = [each for each in members if each not in chosen]
    surplus = max(0, len(staying) - want)
    chosen += sorted(staying, key=lambda each: (each.ready, each.running, -each.since, each.name))[:surplus]
    staying = [each for each in staying if each not in chosen]
    drained = tuple(each.name for each in chosen if each.drained)
    replicas = want + len(chosen) - len(drained)
    names = tuple(each.name for each in chosen)
    if len(staying) == want and all(each.ready for each in staying):
        return LeavingStep(names, replicas, cheapest=drained)
    return LeavingStep(names, replicas, remove=drained)
