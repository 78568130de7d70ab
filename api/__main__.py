"""`python -m api`: one API process, on a socket it was handed or on one it opens."""

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
from concurrent.futures import CancelledError
from functools import partial
from pathlib import Path
from typing import cast

import msgspec
import uvicorn

from api.app import build_app
from api.auth import audit
from api.auth.keys import Keyring, check_exposure, check_keyless
from api.health import live_samples
from api.open_files import RESERVED_FILES, allowed_connections
from api.server import ApiServer
from api.services import Services
from api.settings import ApiSettings, KeySettings
from api.stream.connection import Connection
from api.stream.connection_guard import ConnectionGuard
from penstock import __version__
from runtime.config import FILE, Config, ConfigError, load
from runtime.lifeline import Lifeline
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
from telemetry import logs
from telemetry.live_gauges import GaugeSample
from telemetry.metrics import Metrics
from telemetry.settings import TelemetrySettings
from telemetry.tracing import Tracing

log = logging.getLogger(__name__)

SECTIONS: dict[str, type[msgspec.Struct]] = {
    "api": ApiSettings,
    "redis": RedisSettings,
    "files": FilesSettings,
    "batch": BatchSettings,
    "telemetry": TelemetrySettings,
    "models": ModelSettings,
    "keys": KeySettings,
    "webhooks": WebhookSettings,
    "events": EventSettings,
    "quotas": QuotaSettings,
}

LIVE_TIMEOUT_S = 5.0
"""A reading of the metrics port is answered without lanes and batches after this."""
SEND_BUFFER = 64 * 1024
"""Bytes the kernel keeps for a reader that takes nothing; by itself it would keep megabytes, and hide for minutes that
the reader has stalled."""


