"""How much waits in each lane, and since when."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from redis.exceptions import ResponseError

from streaming.keys import GROUP, parse_lane, partition_key
from streaming.messages import Priority
from streaming.wire import Wire, translated

NEAREST = 32
"""Deadlines looked at, of each partition."""


@dataclass(frozen=True, slots=True)
class Lane:
    """One lane of one model, all partitions together."""

    model: str
    priority: Priority
    waiting: int
    running: int
    oldest_ms: int
    """Age of the job that waits longest; 0 when none waits."""
    added: int = 0
    """Jobs ever put here; 0 on a server that does not count them."""


@dataclass(frozen=True, slots=True)
class Due:
    """A waiting job with a deadline."""

    model: str
    priority: Priority
    in_ms: int
    """Until it expires."""
    age_ms: int


@dataclass(frozen=True, slots=True)
class Stream:
    """What one stream of a lane says of itself."""

    waiting: int
    delivered: int
    first_ms: int
    """Redis time of the oldest waiting entry, or 0."""
    added: int


class Backlog:
    """Stateless; many may share a wire."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    async def lanes(self, models: Iterable[str]) -> list[Lane]:
        """Every lane of these models. Raises Unavailable."""
        now = await self._wire.now_ms()
        return [await self._lane(model, priority, now) for model in models for priority in Priority]

    async def _lane(self, model: str, priority: Priority, now: int) -> Lane:
        waiting, running, oldest, added = 0, 0, now, 0
        for partition in self._wire.partitions:
            for name in ("suspects", "retry", "lane"):
                stream = await self._stream(partition_key(partition, name, model, priority))
                waiting, running = waiting + stream.waiting, running + stream.delivered
                oldest = min(oldest, stream.first_ms or now)
                added += stream.added if name == "lane" else 0  # elsewhere they come for the second time
        return Lane(model, priority, waiting, running, now - oldest if waiting else 0, added)

    async def due(self) -> list[Due]:
        """The nearest deadlines of waiting jobs, of all models. Raises Unavailable."""
        now, found = await self._wire.now_ms(), []
        for partition in self._wire.partitions:
            with translated():
                nearest: Any = await self._wire.redis.zrange(
                    partition_key(partition, "timers"), 0, NEAREST - 1, withscores=True
                )
                if not nearest:
                    continue
                pipeline = self._wire.redis.pipeline(transaction=False)
                for job_id, _ in nearest:
                    pipeline.hmget(partition_key(partition, "job", job_id.decode()), ("lane", "created"))
                jobs = await pipeline.execute()
            for (_, at), (lane, created) in zip(nearest, jobs, strict=True):
                if lane is not None:  # else it ended between the two looks
                    model, priority = parse_lane(lane.decode())
                    found.append(Due(model, priority, max(0, int(at) - now), now - int(float(created))))
        return found

    async def _stream(self, key: str) -> Stream:
        """Entries leave the stream at their job's end, so what is in it and not delivered is waiting."""
        redis = self._wire.redis
        with translated():
            pipeline = redis.pipeline(transaction=False)
            pipeline.xlen(key)
            pipeline.xpending(key, GROUP)
            pipeline.xinfo_groups(key)
            pipeline.xinfo_stream(key)
            length, pending, groups, about = await pipeline.execute(raise_on_error=False)
            if isinstance(length, ResponseError):
                raise length
            delivered = 0 if isinstance(pending, ResponseError) else int(pending["pending"])
            added = 0 if isinstance(about, ResponseError) else int(about.get("entries-added") or 0)
            waiting = max(0, int(length) - delivered)
            if not waiting:
                return Stream(0, delivered, 0, added)
            grouped = not isinstance(groups, ResponseError) and groups
            last = f"({groups[0]['last-delivered-id'].decode()}" if grouped else "-"
            first: Any = await redis.xrange(key, last, "+", count=1)
        return Stream(waiting, delivered, int(first[0][0].split(b"-")[0]) if first else 0, added)
