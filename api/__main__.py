"""`python -m api`: runs one API process, on a socket that it inherits or on one that it opens."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError
from functools import partial
from typing import Any, cast

import msgspec
import uvicorn

from api.app import build_app
from api.auth import audit
from api.auth.keys import Keyring, check_exposure, check_keyless, issuer_of
from api.health import live_samples
from api.openai.content import input_rules
from api.services import Services
from api.settings import ApiSettings, KeySettings, MediaSettings, ModerationSettings, OidcSettings
from api.stream.connection import Connection
from api.stream.connection_guard import (
    RESERVED_FILES,
    SWEEP_INTERVAL_S,
    ConnectionGuard,
    DrainingServer,
    allowed_connections,
)
from api.stream.handshake import Handshake
from api.tls import Certificate
from penstock import __version__
from penstock.config import Config, ConfigError
from penstock.content import ContentSettings
from penstock.loops import supervise
from penstock.process import Launch, StartError, argument_parser, collect_rarely, listen, run_process
from streaming.batches.file_store import BatchSettings, FilesSettings
from streaming.events import EventSettings, EventSubscriptions, WebhookSettings
from streaming.fleet.aliases import AliasSettings, aliases_of
from streaming.fleet.process import Process
from streaming.fleet.processes import Fleet, present, this_process
from streaming.fleet.settings import ModelSettings, limits_of, served_models
from streaming.jobs.settings import QuotaSettings, TenantSettings, content_of, weights_of
from streaming.redis.client import RedisClient
from streaming.redis.settings import RedisSettings
from telemetry.gpu import Sampler
from telemetry.metrics import GaugeSample
from telemetry.process import Telemetry
from telemetry.records.schema import RecordSettings
from telemetry.settings import TelemetrySettings

log = logging.getLogger(__name__)

SECTIONS: dict[str, type[msgspec.Struct]] = {
    "api": ApiSettings,
    "redis": RedisSettings,
    "files": FilesSettings,
    "batch": BatchSettings,
    "telemetry": TelemetrySettings,
    "records": RecordSettings,
    "models": ModelSettings,
    "aliases": AliasSettings,
    "keys": KeySettings,
    "oidc": OidcSettings,
    "webhooks": WebhookSettings,
    "events": EventSettings,
    "quotas": QuotaSettings,
    "tenants": TenantSettings,
    "content": ContentSettings,
    "moderation": ModerationSettings,
    "media": MediaSettings,
}

LIVE_TIMEOUT_S = 5.0
"""A reading of the metrics port is answered without lanes and batches after this."""
SEND_BUFFER = 64 * 1024
"""Bytes the kernel keeps for a reader that takes nothing; by itself it would keep megabytes, and hide for minutes that
the reader has stalled."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, configure, serve. Returns the exit code."""
    parser = argument_parser("api", __doc__, "api-1")
    parser.add_argument(
        "--listen-fd", type=int, action="append", help="number of a listening socket to serve on; may come again"
    )
    return run_process(parser, arguments, SECTIONS, _start)


def _start(launch: Launch) -> Coroutine[Any, Any, int]:
    """Build the services, open the sockets, and return the coroutine that serves. Raises ConfigError, StartError."""
    config = launch.config
    settings = config.section("api", ApiSettings)
    issuer = issuer_of(config.section("oidc", OidcSettings))
    keyring = Keyring(config.table("keys", KeySettings), settings.admin_token_sha256, issuer)
    check_exposure(settings.host, keyring)
    check_keyless(settings, keyring)
    telemetry = Telemetry(launch, "api")
    services = _services(config, keyring, telemetry, launch.options.id)
    audit.begin(keyring)
    listeners = _listeners(settings, launch.options.listen_fd)
    collect_rarely()
    return _serve(services, listeners, launch, telemetry)


