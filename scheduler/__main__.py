"""The scheduler process: `python -m scheduler [--settings FILE | --config FILE] [--id NAME]`."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from penstock.config import Config, ConfigError
from penstock.loops import ExpectedErrors, retry_until, supervise
from penstock.process import Launch, Lifeline, argument_parser, on_stop_signal, run_process
from scheduler.loop import Loop, holder_of
from scheduler.policy.snapshot import ScalingLimits
from scheduler.pools.base import DryRunPool, Pool
from scheduler.settings import KubernetesSettings, SchedulerSettings, check_deployments, shapes_of
from streaming.errors import Unavailable
from streaming.fleet.process import Process
from streaming.fleet.processes import this_process
from streaming.fleet.settings import ModelSettings, served_models
from streaming.jobs.reaper import Reaper
from streaming.order import Priority
from streaming.redis.client import RedisClient
from streaming.redis.settings import RedisSettings
from streaming.store.identity import enter_store
from telemetry.gpu import Sampler
from telemetry.metrics import Metrics
from telemetry.process import Telemetry
from telemetry.records.schema import RecordSettings
from telemetry.records.writer import NO_RECORDS, RecordSink
from telemetry.settings import TelemetrySettings

ENTER_RETRY_DELAY_S = 0.25

SECTIONS: dict[str, type[msgspec.Struct]] = {
    "redis": RedisSettings,
    "scheduler": SchedulerSettings,
    "kubernetes": KubernetesSettings,
    "telemetry": TelemetrySettings,
    "records": RecordSettings,
    "models": ModelSettings,
}


def read_limits(config: Config) -> dict[str, ScalingLimits]:
    """What the settings allow for each model. Without a configured model, the scheduler scales the simulated one, which
    a worker then serves. Raises ConfigError."""
    models = served_models(config.table("models", ModelSettings), config.raw.get("up", {}).get("workers"))
    own = config.section("scheduler", SchedulerSettings)
    if own.pool == "kubernetes":
        check_deployments(config.section("kubernetes", KubernetesSettings), models)
    return {name: limits_of(name, model, own) for name, model in models.items()}


def limits_of(name: str, model: ModelSettings, own: SchedulerSettings) -> ScalingLimits:
    """What the settings allow for one model, and for each of its pools. Raises ConfigError."""
    pools = model.pools if model.shapes else {}
    return ScalingLimits(
        min=model.least_wanted,
        max=model.most_wanted,
        targets=dict(zip(Priority, (own.interactive_s, own.standard_s, own.batch_s), strict=True)),
        idle_s=own.idle_s,
        sleep_s=own.sleep_s,
        cold_start_s=own.cold_start_s,
        cover=own.cover,
        cost=model.cost_per_hour,
        budget=model.budget_per_hour,
        shapes=shapes_of(name, model),
        pools={shape: limits_of(name, pool, own) for shape, pool in pools.items()},
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, configure, schedule. Returns the exit code."""
    parser = argument_parser("scheduler", "Decides how many workers each model has.", f"scheduler-{os.getpid()}")
    return run_process(parser, arguments, SECTIONS, _start)


def _start(launch: Launch) -> Coroutine[Any, Any, int]:
    """Raises ConfigError, StartError."""
    limits, telemetry = read_limits(launch.config), Telemetry(launch, "scheduler")
    telemetry.serve_metrics()
    me, records = this_process("scheduler", launch.options.id), telemetry.keep_records()
    return run(launch.config, limits, me, launch.lifeline, telemetry.metrics, records)


async def run(
    config: Config,
    limits: Mapping[str, ScalingLimits],
    me: Process,
    lifeline: Lifeline,
    metrics: Metrics,
    records: RecordSink = NO_RECORDS,
) -> int:
    """Schedule until SIGTERM or SIGINT. Redis may be down, then or later. Returns the exit code. Raises ConfigError."""
    lifeline.say("starting", "waiting for Redis")
    stop = asyncio.Event()
    on_stop_signal(stop.set)
    own, sample_s = config.section("scheduler", SchedulerSettings), config.section("records", RecordSettings).sample_s
    client, pool = RedisClient.open(config.section("redis", RedisSettings)), open_pool(config, me)
    try:
        reaper = Reaper(client, metrics)
        loop = Loop(client, reaper, limits, pool, me, metrics, own.tick_s, own.lead_s, on_state=lifeline.say)
        expected = ExpectedErrors(Unavailable, lifeline.wait, "waiting for Redis: %s")
        if await retry_until(stop, partial(enter_store, client), expected, ENTER_RETRY_DELAY_S):
            sampler = Sampler(records, "scheduler", me.name, facts=loop.facts, interval_s=sample_s)
            sampling = asyncio.create_task(supervise(sampler.keep_sampling, ENTER_RETRY_DELAY_S))
            await loop.run(stop)
            sampling.cancel()
    finally:
        await pool.close()
        await client.close()
    return 0


def open_pool(config: Config, me: Process) -> Pool:
    """The pool the settings name. Raises ConfigError."""
    match config.section("scheduler", SchedulerSettings).pool:
        case "local":
            return Pool()
        case "dry-run":
            return DryRunPool()
        case "kubernetes":
            try:
                from scheduler.pools.kubernetes import KubernetesPool  # noqa: PLC0415 - a client that only this pool needs
            except ImportError as error:
                raise ConfigError("scheduler.pool", str(error), "pip install 'penstock[kubernetes]'") from None
            return KubernetesPool(config.section("kubernetes", KubernetesSettings), holder_of(me))


if __name__ == "__main__":
    sys.exit(main())
