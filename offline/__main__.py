"""`python -m offline`: runs one offline process: batches as Celery tasks, due notices, webhooks and broker events.

Celery runs in a thread with a pool of threads; the work itself is done in this process's event loop. A kill of the
process loses nothing: the files and the store say where it stopped, and other processes continue there.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

import msgspec
from celery import Celery
from celery.worker import WorkController
from celery.worker import state as celery_state

from api.openai.content import input_rules
from api.openai.media import MediaReader
from api.settings import ApiSettings, MediaSettings
from offline.app import HARD_LIMIT_S, build_app
from offline.batch.batch_runner import BatchRunner, DueNotifier
from offline.broker import Consumer, Intake, Publisher, check_broker
from offline.settings import OfflineSettings
from offline.tools import OfflineTools
from offline.webhooks import WebhookDispatcher, WebhookEndpoint
from penstock.config import Config
from penstock.content import ContentSettings
from penstock.loops import ExpectedErrors, coalesced, retry_until, wait
from penstock.process import Launch, Lifeline, argument_parser, needed_to_start, on_stop_signal, run_process
from streaming.batches.file_store import BatchSettings, FilesSettings, FileStore
from streaming.batches.store import Batches
from streaming.errors import Unavailable
from streaming.events import EventSettings, EventSubscriptions, WebhookSettings
from streaming.fleet.aliases import AliasSettings, aliases_of
from streaming.fleet.process import Process
from streaming.fleet.processes import Fleet, present, this_process
from streaming.fleet.settings import ModelSettings, limits_of, served_models
from streaming.jobs.settings import QuotaSettings, TenantSettings, content_of, weights_of
from streaming.redis.client import RedisClient
from streaming.redis.settings import RedisSettings
from streaming.store.monitor import Headroom, StoreMonitor
from telemetry.gpu import Facts, Sampler
from telemetry.metrics import Metrics
from telemetry.process import Telemetry
from telemetry.records.schema import RecordSettings
from telemetry.records.writer import NO_RECORDS, RecordSink
from telemetry.settings import TelemetrySettings
from telemetry.tracing import NO_TRACING, Tracing

log = logging.getLogger("offline")

EXIT_STUCK = 75
ENTER_RETRY_DELAY_S = 0.2
TIDY_INTERVAL_S = 60.0

SECTIONS: dict[str, type[msgspec.Struct]] = {
    "api": ApiSettings,
    "redis": RedisSettings,
    "files": FilesSettings,
    "batch": BatchSettings,
    "offline": OfflineSettings,
    "telemetry": TelemetrySettings,
    "records": RecordSettings,
    "models": ModelSettings,
    "aliases": AliasSettings,
    "webhooks": WebhookSettings,
    "events": EventSettings,
    "quotas": QuotaSettings,
    "tenants": TenantSettings,
    "content": ContentSettings,
    "media": MediaSettings,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, configure, run. Returns the exit code."""
    return run_process(argument_parser("offline", __doc__, "offline-1"), arguments, SECTIONS, _start)


def _start(launch: Launch) -> Coroutine[Any, Any, int]:
    """Raises ConfigError, StartError."""
    telemetry = Telemetry(launch, "offline")
    logging.getLogger("celery").setLevel("WARNING")  # each task twice at info level
    with needed_to_start(OSError, exit_code=2):
        me = this_process("offline", launch.options.id)
        records, tracing = telemetry.keep_records(), telemetry.trace()
        process = OfflineProcess(me, launch.config, telemetry.metrics, launch.lifeline, records, tracing)
    telemetry.serve_metrics()
    os.nice(process.settings.nice)  # before there are threads: they have what the process has
    return process.run()


