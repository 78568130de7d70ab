"""`python -m offline`: one Celery worker process, for what nobody waits for; and the bell that rings for it.

Celery runs in a thread with a pool of threads; the work itself is done in this process's event loop. Nothing is lost
when the process is killed: others go on where the files and the store say it stopped.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec
from celery import Celery
from celery.worker import WorkController
from celery.worker import state as celery_state

from api.settings import ApiSettings
from offline.app import HARD_LIMIT_S, build_app
from offline.batch.bell import DueNotifier
from offline.batch.desk import BatchRunner
from offline.batch.lines import BatchTools
from offline.batch.turn import TurnContext
from offline.broker.connection import check_broker
from offline.broker.consumer import Consumer
from offline.broker.intake import Intake
from offline.broker.publisher import Publisher
from offline.settings import OfflineSettings
from offline.webhooks.postman import Endpoint, Postman
from runtime.config import FILE, Config, ConfigError, load
from runtime.lag import watch_lag
from runtime.lifeline import Lifeline
from streaming.batches.file_store import FileStore
from streaming.batches.store import Batches
from streaming.errors import Unavailable
from streaming.events.outbox import EventSubscriptions
from streaming.fleet.presence import present
from streaming.fleet.processes import Fleet, Process
from streaming.ids import new_life
from streaming.redis.client import RedisClient
from streaming.settings import (
    BatchSettings,
    EventSettings,
    FilesSettings,
    ModelSettings,
    QuotaSettings,
    RedisSettings,
    WebhookSettings,
    served_models,
)
from streaming.store.memory import Headroom
from streaming.store.monitor import StoreMonitor
from telemetry import logs
from telemetry.metrics import Metrics
from telemetry.settings import TelemetrySettings

log = logging.getLogger("offline")

EXIT_STUCK = 75
TIDY_S = 60.0

SECTIONS: dict[str, type[msgspec.Struct]] = {
    "api": ApiSettings,
    "redis": RedisSettings,
    "files": FilesSettings,
    "batch": BatchSettings,
    "offline": OfflineSettings,
    "telemetry": TelemetrySettings,
    "models": ModelSettings,
    "webhooks": WebhookSettings,
    "events": EventSettings,
    "quotas": QuotaSettings,
}


def main(argv: list[str] | None = None) -> int:
    """Parse, configure, run. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m offline", description=__doc__)
    parser.add_argument("--settings", type=Path, help="merged settings as written by `penstock up`")
    parser.add_argument("--config", type=Path, help=f"settings file (default: {FILE} in this folder, if there is one)")
    parser.add_argument("--id", default="offline-1", help="this process's name in `penstock ps`")
    args = parser.parse_args(argv)
    lifeline = Lifeline.from_environ()
    try:
        config = _config(args)
        process = OfflineProcess(args.id, config, lifeline)
    except (ConfigError, OSError) as error:
        return _refused(lifeline, error)
    os.nice(process.settings.nice)  # before there are threads: they have what the process has
    try:
        asyncio.run(process.run())
    except ConfigError as error:
        return _refused(lifeline, error)
    return 0


def _refused(lifeline: Lifeline, error: Exception) -> int:
    lifeline.say("failed", str(error))
    sys.stderr.write(f"error: {error}\n")
    return 2


def _config(args: argparse.Namespace) -> Config:
    if args.settings:
        return Config.saved(args.settings)
    path = args.config or (Path(FILE) if Path(FILE).exists() else None)
    return load(SECTIONS, path=path, environ=os.environ)


