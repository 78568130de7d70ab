"""How many workers share the servers of a model."""

from __future__ import annotations

import asyncio

from msgspec.structs import replace

from streaming.fleet.processes import Fleet, this_process
from streaming.redis.client import RedisClient
from workers.heartbeat import keep_counting


async def test_the_count_follows_the_store(wire: RedisClient) -> None:
    fleet, counts = Fleet(wire), asyncio.Queue[int]()
    me = replace(this_process("worker", "worker-1"), model="m", state="ready")
    await fleet.report(replace(me, life="another"))
    counting = asyncio.create_task(keep_counting(fleet, me, counts.put_nowait))
    async with asyncio.timeout(10):
        assert await counts.get() == 2
    counting.cancel()
    await asyncio.gather(counting, return_exceptions=True)
