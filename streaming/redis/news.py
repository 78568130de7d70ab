"""Change notifications over pub/sub: each says that the store should be read again. Messages may be lost; `every_s`
bounds the delay."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator

from penstock.loops import ExpectedErrors, coalesced, run_periodically, wait
from streaming.errors import Unavailable
from streaming.keys import channel
from streaming.redis.client import RedisClient

log = logging.getLogger(__name__)


async def news(client: RedisClient, kind: str, name: str, every_s: float) -> AsyncGenerator[None]:
    """Yield at once, after each message of a channel, and at least every `every_s`. Never ends."""
    changed = asyncio.Event()

    async def listen() -> None:
        async for _ in messages(client, kind, name):
            changed.set()

    expected = ExpectedErrors(Unavailable, log.debug, "no news until Redis answers: %s")
    listening = asyncio.create_task(run_periodically(listen, every_s, expected))
    try:
        while True:
            changed.clear()
            yield
            await wait(changed, coalesced(every_s))
    finally:
        listening.cancel()


async def messages(client: RedisClient, kind: str, name: str) -> AsyncIterator[None]:
    """Yield once subscribed to a channel, and after each of its messages. Never ends; raises Unavailable."""
    async with client.subscribe(channel(kind, name)) as subscription:
        yield
        while True:
            await subscription.message()
            yield