def main(argv: list[str] | None = None) -> int:
    """Parse, configure, serve. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m api", description=__doc__)
    parser.add_argument("--settings", type=Path, help="merged settings as written by `penstock up`")
    parser.add_argument("--config", type=Path, help=f"settings file (default: {FILE} in this folder, if there is one)")
    parser.add_argument("--id", default="api-1", help="this process's name in `penstock ps`")
    parser.add_argument("--listen-fd", type=int, help="number of a listening socket to serve on")
    args = parser.parse_args(argv)
    lifeline = Lifeline.from_environ()
    try:
        config = _config(args)
        settings = config.section("api", ApiSettings)
        keyring = Keyring(config.table("keys", KeySettings), settings.admin_token_sha256)
        check_exposure(settings.host, keyring)
        check_keyless(settings, keyring)
        services = _services(config, keyring)
        audit.begin(keyring)
        listener = _listener(settings, args.listen_fd)
    except ConfigError as error:
        return _refused(lifeline, error)
    except OSError as error:
        lifeline.say("failed", str(error))
        sys.stderr.write(f"error: cannot listen on {settings.host}:{settings.port}: {error}\n")
        return 1
    _collect_rarely()
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(_serve(services, listener, args.id, lifeline, config.section("telemetry", TelemetrySettings)))
    except ConfigError as error:
        return _refused(lifeline, error)
    except OSError as error:
        lifeline.say("failed", str(error))
        sys.stderr.write(f"error: {error}\n")
        return 1
    finally:
        services.metrics.close()
        services.tracing.close()
    return 0


def _refused(lifeline: Lifeline, error: ConfigError) -> int:
    lifeline.say("failed", str(error))
    sys.stderr.write(f"error: {error}\n")
    return 2


def _collect_rarely() -> None:
    """What is loaded now stays. A full collection walks all that open streams hold, and every stream waits for it:
    with 200 stalled readers the others' 99th percentile was 29 ms with Python's thresholds and is 23 ms with these."""
    gc.freeze()
    gc.set_threshold(20_000, 50, 100)


def _config(args: argparse.Namespace) -> Config:
    if args.settings:
        return Config.saved(args.settings)
    path = args.config or (Path(FILE) if Path(FILE).exists() else None)
    return load(SECTIONS, path=path, environ=os.environ)


def _services(config: Config, keyring: Keyring) -> Services:
    telemetry = config.section("telemetry", TelemetrySettings)
    logs.setup("api", telemetry.log_level)
    metrics = Metrics.start(telemetry.metrics_dir, "api")
    return Services(
        settings=config.section("api", ApiSettings),
        wire=RedisClient.open(config.section("redis", RedisSettings)),
        models=served_models(config.table("models", ModelSettings)),
        keyring=keyring,
        metrics=metrics,
        tracing=Tracing.start("penstock-api", telemetry.otlp_endpoint),
        version=__version__,
        wanted=EventSubscriptions(config.section("events", EventSettings), config.table("webhooks", WebhookSettings)),
        files_settings=config.section("files", FilesSettings),
        batch_settings=config.section("batch", BatchSettings),
        quota_settings=config.section("quotas", QuotaSettings),
    )


def _listener(settings: ApiSettings, fd: int | None) -> socket.socket:
    """The socket to serve on; its connections have small buffers. Raises OSError when the address is taken."""
    listener = socket.socket(fileno=fd) if fd is not None else _opened(settings)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
    return listener


def _opened(settings: ApiSettings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((settings.host, settings.port))
    listener.listen(2048)
    return listener


async def _serve(
    services: Services, listener: socket.socket, name: str, lifeline: Lifeline, telemetry: TelemetrySettings
) -> None:
    """Serve until SIGTERM or SIGINT, then let open streams end within the drain time. Raises ConfigError if the store
    is one that this process must not use."""
    settings, since, life = services.settings, time.time(), new_life()
    try:
        await services.store.try_to_enter()
    except ConfigError:
        await services.wire.close()
        raise
    if telemetry.metrics_port:
        _serve_metrics(services, telemetry)
    host, port = listener.getsockname()[:2]
    app = build_app(services, lambda: lifeline.say("ready", f"http://{host}:{port}"))
    guard = _guard(services)
    server = ApiServer(
        uvicorn.Config(
            app,
            http=cast(type[asyncio.Protocol], partial(Connection, guard=guard)),
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            lifespan="on",
            ws="none",
            timeout_graceful_shutdown=max(1, int(settings.drain_s)),
        ),
        on_tick=guard.sweep,
    )

    def describe() -> Process:
        return Process(
            role="api",
            id=name,
            life=life,
            pid=os.getpid(),
            host=socket.gethostname(),
            state="draining" if server.should_exit else "ready",
            since=since,
            url=f"http://{host}:{port}",
        )

    # The server raises the signals it was stopped by once more when it is done; there is nothing left to do then.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    wire = RedisClient.open(services.wire.settings)
    try:
        async with present(Fleet(wire), describe):
            await server.serve(sockets=[listener])
    finally:
        await wire.close()


def _serve_metrics(services: Services, telemetry: TelemetrySettings) -> None:
    """/metrics on a port of its own, which asks for no key. Raises OSError when the port is taken."""
    loop = asyncio.get_running_loop()

    def live() -> list[GaugeSample]:
        work = live_samples(services)
        try:
            return asyncio.run_coroutine_threadsafe(work, loop).result(LIVE_TIMEOUT_S)
        except (TimeoutError, CancelledError):  # the loop is held up, or ends
            return []
        except RuntimeError:  # it has ended
            work.close()
            return []

    services.metrics.serve(telemetry.metrics_port, telemetry.metrics_host, live)


def _guard(services: Services) -> ConnectionGuard:
    """With as many connections as the operating system allows."""
    settings = services.settings
    connections = allowed_connections(settings.max_connections)
    if connections < settings.max_connections:
        needed = settings.max_connections + RESERVED_FILES
        log.info("open files allow %d connections; api.max_connections needs ulimit -n %d", connections, needed)
        settings = msgspec.structs.replace(settings, max_connections=connections)
    return ConnectionGuard(settings, lambda code: services.metrics.errors.labels(code).inc())


def _loop_factory() -> type[asyncio.AbstractEventLoop]:
    """uvloop, where it is to be had."""
    try:
        import uvloop  # noqa: PLC0415 - not on every platform
    except ImportError:
        return asyncio.SelectorEventLoop
    return uvloop.Loop


if __name__ == "__main__":
    sys.exit(main())
