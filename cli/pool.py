"""The workers of one model: as many as the scheduler wants, within the bounds the settings give."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence

from cli.child import Child, Program
from cli.supervisor import Supervisor
from streaming.errors import Unavailable
from streaming.fleet import Fleet, Plan

POLL_S = 0.5

log = logging.getLogger(__name__)


class Pool:
    """`program` makes the worker of a given id."""

    def __init__(
        self, supervisor: Supervisor, model: str, least: int, most: int, program: Callable[[str], Program]
    ) -> None:
        self._supervisor = supervisor
        self._program = program
        self.model, self.least, self.most = model, least, most

    @property
    def members(self) -> list[Child]:
        """Workers that are meant to stay, oldest first."""
        workers = self._supervisor.of("worker")
        return [child for child in workers if child.program.model == self.model and not child.stopping]

    def resize(self, want: int, reason: str) -> None:
        """Start workers, or let the newest ones drain."""
        members = self.members
        size = min(max(want, self.least), self.most)
        if size != len(members):
            log.info("workers of %s: %d -> %d (%s)", self.model, len(members), size, reason)
        for _ in range(size - len(members)):
            self._supervisor.start(self._program(self._free_id()))
        for child in reversed(members[size:]):
            child.stop()

    def _free_id(self) -> str:
        names = (f"worker-{number}" for number in itertools.count(1))
        return next(name for name in names if name not in self._supervisor.children)


async def follow(pools: Sequence[Pool], fleet: Fleet) -> None:
    """Keep every pool at the size the scheduler plans. While Redis does not answer, they stay as they are."""
    while True:
        try:
            plans: Mapping[str, Plan] = await fleet.plans()
        except Unavailable as error:
            log.warning("the plan cannot be read, the pools stay as they are: %s", error)
        else:
            for pool in pools:
                if plan := plans.get(pool.model):
                    pool.resize(plan.want, plan.reason)
        await asyncio.sleep(POLL_S)
