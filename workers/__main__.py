"""`python -m workers`: one worker process of one model, until it is told to drain or loses its lease."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from runtime.config import FILE, Config, ConfigError, load
from runtime.lifeline import Lifeline
from runtime.loops import supervise
from streaming.errors import Unavailable
from streaming.fleet.presence import present
from streaming.fleet.processes import Fleet, Process
from streaming.ids import new_life
from streaming.jobs.cards import ModelCard
from streaming.redis.client import RedisClient
from streaming.settings import ModelSettings, RedisSettings, served_models
from streaming.store.monitor import StoreMonitor
from telemetry import logs
from telemetry.metrics import Metrics
from telemetry.settings import TelemetrySettings
from telemetry.tracing import Tracing
from workers.engines.base import Engine, EngineDead, Piece
from workers.engines.registry import build, sections
from workers.record import Recorder
from workers.settings import WorkerSettings
from workers.tally import WorkCounters
from workers.worker import Worker, guard

log = logging.getLogger("workers")

EXIT_LOST = 75
"""The lease or the engine was lost: start a fresh process."""
STORE_RETRY_S = 1.0
LINGER_S = 60.0
"""How long a cordoned worker that has finished waits to be stopped by whoever replaces it."""

SECTIONS: dict[str, type[msgspec.Struct]] = {
    "redis": RedisSettings,
    "worker": WorkerSettings,
    "telemetry": TelemetrySettings,
    **sections(),
    "models": ModelSettings,
}


def main(argv: list[str] | None = None) -> int:
    """Parse, configure, run. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m workers", description=__doc__)
    parser.add_argument("--settings", type=Path, help="merged settings as written by `penstock up`")
    parser.add_argument("--config", type=Path, help=f"settings file (default: {FILE} in this folder, if there is one)")
    parser.add_argument("--model", help="which of the configured models to serve")
    parser.add_argument("--shape", help="which of the model's shapes, if it has several")
    parser.add_argument("--id", default="worker-1", help="this process's name in `penstock ps`")
    parser.add_argument("--data-dir", type=Path, default=Path(".penstock"), help="where weights are kept")
    args = parser.parse_args(argv)
    lifeline = Lifeline.from_environ()
    try:
        config = _config(args)
        model, settings = _choose(served_models(config.table("models", ModelSettings)), args.model)
        settings = _shaped(model, settings, args.shape)
        telemetry = config.section("telemetry", TelemetrySettings)
        logs.setup("worker", telemetry.log_level)
        metrics = Metrics.start(telemetry.metrics_dir, "worker")
        engine = build(model, settings, config, args.data_dir)
    except (ConfigError, EngineDead) as error:
        lifeline.say("failed", str(error))
        sys.stderr.write(f"error: {error}\n")
        return 2
    process = WorkerProcess(args.id, model, args.shape or "", config, engine, metrics, lifeline)
    try:
        with asyncio.Runner(loop_factory=_loop) as runner:
            code = runner.run(process.run())
    finally:
        metrics.close()
    if code == EXIT_LOST:
        logging.shutdown()
        os._exit(code)  # an engine that died may never let its own exit hooks end
    return code


def _config(args: argparse.Namespace) -> Config:
    if args.settings:
        return Config.saved(args.settings)
    path = args.config or (Path(FILE) if Path(FILE).exists() else None)
    return load(SECTIONS, path=path, environ=os.environ)


def _choose(models: dict[str, ModelSettings], wanted: str | None) -> tuple[str, ModelSettings]:
    """The model to serve."""
    if wanted is None and len(models) == 1:
        return next(iter(models.items()))
    if wanted not in models:
        raise ConfigError("--model", f"name one of the configured models: {', '.join(models)}")
    return wanted, models[wanted]


def _shaped(model: str, settings: ModelSettings, wanted: str | None) -> ModelSettings:
    """The settings of the pool this worker belongs to."""
    pools = settings.pools
    if (wanted or "") in pools:
        return pools[wanted or ""]
    if not settings.shapes:
        raise ConfigError("--shape", f"{model} has no shapes", "leave it out")
    raise ConfigError("--shape", f"name one of the shapes of {model}: {', '.join(pools)}")


