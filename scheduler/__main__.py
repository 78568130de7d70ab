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

from scheduler.loop import Loop, Me, Parts
from scheduler.policy import Limits
from scheduler.settings import SchedulerSettings
from streaming.backlog import Backlog
from streaming.config import FILE, Config, ConfigError, load
from streaming.fleet import Fleet
from streaming.reaper import Reaper
from streaming.settings import ModelSettings, WireSettings, check_model_names
from streaming.wire import Wire
from telemetry import logs
from telemetry.lifeline import Lifeline
from telemetry.metrics import Metrics
from telemetry.settings import TelemetrySettings

KINDS: dict[str, type[msgspec.Struct]] = {
    "redis": WireSettings,
    "scheduler": SchedulerSettings,
    "telemetry": TelemetrySettings,
    "models": ModelSettings,
}


class Settings(msgspec.Struct, frozen=True):
    """What this process reads of a deployment's settings."""

    redis: WireSettings
    scheduler: SchedulerSettings
    telemetry: TelemetrySettings
    limits: dict[str, Limits]

    @classmethod
    def read(cls, config: Config) -> Settings:
        """Without any configured model it is the simulated one, as for a worker. Raises ConfigError."""
        models = config.table("models", ModelSettings) or {"sim": ModelSettings(engine="sim")}
        try:
            check_model_names(models)
        except ValueError as error:
            raise ConfigError("models", str(error)) from None
        own = config.section("scheduler", SchedulerSettings)
        return cls(
            config.section("redis", WireSettings),
            own,
            config.section("telemetry", TelemetrySettings),
            {name: limits_of(model, own) for name, model in models.items()},
        )


def limits_of(model: ModelSettings, own: SchedulerSettings) -> Limits:
    """What the settings allow for one model."""
    return Limits(model.min_workers, model.most_workers, own.backlog_per_worker, own.idle_s)


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
        asyncio.run(run(settings, Me(options.id, os.getpid(), socket.gethostname()), lifeline))
    except OSError as error:  # the metrics port is taken, or their folder cannot be written
        return _failed(lifeline, 1, f"the scheduler cannot run: {error}")
    return 0


async def run(settings: Settings, me: Me, lifeline: Lifeline) -> None:
    """Schedule until SIGTERM or SIGINT. Redis may be down, then or later. Raises OSError."""
    telemetry = settings.telemetry
    logs.setup("scheduler", telemetry.log_level)
    lifeline.say("starting", "waiting for Redis")
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    metrics = Metrics.start(telemetry.metrics_dir, "scheduler")
    wire = Wire.open(settings.redis)
    try:
        if telemetry.metrics_port:
            metrics.serve(telemetry.metrics_port, telemetry.metrics_host)
        loop = Loop(
            Parts(Fleet(wire), Backlog(wire), Reaper(wire, metrics), wire.now_ms),
            settings.limits,
            me,
            metrics,
            tick_s=settings.scheduler.tick_s,
            on_state=lifeline.say,
        )
        await loop.run(stop)
    finally:
        await wire.close()
        metrics.close()


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
