"""The gate itself: the wanted number of workers per model, published for the supervisors that start and stop them.

The scheduler starts no process. It says what should be; each machine's supervisor makes it so.
"""

from __future__ import annotations

from scheduler.policy import Decision
from streaming.fleet import Fleet


class Pools:
    """The published plans, seen from the one scheduler that leads."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def wanted(self) -> dict[str, int]:
        """What is published now, by model; after a restart this is what to go on from. Raises Unavailable."""
        return {model: plan.want for model, plan in (await self._fleet.plans()).items()}

    async def follow(self, decision: Decision, published: int | None) -> bool:
        """Publish a decision that differs from what is published; returns whether it did. Raises Unavailable."""
        if decision.want == published:
            return False
        await self._fleet.plan(decision.model, decision.want, decision.reason)
        return True
