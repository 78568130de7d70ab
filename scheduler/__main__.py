"""The scheduler process: `python -m scheduler [--settings FILE | --config FILE] [--id NAME]`."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from runtime.config import FILE, Config, ConfigError, load
from runtime.lifeline import Lifeline
from scheduler.loop import Loop, SchedulerIdentity, SchedulerStores
from scheduler.policy.limits import ScalingLimits
from scheduler.pools.base import DryRunPool, LocalPool, Pool
from scheduler.settings import KubernetesSettings, SchedulerSettings, check_deployments, shapes_of
from streaming.errors import Unavailable
from streaming.priority import Priority
from streaming.redis.client import RedisClient
from streaming.settings import ModelSettings, RedisSettings, served_models
from streaming.store.identity import enter_store
from telemetry import logs
from telemetry.metrics import Metrics
from telemetry.settings import TelemetrySettings

ENTER_RETRY_S = 0.25

KINDS: dict[str, type[msgspec.Struct]] = {
    "redis": RedisSettings,
    "scheduler": SchedulerSettings,
    "kubernetes": KubernetesSettings,
    "telemetry": TelemetrySettings,
    "models": ModelSettings,
}


class Settings(msgspec.Struct, frozen=True):
    """What this process reads of a deployment's settings."""

    redis: RedisSettings
    scheduler: SchedulerSettings
    kubernetes: KubernetesSettings
    telemetry: TelemetrySettings
    limits: dict[str, ScalingLimits]

    @classmethod
    def read(cls, config: Config) -> Settings:
        """Without any configured model it is the simulated one, as for a worker. Raises ConfigError."""
        models = served_models(config.table("models", ModelSettings))
        own = config.section("scheduler", SchedulerSettings)
        kubernetes = config.section("kubernetes", KubernetesSettings)
        if own.pool == "kubernetes":
            check_deployments(kubernetes, models)
        return cls(
            config.section("redis", RedisSettings),
            own,
            kubernetes,
            config.section("telemetry", TelemetrySettings),
            {name: limits_of(name, model, own) for name, model in models.items()},
        )


def limits_of(name: str, model: ModelSettings, own: SchedulerSettings) -> ScalingLimits:
    """What the settings allow for one model, and for each of its pools. Raises ConfigError."""
    pools = model.pools if model.shapes else {}
    return ScalingLimits(
        min=model.least_wanted,
        max=model.most_wanted,
        targets={
            Priority.INTERACTIVE: own.interactive_s,
            Priority.STANDARD: own.standard_s,
            Priority.BATCH: own.batch_s,
        },
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
    """Returns 0 after SIGTERM or Ctrl-C, 1 when it cannot run, 2 when its settings cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m scheduler", description="Decides how many workers each model has.")
    parser.add_argument("--settings", type=Path, help="merged settings as written by `penstock up`")
    parser.add_argument("--config", type=Path, help=f"settings file (default: {FILE} in this folder, if there is one)")
    parser.add_argument("--id", default=f"scheduler-{os.getpid()}", help="name in `penstock ps`")
    options = parser.parse_args(arguments)
    lifeline = Lifeline.from_environ()
    try:
        settings = Settings.read(_config(options.settings, options.config))
    except ConfigError as error:
        return _failed(lifeline, 2, str(error))
    try:
        asyncio.run(run(settings, SchedulerIdentity(options.id, os.getpid(), socket.gethostname()), lifeline))
    except ConfigError as error:
        return _failed(lifeline, 2, str(error))
    except OSError as error:  # the metrics port is taken, or their folder cannot be written
        return _failed(lifeline, 1, f"the scheduler cannot run: {error}")
    return 0


async def run(settings: Settings, me: SchedulerIdentity, lifeline: Lifeline) -> None:
    """Schedule until SIGTERM or SIGINT. Redis may be down, then or later. Raises OSError, ConfigError."""
    telemetry = settings.telemetry
    logs.setup("scheduler", telemetry.log_level)
    lifeline.say("starting", "waiting for Redis")
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    metrics = Metrics.start(telemetry.metrics_dir, "scheduler")
    wire, pool = RedisClient.open(settings.redis), open_pool(settings, me)
    try:
        if telemetry.metrics_port:
            metrics.serve(telemetry.metrics_port, telemetry.metrics_host)
        loop = Loop(
            SchedulerStores.on(wire, metrics),
            settings.limits,
            pool,
            me,
            metrics,
            tick_s=settings.scheduler.tick_s,
            lead_s=settings.scheduler.lead_s,
            on_state=lifeline.say,
        )
        if await _entered(wire, stop):
            await loop.run(stop)
    finally:
        await pool.close()
        await wire.close()
        metrics.close()


async def _entered(wire: RedisClient, stop: asyncio.Event) -> bool:
    """Wait until Redis answers, and check that its store is this deployment's; False if told to stop before. Raises
    ConfigError."""
    while not stop.is_set():
        try:
            await enter_store(wire)
            return True
        except Unavailable:
            await asyncio.sleep(ENTER_RETRY_S)
    return False


def open_pool(settings: Settings, me: SchedulerIdentity) -> Pool:
    """The pool the settings name. Raises ConfigError."""
    match settings.scheduler.pool:
        case "local":
            return LocalPool()
        case "dry-run":
            return DryRunPool()
        case "kubernetes":
            try:
                from scheduler.pools.kubernetes import KubernetesPool  # noqa: PLC0415 - a client that only this pool needs
            except ImportError as error:
                raise ConfigError("scheduler.pool", str(error), "pip install 'penstock[kubernetes]'") from None
            return KubernetesPool(settings.kubernetes, me.holder)


def _config(saved: Path | None, file: Path | None) -> Config:
    if saved is None:
        path = file or (Path(FILE) if Path(FILE).exists() else None)
        return load(KINDS, path=path, environ=os.environ)
    try:
        return Config.saved(saved)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(str(saved), f"cannot be read: {error}") from None


def _failed(lifeline: Lifeline, code: int, reason: str) -> int:
    lifeline.say("failed", reason)
    print(f"error: {reason}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
