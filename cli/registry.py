"""Store access of the CLI: connects to a deployment's Redis, and lists the processes that are registered there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from cli.output import Problem
from streaming.errors import Unavailable
from streaming.fleet.process import Process
from streaming.fleet.processes import Fleet
from streaming.redis.client import RedisClient
from streaming.redis.settings import RedisSettings

UNREACHABLE_CODE = "redis_unreachable"
OF_INSTANCE = "set by the instance that runs here"
"""The source of a URL that an instance has published."""


def processes(settings: RedisSettings) -> list[Process]:
    """The processes that reported themselves in the last seconds. Raises Problem if Redis is unavailable."""
    try:
        return asyncio.run(_processes(settings))
    except (Unavailable, ValueError) as error:  # ValueError: not a Redis URL
        raise unreachable("the instance cannot be found through Redis", error) from None


@contextmanager
def naming_source(source: str) -> Iterator[None]:
    """Within the block, the error for a store that does not answer names what set its URL, as `Config.source` does."""
    try:
        yield
    except Problem as problem:
        if problem.code == UNREACHABLE_CODE:
            problem.next_step = f"start it, or correct redis.url ({source or 'its default'})"
        raise


async def _processes(settings: RedisSettings) -> list[Process]:
    async with connected(settings) as store_client:
        return await Fleet(store_client).processes()


@asynccontextmanager
async def connected(settings: RedisSettings) -> AsyncIterator[RedisClient]:
    """A client of the store, for the length of a command. Raises ValueError: not a Redis URL."""
    store_client = RedisClient.open(settings)
    try:
        yield store_client
    finally:
        await store_client.close()


def unreachable(message: str, error: Exception) -> Problem:
    """The error for a store that does not answer."""
    return Problem(message, cause=str(error), next_step="start it, or correct redis.url", code=UNREACHABLE_CODE)
