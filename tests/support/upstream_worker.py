"""Workers with the engine `upstream`, started by a test on a real store and ended after it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path

import pytest
from sim_worker import Running

from penstock.engine import Piece
from streaming.redis.client import RedisClient
from workers.engines.upstream.engine import build
from workers.engines.upstream.settings import UpstreamSettings
from workers.record import Recorder
from workers.settings import WorkerSettings
from workers.worker import Worker

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
    ) -> Running:
        engine = build(model, settings, Path(), (others or {}).get)
        running: list[Running] = []

        def on_step(step: list[Piece]) -> None:
            running[0].worker.on_step(step)

        card = await engine.start(on_step, lambda _: None)
        worker = Worker(wire, engine, card, worker_settings or WorkerSettings(drain_s=5), recorder)
        stop = asyncio.Event()
        running.append(Running(worker, stop, asyncio.create_task(worker.run(stop)), engine))  # type: ignore[arg-type]
        started.append(running[0])
        return running[0]

    yield begin
    for running in started:
        running.task.cancel()
        await asyncio.gather(running.task, return_exceptions=True)
        await running.engine.stop()