def _services(config: Config, keyring: Keyring, telemetry: Telemetry, name: str) -> Services:
    tenants, moderation = config.table("tenants", TenantSettings), config.section("moderation", ModerationSettings)
    models = served_models(config.table("models", ModelSettings), config.raw.get("up", {}).get("workers"))
    moderation.check(models)
    settings = config.section("api", ApiSettings)
    return Services(
        settings=settings,
        store_client=RedisClient.open(config.section("redis", RedisSettings)),
        models=models,
        aliases=aliases_of(config.table("aliases", AliasSettings), tenants, settings.default_model, models),
        keyring=keyring,
        metrics=telemetry.metrics,
        tracing=telemetry.trace(),
        version=__version__,
        subscriptions=EventSubscriptions(
            config.section("events", EventSettings), config.table("webhooks", WebhookSettings)
        ),
        files_settings=config.section("files", FilesSettings),
        batch_settings=config.section("batch", BatchSettings),
        quota_settings=config.section("quotas", QuotaSettings),
        weights=weights_of(tenants),
        limits=limits_of(tenants, models),
        content=input_rules(config.table("content", ContentSettings), content_of(tenants), telemetry.metrics),
        moderation=moderation,
        media_settings=config.section("media", MediaSettings),
        records=telemetry.keep_records(),
        name=name,
    )


def _listeners(settings: ApiSettings, fds: Sequence[int] | None) -> list[socket.socket]:
    """The sockets to serve on; their connections have small buffers. Raises StartError when the address is taken."""
    try:
        listeners = [socket.socket(fileno=fd) for fd in fds] if fds else listen(settings.host, settings.port)
        for each in listeners:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
    except OSError as error:
        raise StartError(f"cannot listen on {settings.host}:{settings.port}: {error}") from error
    return listeners


async def _serve(services: Services, listeners: list[socket.socket], launch: Launch, telemetry: Telemetry) -> int:
    """Serve until SIGTERM or SIGINT, then let open streams end within the drain time. Returns the exit code. Raises
    ConfigError if the certificate cannot be used, or the store must not be; StartError."""
    settings, me = services.settings, this_process("api", launch.options.id)
    try:
        certificate = Certificate.of(settings)
        await services.store.try_to_enter()
    except ConfigError:
        await services.store_client.close()
        raise
    telemetry.serve_metrics(_live_samples(services))
    host, port = listeners[0].getsockname()[:2]
    url = f"{services.settings.scheme}://{host}:{port}"
    app = build_app(services, lambda: launch.lifeline.say("ready", url))
    guard = _guard(services)
    protocol: Callable[..., asyncio.Protocol] = partial(Connection, guard=guard)
    services.spawn(supervise(guard.keep_sweeping, SWEEP_INTERVAL_S))
    sample_s = launch.config.section("records", RecordSettings).sample_s
    sampler = Sampler(services.records, "api", me.name, interval_s=sample_s)
    services.spawn(supervise(sampler.keep_sampling, SWEEP_INTERVAL_S))
    if certificate is not None:
        protocol = partial(Handshake, guard=guard, certificate=certificate)
        services.spawn(supervise(certificate.keep_fresh, SWEEP_INTERVAL_S))
    server = DrainingServer(
        uvicorn.Config(
            app,
            http=cast(type[asyncio.Protocol], protocol),
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            lifespan="on",
            ws="none",
            timeout_graceful_shutdown=max(1, int(settings.drain_s)),
        ),
        guard.handshakes,
    )

    def describe() -> Process:
        return msgspec.structs.replace(me, state="draining" if server.should_exit else "ready", url=url)

    # The server raises the signals it was stopped by once more when it is done; there is nothing left to do then.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    store_client = RedisClient.open(services.store_client.settings)
    try:
        async with present(Fleet(store_client), describe, services.store.entered):
            await server.serve(sockets=listeners)
    finally:
        await store_client.close()
    return 0


def _live_samples(services: Services) -> Callable[[], list[GaugeSample]]:
    """Reads gauges of lanes and batches from other threads."""
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

    return live


def _guard(services: Services) -> ConnectionGuard:
    """The connection guard, with at most as many connections as the operating system allows."""
    settings = services.settings
    connections = allowed_connections(settings.max_connections)
    if connections < settings.max_connections:
        needed = settings.max_connections + RESERVED_FILES
        log.info("open files allow %d connections; api.max_connections needs ulimit -n %d", connections, needed)
        settings = msgspec.structs.replace(settings, max_connections=connections)
    return ConnectionGuard(settings, services.metrics.count_error)


if __name__ == "__main__":
    sys.exit(main())