class OfflineProcess:
    """The process around the desk. Raises ConfigError, or OSError when the folder of files cannot be used."""

    def __init__(self, name: str, config: Config, lifeline: Lifeline) -> None:
        telemetry = config.section("telemetry", TelemetrySettings)
        logs.setup("offline", telemetry.log_level)
        logging.getLogger("celery").setLevel("WARNING")  # each task twice at info level
        files = config.section("files", FilesSettings)
        self.settings = config.section("offline", OfflineSettings)
        self._redis = config.section("redis", RedisSettings)
        self._batch = config.section("batch", BatchSettings)
        self._max_choices = config.section("api", ApiSettings).max_choices_per_request
        self._served = served_models(config.table("models", ModelSettings))
        self._events = config.section("events", EventSettings)
        self._quotas = config.section("quotas", QuotaSettings)
        self._webhooks = config.table("webhooks", WebhookSettings)
        self._endpoints = [Endpoint(name, row) for name, row in self._webhooks.items()]
        check_broker("events.publish_url", self._events.publish_url)
        check_broker("events.take_url", self._events.take_url)
        self._name, self._lifeline, self._life, self._since = name, lifeline, new_life(), time.time()
        self._metrics = Metrics.start(telemetry.metrics_dir, "offline")
        if telemetry.metrics_port:
            self._metrics.serve(telemetry.metrics_port, telemetry.metrics_host)
        self._shelf = FileStore(files.dir)
        self._shelf.prepare()
        self._keep_s, self._quarantine_s = files.retention_s, files.quarantine_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._desk: BatchRunner | None = None
        self._app = build_app(self.settings, self._redis, self._look_at_batch)

    async def run(self) -> None:
        """Until SIGTERM or SIGINT."""
        self._loop, stop = asyncio.get_running_loop(), asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, stop.set)
        wire = RedisClient.open(self._redis)
        headroom, store = Headroom(wire), StoreMonitor(wire)
        tools = BatchTools(wire, headroom, store, tuple(self._served), self._batch, self._max_choices)
        say_s = min(1.0, self._redis.lease_ms / 2000)
        bench = TurnContext(tools, self._shelf, self._metrics, self._keep_s, self.settings.turn_s, say_s)
        self._desk = desk = BatchRunner(bench, self._quarantine_s)
        try:
            await self._enter(store, stop)
        except ConfigError:
            await wire.close()
            raise
        bell = DueNotifier(Batches(wire), self._app, self._metrics)
        loops = (
            bell.keep_ringing(),
            desk.keep_tidy(TIDY_S),
            headroom.keep_looking(),
            store.keep_looking(),
            watch_lag(),
            self._fold(),
        )
        tasks = [asyncio.create_task(each) for each in (*loops, *self._outward(wire))]
        consumer = self._consumer(wire, headroom, store)
        celery = _CeleryThread(self._app, self.settings.concurrency, self._name)
        try:
            async with present(Fleet(wire), self._describe):
                celery.start()
                if consumer is not None:
                    consumer.start()
                self._lifeline.say("ready")
                await self._until_stopped(stop, tasks, celery)
                self._lifeline.say("draining")
                desk.stop.set()
                if consumer is not None:
                    await consumer.stop()
                await asyncio.to_thread(celery.stop, self.settings.drain_s)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await wire.close()
            self._metrics.close()

    def _outward(self, wire: RedisClient) -> list[Coroutine[Any, Any, None]]:
        """What passes events on."""
        loops = []
        if self._endpoints:
            loops.append(Postman(wire, self._name, self._endpoints, self._metrics).keep_going())
        if self._events.publish_url:
            loops.append(Publisher(wire, self._name, self._events, self._metrics).keep_publishing())
        return loops

    def _consumer(self, wire: RedisClient, headroom: Headroom, store: StoreMonitor) -> Consumer | None:
        if not self._events.take_url:
            return None
        wanted = EventSubscriptions(self._events, self._webhooks)
        intake = Intake(
            wire, headroom, store, self._served, self._events, wanted, self._max_choices, quota=self._quotas
        )
        return Consumer(intake, self._events, self._metrics)

    async def _enter(self, store: StoreMonitor, stop: asyncio.Event) -> None:
        """Wait until Redis answers, and check that its store is this deployment's. Raises ConfigError."""
        while not stop.is_set():
            try:
                await store.enter()
            except Unavailable as error:
                self._lifeline.say("starting", f"waiting for Redis: {error}")
                await asyncio.sleep(0.2)
            else:
                return

    async def _until_stopped(self, stop: asyncio.Event, tasks: list[asyncio.Task[None]], celery: _CeleryThread) -> None:
        """Raises what one of the loops raises; ends the process when Celery has ended by itself."""
        while not stop.is_set():
            if not celery.is_alive():
                raise SystemExit("Celery's worker ended by itself")
            for task in tasks:
                if task.done():
                    task.result()
            with contextlib.suppress(TimeoutError):  # the usual case
                async with asyncio.timeout(1.0):
                    await stop.wait()

    async def _fold(self) -> None:
        while True:
            self._metrics.fold()
            await asyncio.sleep(2.0)

    def _look_at_batch(self, batch_id: str, telling: int) -> None:
        """The task's body, in one of Celery's threads: wait for the turn, which the event loop does."""
        assert self._loop is not None and self._desk is not None
        turn = asyncio.run_coroutine_threadsafe(self._desk.look_at_batch(batch_id, telling), self._loop)
        try:
            turn.result(HARD_LIMIT_S)
        except TimeoutError:
            # A disk or a file system that does not answer: whatever held on to it goes with the process.
            log.critical("a turn did not end within %d s; a fresh process is needed", HARD_LIMIT_S)
            logging.shutdown()
            os._exit(EXIT_STUCK)

    def _describe(self) -> Process:
        desk = self._desk
        return Process(
            role="offline",
            id=self._name,
            life=self._life,
            pid=os.getpid(),
            host=socket.gethostname(),
            state="draining" if desk is not None and desk.stop.is_set() else "ready",
            since=self._since,
            slots=self.settings.concurrency,
            running=desk.running if desk is not None else 0,
        )


class _CeleryThread:
    """Celery's worker beside the event loop. It takes no signals; it is asked to stop by its own state."""

    def __init__(self, app: Celery, concurrency: int, name: str) -> None:
        self._worker = WorkController(
            app=app,
            hostname=name,
            pool="threads",
            concurrency=concurrency,
            without_gossip=True,
            without_mingle=True,
            without_heartbeat=True,
        )
        self._thread = threading.Thread(target=self._worker.start, name="celery", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self, seconds: float) -> None:
        """Take nothing more, let tasks end; what has not ended then ends with the process."""
        celery_state.should_stop = 0
        self._thread.join(seconds)


if __name__ == "__main__":
    sys.exit(main())
