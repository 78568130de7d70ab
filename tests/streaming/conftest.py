"""Wires of a test's own, and the relay of an API process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from streaming.jobs.relay import Relay
from streaming.redis.client import RedisClient
from streaming.redis.settings import RedisSettings


@pytest.fixture
async def opened() -> AsyncIterator[Callable[..., RedisClient]]:
    """Opens a wire to an address, with these settings; all are closed with the test."""
    wires: list[RedisClient] = []

    def open_wire(url: str, kind: type[RedisClient] = RedisClient, **settings: Any) -> RedisClient:
        wires.append(kind.open(RedisSettings(url=url, **settings)))
        return wires[-1]

    yield open_wire
    for wire in wires:
        await wire.close()


@pytest.fixture
async def wide(opened: Callable[..., RedisClient], redis_url: str) -> RedisClient:
    """A wire of several partitions."""
    return opened(redis_url, lease_ms=1_000, partitions=4)


@pytest.fixture
async def relay(wire: RedisClient) -> AsyncIterator[Relay]:
    relay = Relay(wire)
    await relay.start()
    await asyncio.wait_for(relay.connected.wait(), 20)
    yield relay
    await relay.stop()
