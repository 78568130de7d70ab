"""Worker pools: what executes the scheduler's plans, with the local pool and the dry run.

In the local pool each machine's supervisor reads the published plan, and starts and stops workers. A dry run only logs
what it would do. `kubernetes.py` has the pool of pods.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
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
