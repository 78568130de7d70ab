"""One process's connection to Redis: commands, scripts, subscriptions, and what its failures mean.

Nothing here retries: a repeated write may be a second write. Who calls knows what may be repeated.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.client import PubSub
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from streaming.errors import Fenced, Unavailable
from streaming.keys import prefix
from streaming.scripts import load_scripts
from streaming.settings import WireSettings

REFUSALS = ("OOM", "MISCONF", "READONLY", "NOREPLICAS", "LOADING", "CLUSTERDOWN", "MASTERDOWN", "NOAUTH", "WRONGPASS")
"""Answers that mean "this server cannot keep a write now", whatever the command was."""

Call = tuple[str, int, Sequence[str | bytes | int]]
"""A script by name, the partition it runs in, its arguments."""


class Wire:
    """Open one per process, pass it to the parts that speak a piece of the protocol."""

    def __init__(self, settings: WireSettings, redis: Redis) -> None:
        self.settings = settings
        self.redis = redis
        self._scripts = load_scripts()

    @classmethod
    def open(cls, settings: WireSettings) -> Wire:
        """Nothing is sent yet; a server that is down shows at the first call."""
        pool = BlockingConnectionPool.from_url(
            settings.url,
            max_connections=64,
            timeout=settings.timeout_s,
            socket_timeout=settings.timeout_s,
            socket_connect_timeout=settings.timeout_s,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
        )
        return cls(settings, Redis(connection_pool=pool))

    @property
    def partitions(self) -> range:
        return range(self.settings.partitions)

    async def close(self) -> None:
        """Close every connection."""
        await self.redis.aclose()
        await self.redis.connection_pool.disconnect()

    async def call(self, script: str, partition: int, *args: str | bytes | int) -> Any:
        """Run one script. Raises Unavailable, Fenced."""
        (answer,) = await self.calls([(script, partition, args)])
        return answer

    async def calls(self, calls: Sequence[Call]) -> list[Any]:
        """Run scripts in order, in one round trip; each is atomic by itself. Raises Unavailable, Fenced."""
        with translated():
            try:
                answers = await self._send(calls)
            except NoScriptError:
                await self._load()
                answers = await self._send(calls)
        if b"fenced" in answers:
            raise Fenced("the lease of this worker was taken from it")
        return answers

    async def _send(self, calls: Sequence[Call]) -> list[Any]:
        if len(calls) == 1:
            return [await self.redis.evalsha(*self._evalsha(calls[0]))]
        pipeline = self.redis.pipeline(transaction=False)
        for call in calls:
            pipeline.evalsha(*self._evalsha(call))
        return await pipeline.execute()

    def _evalsha(self, call: Call) -> tuple[Any, ...]:
        script, partition, args = call
        return (self._scripts[script].sha, 1, prefix(partition), *args)

    async def _load(self) -> None:
        for script in self._scripts.values():
            await self.redis.script_load(script.source)

    async def ping(self) -> None:
        """Raises Unavailable."""
        with translated():
            await self.redis.ping()

    async def now_ms(self) -> int:
        """Redis time, the only clock the protocol knows. Raises Unavailable."""
        with translated():
            seconds, micros = await self.redis.time()
        return seconds * 1000 + micros // 1000

    @asynccontextmanager
    async def subscribe(self, channel: str) -> AsyncIterator[PubSub]:
        """A connection of its own that listens to one channel. Raises Unavailable, then or while it is read."""
        pubsub = self.redis.pubsub(ignore_subscribe_messages=True)
        try:
            with translated():
                await pubsub.subscribe(channel)
            yield pubsub
        finally:
            await pubsub.aclose()  # type: ignore[no-untyped-call]

    async def inspect(self) -> dict[str, str]:
        """What a doctor wants to know of the server. Raises Unavailable."""
        started = time.time()
        with translated():
            info = await self.redis.info("server")
            persistence = await self.redis.info("persistence")
            memory = await self.redis.info("memory")
        now = await self.now_ms()
        fsync = await self._config("appendfsync")
        return {
            "server": str(info.get("server_name", "redis")),
            "version": str(info.get("valkey_version") or info.get("redis_version", "")),
            "redis_version": str(info.get("redis_version", "")),
            "appendonly": "yes" if int(persistence.get("aof_enabled", 0)) else "no",
            "appendfsync": fsync,
            "maxmemory-policy": str(memory.get("maxmemory_policy", "")),
            "offset_ms": str(round(now - (started + time.time()) * 500)),
        }

    async def _config(self, name: str) -> str:
        """One server setting, or "" where CONFIG is forbidden."""
        try:
            found: dict[Any, Any] = await self.redis.config_get(name)
        except ResponseError:
            return ""
        return next((bytes(value).decode() for value in found.values()), "")


@contextmanager
def translated() -> Iterator[None]:
    """Turn the client library's errors into ours: Unavailable when trying again later may help."""
    try:
        yield
    except NoScriptError:
        raise
    except (RedisConnectionError, RedisTimeoutError, OSError) as error:
        raise Unavailable(f"Redis does not answer: {error}") from error
    except ResponseError as error:
        if str(error).startswith(REFUSALS):
            raise Unavailable(f"Redis refuses: {error}") from error
        raise
    except RedisError as error:
        raise Unavailable(f"Redis: {error}") from error
