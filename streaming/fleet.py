"""Who is there: what processes say of themselves, what models were found to be.

Nothing of this is needed to keep a promise; it is what people, the scheduler and the supervisor look at.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, cast

import msgspec

from streaming.keys import fleet_key
from streaming.messages import ModelCard, Process, Role
from streaming.wire import Wire, translated

GONE_S = 10
"""A process that has said nothing for so long counts as gone."""


class Fleet:
    """Stateless; many may share a wire. Every method raises Unavailable."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    async def report(self, process: Process) -> None:
        """Say "I am here" for the next GONE_S seconds."""
        now = await self._wire.now_ms()
        name = f"{process.role}:{process.id}"
        with translated():
            pipeline = self._wire.redis.pipeline(transaction=False)
            pipeline.set(fleet_key("proc", name), msgspec.json.encode(process), ex=GONE_S)
            pipeline.zadd(fleet_key("procs"), {name: now / 1000 + GONE_S})
            pipeline.zremrangebyscore(fleet_key("procs"), "-inf", now / 1000 - 3600)
            await pipeline.execute()

    async def leave(self, role: Role, process_id: str) -> None:
        """Say "I am going"."""
        name = f"{role}:{process_id}"
        with translated():
            pipeline = self._wire.redis.pipeline(transaction=False)
            pipeline.delete(fleet_key("proc", name))
            pipeline.zrem(fleet_key("procs"), name)
            await pipeline.execute()

    async def processes(self, role: Role | None = None) -> list[Process]:
        """Those that spoke in the last GONE_S seconds, by role and id."""
        with translated():
            names = await cast(Awaitable[list[bytes]], self._wire.redis.zrange(fleet_key("procs"), 0, -1))
            if not names:
                return []
            values = await cast(
                Awaitable[list[bytes | None]],
                self._wire.redis.mget([fleet_key("proc", name.decode()) for name in names]),
            )
        found = [msgspec.json.decode(value, type=Process) for value in values if value is not None]
        return sorted((p for p in found if role in (None, p.role)), key=lambda p: (p.role, p.id))

    async def publish_card(self, card: ModelCard) -> None:
        """Keep what a worker found when it loaded a model; the time of the first load stays."""
        known = (await self.cards()).get(card.name)
        kept = card if known is None else msgspec.structs.replace(card, created=known.created)
        with translated():
            await self._wire.redis.hset(fleet_key("card"), card.name, _text(kept))

    async def cards(self) -> dict[str, ModelCard]:
        """Model cards by name, of every model that was ever loaded."""
        return {name: msgspec.json.decode(data, type=ModelCard) for name, data in (await self._hash("card")).items()}

    async def _hash(self, name: str) -> dict[str, bytes]:
        with translated():
            raw = await cast(Awaitable[dict[Any, Any]], self._wire.redis.hgetall(fleet_key(name)))
        return {key.decode(): value for key, value in raw.items()}


def _text(value: msgspec.Struct) -> str:
    return msgspec.json.encode(value).decode()
