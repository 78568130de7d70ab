"""Process registry reader: lists a deployment's processes from Redis, for commands without its data folder."""

from __future__ import annotations

import asyncio

from cli.errors import UNREACHABLE, Problem
from streaming.errors import Unavailable
from streaming.fleet.process import Process
from streaming.fleet.processes import Fleet
from streaming.redis.client import RedisClient
from streaming.settings import RedisSettings


def processes(settings: RedisSettings) -> list[Process]:
    """The processes that reported themselves in the last seconds. Raises Problem if Redis is unavailable."""
    try:
        return asyncio.run(_processes(settings))
    except (Unavailable, ValueError) as error:  # ValueError: not a Redis URL
        raise Problem(
            "the instance cannot be found through Redis",
            cause=str(error),
            next_step="check --redis-url or PENSTOCK_REDIS_URL",
            exit_code=UNREACHABLE,
            code="redis_unreachable",
        ) from None


async def _processes(settings: RedisSettings) -> list[Process]:
    wire = RedisClient.open(settings)
    try:
        return await Fleet(wire).processes()
    finally:
        await wire.close()
