"""`python -m workers`: one worker process of one model, until it is told to drain or loses its lease."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from penstock.config import ConfigError
from penstock.content import ContentSettings, rules_of
from penstock.engine import BudgetSharer, Engine, EngineDead, ModelCard, Piece, Stats
from penstock.loops import ExpectedErrors, coalesced, retry_until, run_periodically, supervise, wait
from penstock.process import Launch, argument_parser, collect_rarely, needed_to_start, on_stop_signal, run_process
from penstock.text import counted
from streaming.errors import Fenced, Unavailable
from streaming.fleet.process import HEARTBEAT_INTERVAL_S, Process
from streaming.fleet.processes import Fleet, present, this_process
from streaming.fleet.settings import NO_TARGETS, LaneTargets, ModelSettings, served_models
from streaming.jobs.settings import TenantSettings, content_of, weights_of
from streaming.redis.client import RedisClient
from streaming.redis.settings import RedisSettings
from streaming.store.monitor import StoreMonitor
from telemetry.gpu import DcgmReadings, Facts, GpuReadings, GpuSource, Sampler
from telemetry.metrics import Metrics
from telemetry.process import Telemetry
from telemetry.records.schema import RecordSettings
from telemetry.records.writer import NO_RECORDS, RecordSink
from telemetry.settings import TelemetrySettings
from telemetry.tracing import Tracing
from workers.engines.registry import build, sections
from workers.record import CallTracer, Recorder, WorkCounters
from workers.settings import WorkerSettings
from workers.worker import Worker

log = logging.getLogger("workers")

EXIT_LOST = 75
"""The lease or the engine was lost: start a fresh process."""
ENTER_RETRY_DELAY_S = 0.25
RESTART_DELAY_S = 1.0
"""Before a background loop that broke is started again."""
LINGER_TIMEOUT_S = 60.0
"""How long a cordoned worker that has finished waits to be stopped by whoever replaces it."""
MAX_PHASE = 300
"""Characters of what an engine says of its start that other processes are told."""

SECTIONS: dict[str, type[msgspec.Struct]] = {
    "redis": RedisSettings,
    "worker": WorkerSettings,
    "telemetry": TelemetrySettings,
    "records": RecordSettings,
    **sections(),
    "models": ModelSettings,
    "tenants": TenantSettings,
    "content": ContentSettings,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, configure, run. Returns the exit code."""
    parser = argument_parser("workers", __doc__, "worker-1")
    parser.add_argument("--model", help="which of the configured models to serve")
    parser.add_argument("--shape", help="which of the model's shapes, if it has several")
    parser.add_argument("--data-dir", type=Path, default=Path(".penstock"), help="where weights are kept")
    parser.add_argument("--check", action="store_true", help="only build the engine with its options, and exit")
    code = run_process(parser, arguments, SECTIONS, _start)
    threads = [each for each in threading.enumerate() if each is not threading.main_thread() and not each.daemon]
    if code == EXIT_LOST or threads:
        logging.shutdown()
        os._exit(code)  # an engine that died may never let its own exit hooks or its threads end
    return code


def _start(launch: Launch) -> Coroutine[Any, Any, int]:
    """Build the engine, which loads nothing yet. Raises ConfigError, StartError."""
    options, config = launch.options, launch.config
    served = served_models(config.table("models", ModelSettings), config.raw.get("up", {}).get("workers"))
    model, settings = _choose(served, options.model)
    settings = _shaped(model, settings, options.shape)
    telemetry = None if options.check else Telemetry(launch, "worker")
    try:
        with needed_to_start(EngineDead, exit_code=2):
            engine = build(model, settings, config, options.data_dir)
    except ConfigError as error:
        if options.check:  # behind an empty line, for `penstock up`, which also says what set the key
            sys.stdout.write(f"\n\n{json.dumps([error.key, error.problem, error.hint])}")
        raise
    if telemetry is None:
        return asyncio.sleep(0, 0)  # nothing more to do: exit code 0
    telemetry.serve_metrics()
    me = this_process("worker", options.id)
    me = msgspec.structs.replace(me, model=model, shape=options.shape or "")
    tracing, targets = telemetry.trace(), settings.targets
    records = telemetry.keep_records()
    return WorkerProcess(me, launch, engine, telemetry.metrics, tracing, targets, records).run()


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


