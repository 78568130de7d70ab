"""A subscription: every message once and in order, however it is taken, and an end that is always told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import pytest
from redis import Redis

from streaming.errors import Unavailable
from streaming.redis import connection as subject
from streaming.redis.client import RedisClient
from streaming.redis.settings import RedisSettings

SOME = [b"%d" % number for number in range(500)]


async def test_messages_come_one_by_one_or_poured(wire: RedisClient) -> None:
    """Those that came before the pouring too, large ones in parts, and nothing of other channels."""
    large = b"x" * 1_000_000
    got: list[bytes] = []
    async with wire.subscribe("here") as subscription:
        for data in SOME:
            await wire.redis.publish("here", data)
        assert [await subscription.message() for _ in SOME[:-1]] == SOME[:-1]
        pouring = asyncio.create_task(subscription.pour(got.extend))
        for data in (large, b"last"):
            await wire.redis.publish("there", b"not this")
            await wire.redis.publish("here", data)
        async with asyncio.timeout(20):
            while got[-1:] != [b"last"]:
                await asyncio.sleep(0.01)
        pouring.cancel()
        with suppress(asyncio.CancelledError):
            await pouring
    assert got == [SOME[-1], large, b"last"]


async def test_it_leaves_no_connection_behind(wire: RedisClient, redis_url: str) -> None:
    """Given up by its reader or cut by the server; a reader who waits is told, whichever way it waits."""
    with Redis.from_url(redis_url) as client:
        for _ in range(3):
            async with wire.subscribe("here"):
                assert client.pubsub_numsub("here") == [(b"here", 1)]
        for way in ("message", "pour"):
            with pytest.raises(Unavailable, match="lost"):
                async with wire.subscribe("here") as subscription, asyncio.timeout(20):
                    client.client_kill_filter(_type="pubsub")
                    await (subscription.message() if way == "message" else subscription.pour(print))
        async with asyncio.timeout(20):
            while client.pubsub_numsub("here") != [(b"here", 0)]:
                await asyncio.sleep(0.01)


async def test_what_the_taker_raises_ends_it(wire: RedisClient) -> None:
    """A fault of ours is not taken for one of the server's."""

    def refuse(_data: bytes) -> None:
        raise ValueError("not this")

    with pytest.raises(ValueError, match="not this"):
        async with wire.subscribe("here") as subscription, asyncio.timeout(20):
            await wire.redis.publish("here", b"x")
            await subscription.pour(refuse)


async def test_a_server_that_falls_silent_is_noticed(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that answers is not, however little is published."""
    monkeypatch.setattr(subject, "PING_INTERVAL_S", 0.05)
    address = redis_url.removeprefix("redis://").partition("/")[0]
    silent = asyncio.Event()

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(65536):
                if not silent.is_set():
                    writer.write(data)
        writer.close()

    async def between(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = address.partition(":")
        back, forth = await asyncio.open_connection(host, int(port))
        await asyncio.gather(pass_on(reader, forth), pass_on(back, writer))

    server = await asyncio.start_server(between, "127.0.0.1", 0)
    wire = RedisClient.open(RedisSettings(url=f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"))
    try:
        with pytest.raises(Unavailable, match="heard nothing"):
            async with wire.subscribe("here") as subscription, asyncio.timeout(20):
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.5):
                        await subscription.message()
                silent.set()
                await subscription.message()
    finally:
        await wire.close()
        server.close()


async def test_a_refused_subscription_says_why(opened: Callable[..., RedisClient], redis_url: str) -> None:
    """By its access rules, for example."""
    with Redis.from_url(redis_url) as client:
        client.acl_setuser("deaf", enabled=True, nopass=True, commands=["+@all"], keys=["*"], reset_channels=True)
        with pytest.raises(Unavailable, match="NOPERM"):
            async with opened(redis_url.replace("redis://", "redis://deaf:x@")).subscribe("here"):
                pass
        client.acl_deluser("deaf")
