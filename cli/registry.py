"""Store access of the CLI: connects to a deployment's Redis, and lists the processes that are registered there."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import msgspec

from cli.instance import Instance
from cli.output import Problem
from penstock.config import Config
from streaming.errors import Unavailable
from streaming.fleet.process import Process
from streaming.fleet.processes import Fleet
from streaming.redis.client import RedisClient
from streaming.redis.settings import RedisSettings


def store_settings(config: Config, instance: Instance | None = None) -> RedisSettings:
    """How to reach the store of an instance, else the configured one. Raises ConfigError."""
    return config.section(
        "redis", RedisSettings, {"url": instance.redis_url} if instance and instance.redis_url else {}
    )


def processes(config: Config, instance: Instance | None = None, timeout_s: float = math.inf) -> list[Process]:
    """The processes that reported themselves to the store in the last seconds. Raises Problem if it is unavailable."""

    async def listed() -> list[Process]:
        settings = store_settings(config, instance)
        bounded = msgspec.structs.replace(settings, timeout_s=min(timeout_s, settings.timeout_s))
        async with connected(bounded) as store_client:
            return await Fleet(store_client).processes()

    try:
        return asyncio.run(listed())
    except (Unavailable, ValueError) as error:  # ValueError: not a Redis URL
        raise unreachable("the instance cannot be found through Redis", error, config, instance) from None


@asynccontextmanager
async def connected(settings: RedisSettings) -> AsyncIterator[RedisClient]:
    """A client of the store, for the length of a command. Raises ValueError: not a Redis URL."""
    store_client = RedisClient.open(settings)
    try:
        yield store_client
    finally:
        await store_client.close()


def unreachable(message: str, error: Exception, config: Config, instance: Instance | None) -> Problem:
    """The error for a store that does not answer, which names what has set its URL."""
    source = "set by the instance that runs here" if instance else config.sources.of("redis.url") or "its default"
    next_step = f"start it, or correct redis.url ({source})"
    return Problem(message, cause=str(error), next_step=next_step, code="redis_unreachable")


def place(redis_url: str) -> str:
    """The address of a Redis URL (it may name several hosts), without its password."""
    parts = urlsplit(redis_url)
    return parts.netloc.rpartition("@")[2] or parts.path