def gpu_source(settings: TelemetrySettings) -> GpuSource | None:
    """The configured exporter, else the driver; None on a machine without either."""
    return DcgmReadings(settings.dcgm_url) if settings.dcgm_url else GpuReadings.open()


class WorkerProcess:
    """The process around a worker: loading, being seen, signals, and the way out."""

    def __init__(
        self,
        me: Process,
        launch: Launch,
        engine: Engine,
        metrics: Metrics,
        tracing: Tracing,
        targets: LaneTargets = NO_TARGETS,
        records: RecordSink = NO_RECORDS,
    ) -> None:
        self._me, self._engine, self._targets = me, engine, targets
        self._config, self._lifeline = launch.config, launch.lifeline
        tenants = self._config.table("tenants", TenantSettings)
        rules = rules_of(self._config.table("content", ContentSettings), content_of(tenants), ["output"])
        self._terms = weights_of(tenants), rules
        """By tenant: the weight, and the content rules of answers."""
        self._metrics, self._tracing, self._records = metrics, tracing, records
        self._worker: Worker | None = None
        self._tally = WorkCounters()
        self._recorder = Recorder(me.model, metrics, tracing, self._tally, records, me.name, me.id)
        self._gpus = None if records is NO_RECORDS else gpu_source(self._config.section("telemetry", TelemetrySettings))
        self._state = me.state
        self._cordoned = self._phase = ""
        self._has_lost_step = False
        """Whether the worker could not take a step: it gets no more, and ends."""
        self._stop = asyncio.Event()
        self._signalled = asyncio.Event()
        self._changed = asyncio.Event()

    async def run(self) -> int:
        """Serve until SIGTERM or SIGINT. Returns the exit code."""
        on_stop_signal(self._on_signal)
        client = RedisClient.open(self._config.section("redis", RedisSettings))
        self._store = StoreMonitor(client)
        try:
            await self._store.try_to_enter()  # before the model is loaded: that takes minutes
            return await self._serve(client)
        except EngineDead as error:
            return self._failed(f"the engine does not start: {error}")
        except ConfigError as error:
            return self._failed(str(error))
        finally:
            await self._engine.stop()
            await client.close()

    async def _serve(self, client: RedisClient) -> int:
        fleet = Fleet(client)
        if isinstance(self._engine, CallTracer):
            self._engine.trace_calls(self._tracing)
        async with present(fleet, self._describe, self._store.entered) as self._changed:
            card = await self._load()
            if card is None:
                return 0
            expected = ExpectedErrors(Unavailable, self._lifeline.wait, "waiting for Redis: %s")
            for step in (self._store.require, partial(fleet.publish_card, card)):
                await retry_until(self._stop, step, expected, ENTER_RETRY_DELAY_S)
            return await self._work(client, card)

    async def _load(self) -> ModelCard | None:
        """Start the engine; None if this process is told to stop before it has."""
        loading = asyncio.ensure_future(self._engine.start(self._on_step, self._on_phase))
        stopped = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait({loading, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not loading.done():
            loading.cancel()
            await asyncio.wait({loading})
            return None
        return loading.result()

    async def _work(self, client: RedisClient, card: ModelCard) -> int:
        settings, recorder = self._config.section("worker", WorkerSettings), self._recorder
        collect_rarely()
        self._worker = Worker(
            client, self._engine, card, settings, recorder, self._on_cordon, self._me.name, self._targets, *self._terms
        )
        run = asyncio.ensure_future(self._worker.run(self._stop))
        loops: list[Callable[[], Awaitable[None]]] = [self._store.keep_looking, self._sampler().keep_sampling]
        if isinstance(self._engine, BudgetSharer):
            loops.append(partial(keep_counting, Fleet(client), self._me, self._engine.share))
        background = [asyncio.ensure_future(supervise(loop, RESTART_DELAY_S)) for loop in loops]
        self._state = "ready"
        self._changed.set()
        self._lifeline.say("ready", self._worker.lease.id)
        log.info("ready", extra={"model": card.name, "lease": self._worker.lease.id, "context": card.context})
        try:
            while not run.done():
                stats = self._engine.stats()
                recorder.engine(stats, self._worker.reserved)
                self._lifeline.note_away("; ".join(stats.away))
                self._metrics.flush()
                await asyncio.wait([run], timeout=coalesced(1.0))
            run.result()
        except Fenced as error:
            return self._failed(f"fenced: {error}")
        except EngineDead as error:
            return self._failed(f"engine dead: {error}")
        finally:
            for task in (run, *background):
                task.cancel()
            await asyncio.gather(run, return_exceptions=True)
        return await self._linger() if self._cordoned else 0

    async def _linger(self) -> int:
        """Report this worker as drained after a cordon, so that it is removed first. If nobody removes it, end with the
        code that asks for a fresh process."""
        self._state = "drained"
        self._changed.set()
        if await wait(self._signalled, LINGER_TIMEOUT_S):
            return 0
        return self._failed(f"cordoned, and nobody took it away: {self._cordoned}")

    def _on_step(self, pieces: list[Piece]) -> None:
        if self._worker is None or self._has_lost_step:
            return
        try:
            self._worker.on_step(pieces)
        except Exception as error:  # engines call this in callbacks: the next tokens would be logged behind a gap
            self._has_lost_step = True
            self._worker.die(EngineDead(f"a step was lost: {type(error).__name__}: {error}"))
            raise
        self._tally.step(sum([piece.n for piece in pieces]), time.monotonic(), more=self._worker.generating)

    def _on_phase(self, phase: str) -> None:
        self._phase = phase[:MAX_PHASE]
        self._lifeline.say("starting", phase)

    def _on_signal(self) -> None:
        self._signalled.set()
        if self._state != "drained":
            self._drain(counted(self._worker.running, "job") if self._worker and self._worker.running else "no jobs")

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

    def _sampler(self) -> Sampler:
        interval_s = self._config.section("records", RecordSettings).sample_s
        me = self._me
        return Sampler(self._records, "worker", me.name, model=me.model, facts=self._facts, interval_s=interval_s)

    def _facts(self) -> Facts:
        """What a sample says of this worker."""
        stats, tally = self._stats(), self._tally
        gpus = self._gpus.read() if self._gpus is not None else {}
        self._recorder.gpus(gpus)
        return {
            **self._counts(stats),
            "step_s": round(tally.step_s, 4),
            "gpus": {gpu: each.joules for gpu, each in gpus.items() if each.joules is not None},
            "gpu_busy": {gpu: each.busy for gpu, each in gpus.items() if each.busy is not None},
        }

    def _stats(self) -> Stats:
        """The engine's load; none before it has started, and none of a dead engine, which the worker notices itself: a
        loop that takes samples would break on it, also when it is cancelled, and so never end."""
        if self._state != "starting":
            with contextlib.suppress(EngineDead):
                return self._engine.stats()
        return Stats(slots=0)

    def _counts(self, stats: Stats) -> dict[str, int]:
        """Counts that samples and the worker's own report give by the same names."""
        engine = {name: getattr(stats, name) for name in ("slots", "running", "waiting", "kv_tokens", "kv_used")}
        return engine | {"steps": self._tally.steps, "step_tokens": self._tally.step_tokens}

    def _describe(self) -> Process:
        stats = self._stats()
        return msgspec.structs.replace(
            self._me,
            **self._counts(stats),
            state=self._state,
            lease=self._worker.lease.id if self._worker else "",
            reserved=self._worker.reserved if self._worker else 0,
            step_s=self._tally.step_s,
            tokens_per_s=round(self._tally.tokens_per_s(time.monotonic()), 3),
            phase=self._phase if self._state == "starting" else "",
            away=stats.away,
            away_s=stats.away_s,
            adapters=stats.adapters,
            swaps=stats.swaps,
            served=dict(self._tally.served),
        )


def peers_of(me: Process, others: list[Process]) -> int:
    """How many workers of the same pool may run requests, this one included. Those that start run none yet, and those
    that drain still do."""
    lives = {
        each.life for each in others if (each.model, each.shape) == (me.model, me.shape) and each.state != "starting"
    }
    return len(lives | {me.life})


async def keep_counting(fleet: Fleet, me: Process, share: Callable[[int], None]) -> NoReturn:
    """Call `share` with the number of peers every few seconds; while the store does not answer, the last one stays."""

    async def count() -> None:
        share(peers_of(me, await fleet.processes("worker")))

    expected = ExpectedErrors(Unavailable, log.warning, "the other workers cannot be counted: %s", once=True)
    await run_periodically(count, HEARTBEAT_INTERVAL_S, expected)


if __name__ == "__main__":
    sys.exit(main())