class WorkerProcess:
    """The process around a worker: loading, being seen, signals, and the way out."""

    def __init__(
        self,
        name: str,
        model: str,
        shape: str,
        config: Config,
        engine: Engine,
        metrics: Metrics,
        lifeline: Lifeline,
    ) -> None:
        self._name, self._model, self._shape, self._config, self._engine = name, model, shape, config, engine
        self._metrics, self._lifeline = metrics, lifeline
        self._worker: Worker | None = None
        self._tally = WorkCounters()
        self._state = "starting"
        self._life, self._since = new_life(), time.time()
        self._cordoned = ""
        self._stop = asyncio.Event()
        self._signalled = asyncio.Event()
        self._changed = asyncio.Event()

    async def run(self) -> int:
        """Serve until SIGTERM or SIGINT. Returns the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        telemetry = self._config.section("telemetry", TelemetrySettings)
        tracing = Tracing.start("penstock-worker", telemetry.otlp_endpoint)
        if telemetry.metrics_port:
            self._metrics.serve(telemetry.metrics_port, telemetry.metrics_host)
        wire = RedisClient.open(self._config.section("redis", RedisSettings))
        self._store = StoreMonitor(wire)
        try:
            await self._store.try_to_enter()  # before the model is loaded: that takes minutes
            return await self._serve(wire, Recorder(self._model, self._metrics, tracing, self._tally))
        except EngineDead as error:
            return self._failed(f"the engine does not start: {error}")
        except ConfigError as error:
            return self._failed(str(error))
        finally:
            await self._engine.stop()
            await wire.close()
            tracing.close()

    async def _serve(self, wire: RedisClient, recorder: Recorder) -> int:
        fleet = Fleet(wire)
        async with present(fleet, self._describe) as self._changed:
            card = await self._load()
            if card is None:
                return 0
            await _patiently(self._store.require, self._lifeline, self._stop)
            await _patiently(lambda: fleet.publish_card(card), self._lifeline, self._stop)
            return await self._work(wire, card, recorder)

    async def _load(self) -> ModelCard | None:
        """Start the engine; None if this process is told to stop before it has."""
        loading = asyncio.ensure_future(
            self._engine.start(self._on_step, lambda phase: self._lifeline.say("starting", phase))
        )
        stopped = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait({loading, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not loading.done():
            loading.cancel()
            await asyncio.wait({loading})
            return None
        return loading.result()

    async def _work(self, wire: RedisClient, card: ModelCard, recorder: Recorder) -> int:
        settings = self._config.section("worker", WorkerSettings)
        _collect_rarely()
        self._worker = Worker(wire, self._engine, card, settings, recorder, self._on_cordon)
        run = asyncio.ensure_future(guard(asyncio.ensure_future(self._worker.run(self._stop))))
        watching = asyncio.ensure_future(supervise(self._store.keep_looking, STORE_RETRY_S))
        self._state = "ready"
        self._changed.set()
        self._lifeline.say("ready", self._worker.lease.id)
        log.info("ready", extra={"model": card.name, "lease": self._worker.lease.id, "context": card.context})
        while not run.done():
            stats = self._engine.stats()
            recorder.load(stats.slots, stats.running, self._worker.reserved)
            self._metrics.fold()
            await asyncio.wait([run], timeout=1.0)
        watching.cancel()
        if run.result():
            return self._failed(run.result())
        return await self._linger() if self._cordoned else 0

    async def _linger(self) -> int:
        """Finished after a cordon: be seen as that, so that it is this process that is taken away. If nobody does, end
        as one that is to be started afresh."""
        self._state = "drained"
        self._changed.set()
        try:
            async with asyncio.timeout(LINGER_S):
                await self._signalled.wait()
        except TimeoutError:
            return self._failed(f"cordoned, and nobody took it away: {self._cordoned}")
        return 0

    def _on_step(self, pieces: list[Piece]) -> None:
        if self._worker is not None:
            self._worker.on_step(pieces)
            self._tally.step(sum([piece.n for piece in pieces]), time.monotonic(), more=self._worker.generating)

    def _on_signal(self) -> None:
        self._signalled.set()
        if self._state != "drained":
            self._drain(f"{self._worker.running if self._worker else 0} jobs")

    def _on_cordon(self, reason: str) -> None:
        """Told by the scheduler, more than once."""
        if not self._stop.is_set():
            log.warning("cordoned: %s", reason)
            self._cordoned = reason
            self._drain(f"cordoned: {reason}")

    def _drain(self, detail: str) -> None:
        self._state = "draining"
        self._changed.set()
        self._lifeline.say("draining", detail)
        self._stop.set()

    def _failed(self, reason: str) -> int:
        log.error("this worker ends, others take its jobs: %s", reason)
        self._lifeline.say("failed", reason)
        return EXIT_LOST

    def _describe(self) -> Process:
        stats = self._engine.stats() if self._state != "starting" else None
        return Process(
            role="worker",
            id=self._name,
            life=self._life,
            pid=os.getpid(),
            host=socket.gethostname(),
            state=self._state,
            since=self._since,
            model=self._model,
            shape=self._shape,
            lease=self._worker.lease.id if self._worker else "",
            slots=stats.slots if stats else 0,
            running=stats.running if stats else 0,
            reserved=self._worker.reserved if self._worker else 0,
            waiting=stats.waiting if stats else 0,
            kv_tokens=stats.kv_tokens if stats else 0,
            kv_used=stats.kv_used if stats else 0,
            steps=self._tally.steps,
            step_s=self._tally.step_s,
            step_tokens=self._tally.step_tokens,
            served=dict(self._tally.served),
        )


def _collect_rarely() -> None:
    """What is loaded now stays. Tokens are no garbage of the kind that is looked for, but with Python's thresholds the
    looking was a seventh of this process's time."""
    gc.freeze()
    gc.set_threshold(20_000, 50, 100)


def _loop() -> asyncio.AbstractEventLoop:
    """uvloop, where it is to be had."""
    try:
        import uvloop  # noqa: PLC0415 - not on every platform
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


async def _patiently(action: Callable[[], Awaitable[None]], lifeline: Lifeline, stop: asyncio.Event) -> None:
    """Do it, waiting for Redis as long as it takes (or until told to stop)."""
    while not stop.is_set():
        try:
            await action()
            return
        except Unavailable as error:
            lifeline.say("starting", f"waiting for Redis: {error}")
            await asyncio.sleep(0.25)


if __name__ == "__main__":
    sys.exit(main())
