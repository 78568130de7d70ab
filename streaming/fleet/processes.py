"""Who is there: what processes say of themselves, what models were found to be.

Nothing of this is needed to keep a promise; it is what people, the scheduler and the supervisor look at.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, cast

import msgspec

from streaming.fleet.entries import entries, entry
from streaming.jobs.messages import ModelCard, Process, Role
from streaming.keys import FLEET_SLOT, fleet_key
from streaming.redis.client import RedisClient, translated

GONE_S = 10
"""A process that has said nothing for so long counts as gone."""


class Fleet:
    """Stateless; many may share a wire. Every method raises Unavailable."""

    def __init__(self, wire: RedisClient) -> None:
        self._wire = wire

    async def report(self, process: Process) -> None:
        """Say "I am here" for the next GONE_S seconds."""
        await self._wire.call("report", FLEET_SLOT, _key_name(process), msgspec.json.encode(process), GONE_S)

    async def leave(self, process: Process) -> None:
        """Say "I am going"."""
        name = _key_name(process)
        with translated():
            pipeline = self._wire.redis.pipeline(transaction=False)
            pipeline.delete(fleet_key("proc", name))
            pipeline.zrem(fleet_key("procs"), name)
            await pipeline.execute()

    async def processes(self, role: Role | None = None) -> list[Process]:
        """Those that spoke in the last GONE_S seconds, by role, name and host."""
        with translated():
            names = await cast(Awaitable[list[bytes]], self._wire.redis.zrange(fleet_key("procs"), 0, -1))
            if not names:
                return []
            values = await cast(
                Awaitable[list[bytes | None]],
                self._wire.redis.mget([fleet_key("proc", name.decode(errors="replace")) for name in names]),
            )
        pairs = zip(names, values, strict=True)
        found = [entry(str(name), value, Process) for name, value in pairs if value is not None]
        return sorted(
            (p for p in found if p and role in (None, p.role)), key=lambda p: (p.role, p.id, p.host, p.since, p.life)
        )

    async def publish_card(self, card: ModelCard) -> None:
        """Keep what a worker found when it loaded a model; the time of the first load stays."""
        known = (await self.cards()).get(card.name)
        kept = card if known is None else msgspec.structs.replace(card, created=known.created)
        await self._wire.call("card", FLEET_SLOT, card.name, msgspec.json.encode(kept))

    async def cards(self) -> dict[str, ModelCard]:
        """Model cards by name, of every model that was ever loaded."""
        return entries(await self._hash("card"), ModelCard)

    async def _hash(self, name: str) -> dict[str, bytes]:
        with translated():
            raw = await cast(Awaitable[dict[Any, Any]], self._wire.redis.hgetall(fleet_key(name)))
        return {key.decode(errors="replace"): value for key, value in raw.items()}


def _key_name(process: Process) -> str:
    return f"{process.role}:{process.life}"
