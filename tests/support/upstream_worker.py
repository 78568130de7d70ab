"""Workers with the engine `upstream`, started by a test on a real store and ended after it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path

import pytest
from sim_worker import Running, all_ended, begun

from streaming.redis.client import RedisClient
from workers.engines.upstream.engine import build
from workers.engines.upstream.settings import UpstreamSettings
from workers.record import Recorder
from workers.settings import WorkerSettings

StartUpstream = Callable[..., Awaitable[Running]]


@pytest.fixture
async def start_upstream(wire: RedisClient, recorder: Recorder) -> AsyncIterator[StartUpstream]:
    """Starts workers of model `m`; ends them all after the test."""
    started: list[Running] = []

    async def begin(
        settings: UpstreamSettings,
        worker_settings: WorkerSettings | None = None,
        model: str = "m",
        others: Mapping[str, UpstreamSettings] | None = None,
        adapters: Mapping[str, str] | None = None,
    ) -> Running:
        engine = build(model, settings, Path(), adapters or {}, (others or {}).get)
        started.append(await begun(wire, engine, worker_settings, recorder))
        return started[-1]

    yield begin
    await all_ended(started)
