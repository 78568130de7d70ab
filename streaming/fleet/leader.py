"""Leader election: one scheduler leads at a time, each new leader under a greater epoch.

A leader that was suspended does not know that another was elected meanwhile. So the store checks the epoch (a fencing
token) of everything a leader publishes and of everything a pool does for it.
"""

from __future__ import annotations

from dataclasses import dataclass

from streaming.keys import FLEET_SLOT
from streaming.redis.client import ClientUser


@dataclass(frozen=True, slots=True)
class Lead:
    """The current leader and its epoch. `holder` is "" while there is none."""

    holder: str
    epoch: int


class Leadership(ClientUser):
    """Election calls. Every method raises Unavailable."""

    async def claim(self, holder: str, keep_ms: int) -> Lead:
        """Acquire or renew the lead for `keep_ms`; returns the current leader."""
        return await self._lead(holder, keep_ms)

    async def leave(self, holder: str) -> None:
        """Give up the lead at once."""
        await self._lead(holder, 0)

    async def current(self) -> Lead:
        """Return the current leader."""
        return await self._lead("", 0)

    async def _lead(self, holder: str, keep_ms: int) -> Lead:
        epoch, leader = await self._client.call("lead", FLEET_SLOT, holder, keep_ms)
        return Lead(leader.decode(errors="replace"), epoch)
