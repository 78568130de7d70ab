"""How much waits in each lane, and since when."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from redis.exceptions import ResponseError

from streaming.keys import GROUP, partition_key
from streaming.messages import Priority
from streaming.wire import Wire, translated


@dataclass(frozen=True, slots=True)
class Lane:
    """One lane of one model, all partitions together."""

    model: str
    priority: Priority
    waiting: int
    running: int
    oldest_ms: int
    """Age of the job that waits longest; 0 when none waits."""


class Backlog:
    """Stateless; many may share a wire."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    async def lanes(self, models: Iterable[str]) -> list[Lane]:
        """Every lane of these models. Raises Unavailable."""
        now = await self._wire.now_ms()
        return [await self._lane(model, priority, now) for model in models for priority in Priority]

    async def _lane(self, model: str, priority: Priority, now: int) -> Lane:
        waiting, running, oldest = 0, 0, now
        for partition in self._wire.partitions:
            for name in ("retry", "lane"):
                counts = await self._stream(partition_key(partition, name, model, priority))
                waiting, running, oldest = waiting + counts[0], running + counts[1], min(oldest, counts[2] or now)
        return Lane(model, priority, waiting, running, now - oldest if waiting else 0)

    async def _stream(self, key: str) -> tuple[int, int, int]:
        """(waiting, delivered, Redis ms of the oldest waiting entry or 0). Entries leave the stream at their job's end,
        so what is in it and not delivered is waiting."""
        redis = self._wire.redis
        with translated():
            pipeline = redis.pipeline(transaction=False)
            pipeline.xlen(key)
            pipeline.xpending(key, GROUP)
            pipeline.xinfo_groups(key)
            length, pending, groups = await pipeline.execute(raise_on_error=False)
            if isinstance(length, ResponseError):
                raise length
            delivered = 0 if isinstance(pending, ResponseError) else int(pending["pending"])
            waiting = max(0, int(length) - delivered)
            if not waiting:
                return 0, delivered, 0
            grouped = not isinstance(groups, ResponseError) and groups
            last = f"({groups[0]['last-delivered-id'].decode()}" if grouped else "-"
            first: Any = await redis.xrange(key, last, "+", count=1)
        return waiting, delivered, int(first[0][0].split(b"-")[0]) if first else 0
