"""Starts of a worker: a store that is away, and weights that cannot be had."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flow import deltas_of
from house import free_port, redis_process
from msgspec.structs import replace
from sim_worker import FAST, ended, expected, put_job, until

from penstock.config import Config
from penstock.engine import EngineDead, ModelCard, Piece, Stats, Step
from penstock.process import Launch
from streaming.fleet.processes import this_process
from streaming.jobs.job import JobState
from streaming.jobs.queue import Queue
from streaming.jobs.reader import JobReader
from streaming.redis.client import RedisClient
from streaming.redis.settings import RedisSettings
from streaming.store.monitor import StoreMonitor
from telemetry.metrics import Metrics
from telemetry.tracing import Tracing
from workers.__main__ import EXIT_LOST, WorkerProcess
from workers.engines.sim.engine import SimEngine
from workers.record import Recorder
from workers.settings import WorkerSettings
from workers.worker import Worker

pytestmark = pytest.mark.slow


async def test_a_store_that_is_away_at_the_start_is_waited_for(tmp_path: Path, recorder: Recorder) -> None:
    """The model is loaded: a store that comes late, or goes while the lease is taken, is no reason to load it again."""
    port, workers = free_port(), list[Worker]()
    wire = RedisClient.open(RedisSettings(url=f"redis://127.0.0.1:{port}/0", lease_ms=1_000, timeout_s=0.5))
    engine, stop = SimEngine("m", FAST), asyncio.Event()
    card = await engine.start(lambda step: [worker.on_step(step) for worker in workers], lambda _: None)
    worker = Worker(wire, engine, card, WorkerSettings(), recorder)
    workers.append(worker)
    task = asyncio.create_task(worker.run(stop))
    await asyncio.sleep(1)
    assert not task.done()
    with redis_process(tmp_path, port):
        job = await put_job(Queue(wire))
        assert (await ended(wire, job.id)).state is JobState.COMPLETED
        stop.set()
        await asyncio.wait_for(task, 20)
    await engine.stop()
    await wire.close()


async def test_a_worker_that_never_reached_the_store_ends_when_told(recorder: Recorder) -> None:
    """Nothing is drained where nothing was begun."""
    wire = RedisClient.open(RedisSettings(url=f"redis://127.0.0.1:{free_port()}/0", timeout_s=0.5))
    engine, stop = SimEngine("m", FAST), asyncio.Event()
    worker = Worker(wire, engine, await engine.start(lambda _: None, lambda _: None), WorkerSettings(), recorder)
    task = asyncio.create_task(worker.run(stop))
    await asyncio.sleep(0.3)
    assert not task.done()
    stop.set()
    await asyncio.wait_for(task, 20)
    await engine.stop()
    await wire.close()


async def at_work(
    wire: RedisClient, engine: SimEngine, said: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> tuple[WorkerProcess, asyncio.Task[int]]:
    """A worker process at work, without its start, and the task that gives its exit code."""
    monkeypatch.setattr("workers.__main__.collect_rarely", lambda: None)
    lifeline: Any = SimpleNamespace(say=lambda *words: said.append(words), note_away=lambda _: None)
    me, metrics = replace(this_process("worker", "worker-1"), model="m"), Metrics.start("", "worker")
    launch = Launch(Namespace(), Config({}), lifeline, ExitStack())
    process = WorkerProcess(me, launch, engine, metrics, Tracing())
    process._store = StoreMonitor(wire)
    card = await engine.start(process._on_step, lambda _: None)
    working = asyncio.create_task(process._work(wire, card))
    await until(lambda: process._state == "ready")
    return process, working


class Deferring(SimEngine):
    """Calls in a callback of the event loop, whose errors nobody hears."""

    async def start(self, on_step: Step, on_phase: Callable[[str], None]) -> ModelCard:
        loop = asyncio.get_running_loop()

        def deferred(pieces: list[Piece]) -> None:
            loop.call_soon(on_step, pieces)

        return await super().start(deferred, on_phase)


async def test_a_worker_that_cannot_take_a_step_ends(wire: RedisClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """It logs no token behind those that it has lost: others continue its jobs."""
    engine, said = Deferring("m", FAST), list[tuple[str, str]]()
    process, working = await at_work(wire, engine, said, monkeypatch)
    monkeypatch.setattr(process._worker._starter, "end", {}.popitem)
    _, job = [await put_job(Queue(wire), text, tokens) for text, tokens in (("short", 50), ("long", 4000))]
    assert await asyncio.wait_for(working, 20) == EXIT_LOST
    assert said[-1][0] == "failed" and said[-1][1].startswith("engine dead: a step was lost: TypeError")
    reader = JobReader(wire)
    rows = await deltas_of(reader, await reader.record(job.id))
    assert "".join([row.text for row in rows]) == expected("long", len(rows))
    await engine.stop()


class Silent(SimEngine):
    """Breaks when it is asked for its load, once the test says so."""

    is_broken = False

    def stats(self) -> Stats:
        if self.is_broken:
            raise EngineDead("it gives no stats")
        return super().stats()


async def test_an_engine_that_breaks_when_it_is_asked_ends_its_worker(
    wire: RedisClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that has failed, not as one that does not start; nothing of the worker goes on."""
    engine, said, before = Silent("m", FAST), list[tuple[str, str]](), asyncio.all_tasks()
    _, working = await at_work(wire, engine, said, monkeypatch)
    engine.is_broken = True
    assert await asyncio.wait_for(working, 20) == EXIT_LOST
    assert said[-1] == ("failed", "engine dead: it gives no stats")
    await engine.stop()
    running = [task.get_coro().__qualname__ for task in asyncio.all_tasks() - before]  # type: ignore[union-attr]
    assert not [name for name in running if name.startswith(("Worker.", "Writer.", "supervise"))]


@pytest.mark.parametrize(
    ("content", "words"), [(b"not a model", "Delete it and get it again"), (None, "choose another data directory")]
)
def test_weights_that_cannot_be_had_are_told_and_the_fix(tmp_path: Path, content: bytes | None, words: str) -> None:
    """A worker process with a damaged file, or nowhere to keep the default model: one line, no traceback."""
    path = tmp_path / "model.gguf"
    path.write_bytes(content or b"")  # a file where the folder would be
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    environ["PENSTOCK_REDIS_URL"] = f"redis://127.0.0.1:{free_port()}/0"
    toml = 'models.m.engine = "llamacpp"\n'
    if content is not None:
        toml += f'models.m.options.path = "{path}"\n'
    (tmp_path / "penstock.toml").write_text(toml)
    command = [sys.executable, "-m", "workers", "--data-dir", str(path)]
    ran = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode in (2, 75) and words in ran.stderr and "Traceback" not in ran.stderr
