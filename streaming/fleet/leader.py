"""Who leads: one scheduler at a time, each under a greater epoch than the last.

A leader that was stopped for a while does not know that another has come. So nothing is done on its word alone: what
it publishes, and what pools do, is held against the epoch where it is written.
"""

from __future__ import annotations

from dataclasses import dataclass

from streaming.keys import FLEET_SLOT
from streaming.redis.client import RedisClient


@dataclass(frozen=True, slots=True)
class Lead:
    """Who leads, under which epoch. `holder` is "" while nobody does."""

    holder: str
    epoch: int


class Leadership:
    """Stateless; many may share a wire. Every method raises Unavailable."""

    def __init__(self, wire: RedisClient) -> None:
        self._wire = wire

    async def claim(self, holder: str, keep_ms: int) -> Lead:
        """Ask to lead for the next `keep_ms`, or to go on leading; whoever leads now."""
        return await self._lead(holder, keep_ms)

    async def leave(self, holder: str) -> None:
        """Let another lead at once."""
        await self._lead(holder, 0)

    async def current(self) -> Lead:
        """Whoever leads now."""
        return await self._lead("", 0)

    async def _lead(self, holder: str, keep_ms: int) -> Lead:
        epoch, leader = await self._wire.call("lead", FLEET_SLOT, holder, keep_ms)
        return Lead(leader.decode(errors="replace"), epoch)
