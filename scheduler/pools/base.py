"""Pools: what makes a plan come true. The scheduler publishes; a pool adds what it must do itself.

Local workers are started and stopped by each machine's supervisor, which reads the plan. A dry run only says what
would be done. Pods are `kubernetes.py`'s.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from streaming.fleet.plans import Action, Plan, PoolKind
from streaming.fleet.processes import Process

log = logging.getLogger(__name__)


class PoolError(Exception):
    """Raised when a pool may not, or cannot, be changed as planned."""


@dataclass(frozen=True, slots=True)
class Move:
    """A plan as it is to be published, and what its pool is about to do for it."""

    plan: Plan
    actions: tuple[Action, ...] = ()


class Pool(Protocol):
    """Decides without doing, so that what it is about to do is published first, under the leader's fence."""

    kind: PoolKind

    async def moves(self, plans: Sequence[Plan], workers: Sequence[Process], epoch: int) -> list[Move]:
        """At least one for each plan."""
        ...

    async def carry_out(self, moves: Sequence[Move], epoch: int) -> None:
        """Called only after they were published."""
        ...

    async def close(self) -> None: ...


class LocalPool:
    """Workers of `penstock up`, on one machine or several: reading the plan is all they need."""

    kind: PoolKind = "local"

    async def moves(self, plans: Sequence[Plan], workers: Sequence[Process], epoch: int) -> list[Move]:
        return [Move(plan) for plan in plans]

    async def carry_out(self, moves: Sequence[Move], epoch: int) -> None:
        pass  # whoever supervises the workers does

    async def close(self) -> None:
        pass


class DryRunPool:
    """Nothing is started, drained or cordoned: it is only said, once for each change."""

    kind: PoolKind = "dry-run"

    def __init__(self) -> None:
        self._said: dict[str, str] = {}

    async def moves(self, plans: Sequence[Plan], workers: Sequence[Process], epoch: int) -> list[Move]:
        return [Move(plan) for plan in plans]

    async def carry_out(self, moves: Sequence[Move], epoch: int) -> None:
        for move in moves:
            words = would(move.plan)
            if words != self._said.get(move.plan.model):
                log.info("%s: would have %s (%s)", move.plan.model, words, move.plan.reason)
            self._said[move.plan.model] = words

    async def close(self) -> None:
        pass


def would(plan: Plan) -> str:
    """A plan in words, without its reason, which changes all the time."""
    sizes = (f"{want} {shape} workers" if shape else f"{want} workers" for shape, want in plan.pools.items())
    taken = f", new jobs with {', '.join(plan.takes)}" if plan.takes else ""
    cordoned = f", and {', '.join(each.worker for each in plan.cordon)} cordoned" if plan.cordon else ""
    return f"{' and '.join(sizes)}{taken}{cordoned}"