class OfflineProcess:
    """The process around the batch runner. Raises ConfigError, or OSError when the folder of files cannot be used."""

    def __init__(
        self,
        me: Process,
        config: Config,
        metrics: Metrics,
        lifeline: Lifeline,
        records: RecordSink = NO_RECORDS,
        tracing: Tracing = NO_TRACING,
    ) -> None:
        files, redis = config.section("files", FilesSettings), config.section("redis", RedisSettings)
        events, webhooks = config.section("events", EventSettings), config.table("webhooks", WebhookSettings)
        self.settings, tenants = config.section("offline", OfflineSettings), config.table("tenants", TenantSettings)
        check_broker("events.publish_url", events.publish_url)
        check_broker("events.take_url", events.take_url)
        file_store, store_client = FileStore(files.dir), RedisClient.open(redis)
        file_store.prepare()
        api = config.section("api", ApiSettings)
        models = served_models(config.table("models", ModelSettings), config.raw.get("up", {}).get("workers"))
        self._tools = tools = OfflineTools(
            store_client,
            Headroom(store_client),
            StoreMonitor(store_client),
            file_store,
            metrics,
            models,
            config.section("batch", BatchSettings),
            api.max_choices_per_request,
            files.retention_s,
            self.settings.turn_s,
            save_interval_s=min(1.0, redis.lease_ms / 2000),
            weights=weights_of(tenants),
            limits=limits_of(tenants, models),
            aliases=aliases_of(config.table("aliases", AliasSettings), tenants, api.default_model, models),
            content=input_rules(config.table("content", ContentSettings), content_of(tenants), metrics),
            media=MediaReader(config.section("media", MediaSettings), store_client, file_store),
            tracing=tracing,
        )
        self._me, self._lifeline = me, lifeline
        self._loop: asyncio.AbstractEventLoop | None = None
        self._runner = BatchRunner(tools, files.quarantine_s)
        self._app = build_app(self.settings, redis, self._look_at_batch)
        sample_s = config.section("records", RecordSettings).sample_s
        self._loops: list[Callable[[], Coroutine[Any, Any, None]]] = [
            DueNotifier(Batches(store_client), self._app, metrics).keep_notifying,
            partial(self._runner.keep_tidy, TIDY_INTERVAL_S),
            tools.headroom.keep_looking,
            tools.store.keep_looking,
            self._flush_metrics,
            Sampler(records, "offline", me.name, facts=self._facts, interval_s=sample_s).keep_sampling,
        ]
        if endpoints := [WebhookEndpoint(name, row) for name, row in webhooks.items()]:
            self._loops.append(WebhookDispatcher(tools, me.id, endpoints).keep_going)
        if events.publish_url:
            self._loops.append(Publisher(tools, me.id, events).keep_publishing)
        self._consumer: Consumer | None = None
        if events.take_url:
            quotas = config.section("quotas", QuotaSettings)
            intake = Intake(tools, events, EventSubscriptions(events, webhooks), quotas)
            self._consumer = Consumer(intake, events, metrics)

    async def run(self) -> int:
        """Until SIGTERM or SIGINT. Returns the exit code."""
        self._loop, stop = asyncio.get_running_loop(), asyncio.Event()
        on_stop_signal(stop.set)
        tasks: list[asyncio.Task[None]] = []
        try:
            expected = ExpectedErrors(Unavailable, self._lifeline.wait, "waiting for Redis: %s")
            await retry_until(stop, self._tools.store.enter, expected, ENTER_RETRY_DELAY_S)
            tasks += [asyncio.create_task(work()) for work in self._loops]
            celery = _celery_thread(self._app, self.settings.concurrency, self._me.id)
            async with present(Fleet(self._tools.store_client), self._describe):
                celery.start()
                if self._consumer is not None:
                    self._consumer.start()
                self._lifeline.say("ready")
                await self._until_stopped(stop, tasks, celery)
                self._lifeline.say("draining")
                self._runner.stop.set()
                if self._consumer is not None:
                    await self._consumer.stop()
                celery_state.should_stop = 0
                await asyncio.to_thread(celery.join, self.settings.drain_s)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._tools.store_client.close()
        return 0

    async def _until_stopped(
        self, stop: asyncio.Event, tasks: list[asyncio.Task[None]], celery: threading.Thread
    ) -> None:
        """Raises what one of the loops raises; ends the process when Celery has ended by itself."""
        while not stop.is_set():
            if not celery.is_alive():
                raise SystemExit("Celery's worker ended by itself")
            for task in tasks:
                if task.done():
                    task.result()
            await wait(stop, coalesced(1.0))

    async def _flush_metrics(self) -> None:
        while True:
            self._tools.metrics.flush()
            await asyncio.sleep(coalesced(2.0))

    def _look_at_batch(self, batch_id: str, notice: int) -> None:
        """The task's body, in one of Celery's threads: wait for the turn, which the event loop does."""
        assert self._loop is not None
        turn = asyncio.run_coroutine_threadsafe(self._runner.look_at_batch(batch_id, notice), self._loop)
        try:
            turn.result(HARD_LIMIT_S)
        except TimeoutError:
            # A disk or a file system that does not answer: whatever held on to it goes with the process.
            log.critical("a turn did not end within %d s; a fresh process is needed", HARD_LIMIT_S)
            logging.shutdown()
            os._exit(EXIT_STUCK)

    def _facts(self) -> Facts:
        return {"running": self._runner.running}

    def _describe(self) -> Process:
        state = "draining" if self._runner.stop.is_set() else "ready"
        slots, running = self.settings.concurrency, self._runner.running
        return msgspec.structs.replace(self._me, state=state, slots=slots, running=running)


def _celery_thread(app: Celery, concurrency: int, name: str) -> threading.Thread:
    """The thread of Celery's worker, beside the event loop. It takes no signals; it is asked to stop by its own state:
    it then takes nothing more, and what has not ended when the process ends is left to other processes."""
    quiet = dict.fromkeys(("without_gossip", "without_mingle", "without_heartbeat"), True)
    worker = WorkController(app=app, hostname=name, pool="threads", concurrency=concurrency, **quiet)
    return threading.Thread(target=worker.start, name="celery", daemon=True)


if __name__ == "__main__":
    sys.exit(main())
