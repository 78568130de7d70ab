"""Webhooks on their way: events out of the outbox become messages, and messages go to their endpoints until they have
arrived or are given up.

This is a loop of its own and no Celery task: what is due stands in our keys, with a lease, so a reminder from a broker
could only be late. Each endpoint has its own few hands; one that hangs keeps nobody else waiting.
"""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
from collections.abc import Sequence
from functools import partial

import msgspec
from httpcore2 import (
    AsyncConnectionPool,
    NetworkError,
    ProtocolError,
    TimeoutException,
    UnsupportedProtocol,
    default_ssl_context,
)

from offline.webhooks.backoff import after_failure
from offline.webhooks.guard import Forbidden, GuardedBackend, networks_of
from offline.webhooks.signature import signed_headers
from runtime.config import ConfigError
from runtime.loops import ExpectedErrors, run_periodically
from streaming.errors import Unavailable
from streaming.events.outbox import Outbox, endpoints_for
from streaming.events.webhooks import DeliveryAttempt, Webhooks
from streaming.redis.client import RedisClient
from streaming.settings import WebhookSettings
from telemetry.metrics import Metrics

log = logging.getLogger(__name__)

LOOK_INTERVAL_S = 0.25
NO_STORE = ExpectedErrors(Unavailable, log.debug, "no webhooks until the store answers: %s")
MAX_EVENTS = 100
MAX_IN_FLIGHT = 8
"""Attempts under way at one endpoint."""
MAX_BYTES = 64 * 1024
"""Of an answer; the rest is not read."""

FAULTS = (NetworkError, ProtocolError, TimeoutException, UnsupportedProtocol, TimeoutError, OSError)


def body_of(errand: DeliveryAttempt) -> bytes:
    """What is sent, the same for every attempt: OpenAI's event object. It names what ended and holds none of it."""
    created = errand.at_ms // 1000
    event = {"id": errand.event, "object": "event", "created_at": created, "type": errand.type}
    return msgspec.json.encode(event | {"data": {"id": errand.subject}})


class Endpoint:
    """One receiver. Raises ConfigError when its `ca_file` cannot be used."""

    def __init__(self, name: str, settings: WebhookSettings) -> None:
        self.name, self.settings = name, settings
        # A connection for each attempt: a name that has moved since is looked up, and checked, anew.
        self._pool = AsyncConnectionPool(
            ssl_context=_trusted(name, settings),
            max_keepalive_connections=0,
            network_backend=GuardedBackend(networks_of(settings.networks)),
        )

    @property
    def lease_ms(self) -> int:
        """For one attempt and saying what came of it."""
        return int(2000 * self.settings.timeout_s)

    async def send(self, errand: DeliveryAttempt) -> tuple[int, str]:
        """The answer's status, or 0, and what went wrong, or ""; redirects are answers like any other."""
        body = body_of(errand)
        headers = signed_headers(self.settings.secret, errand.id, errand.now_ms // 1000, body)
        headers |= {"content-type": "application/json", "user-agent": "penstock"}
        try:
            async with asyncio.timeout(self.settings.timeout_s):
                status = await self._post(list(headers.items()), body)
        except Forbidden as error:
            return 0, str(error)
        except FAULTS as error:
            return 0, f"{type(error).__name__}: {error}".rstrip(": ")
        return status, "" if 200 <= status < 300 else f"the endpoint answered {status}"

    async def _post(self, headers: list[tuple[str, str]], body: bytes) -> int:
        async with self._pool.stream("POST", self.settings.url, headers=headers, content=body) as response:
            size = 0
            async for chunk in response.aiter_stream():
                size += len(chunk)
                if size > MAX_BYTES:
                    break
            return int(response.status)

    async def close(self) -> None:
        await self._pool.aclose()


def _trusted(name: str, settings: WebhookSettings) -> ssl.SSLContext:
    """Whose certificates are believed: those of `ca_file` alone, else those this machine believes. Read once, for
    reading them takes longer than an attempt does. Raises ConfigError."""
    if settings.ca_file is None:
        return default_ssl_context()
    try:
        return ssl.create_default_context(cafile=settings.ca_file)
    except OSError as error:  # ssl.SSLError, for what is no PEM, is one too
        raise ConfigError(f"webhooks.{name}.ca_file", f"{settings.ca_file} cannot be used: {error}") from None


class Postman:
    """One per process; any number of processes share the work."""

    def __init__(self, wire: RedisClient, name: str, endpoints: Sequence[Endpoint], metrics: Metrics) -> None:
        self._outbox, self._webhooks = Outbox(wire, "webhooks"), Webhooks(wire)
        self._name, self._endpoints, self._metrics = name, endpoints, metrics
        self._rows = {endpoint.name: endpoint.settings for endpoint in endpoints}

    async def keep_going(self) -> None:
        """For ever, whatever the store and the endpoints do."""
        async with asyncio.TaskGroup() as group:
            group.create_task(run_periodically(self._fan_out, LOOK_INTERVAL_S, NO_STORE))
            for endpoint in self._endpoints:
                group.create_task(self._keep_delivering(endpoint))

    async def _fan_out(self) -> None:
        """Raises Unavailable."""
        for event in await self._outbox.collect(self._name, MAX_EVENTS):
            await self._webhooks.dispatch(event, endpoints_for(event, self._rows))

    async def _keep_delivering(self, endpoint: Endpoint) -> None:
        under_way: set[asyncio.Task[None]] = set()
        try:
            await run_periodically(partial(self._begin, endpoint, under_way), LOOK_INTERVAL_S, NO_STORE)
        finally:
            for task in under_way:
                task.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)
            await endpoint.close()

    async def _begin(self, endpoint: Endpoint, under_way: set[asyncio.Task[None]]) -> None:
        """An attempt for each message that is due, as far as there are hands (a partition may bring a few more)."""
        room = MAX_IN_FLIGHT - len(under_way)
        for errand in await self._webhooks.outgoing(endpoint.name, room, endpoint.lease_ms) if room > 0 else []:
            task = asyncio.create_task(self._run(endpoint, errand))
            under_way.add(task)
            task.add_done_callback(under_way.discard)

    async def _run(self, endpoint: Endpoint, errand: DeliveryAttempt) -> None:
        try:
            await self._attempt(endpoint, errand)
        except Unavailable as error:
            log.warning("what came of a webhook could not be said, it is tried again: %s", error)
        except Exception:
            # The boundary of one attempt: a fault of ours must not stop the other messages. Its lease runs out.
            log.exception("a webhook could not be sent", extra={"endpoint": endpoint.name, "message_id": errand.id})

    async def _attempt(self, endpoint: Endpoint, errand: DeliveryAttempt) -> None:
        """Send it once and say what came of it. Raises Unavailable."""
        status, problem = await endpoint.send(errand)
        about = {"endpoint": endpoint.name, "message_id": errand.id, "type": errand.type}
        if not problem:
            await self._webhooks.settle(errand, "delivered", status, "")
            self._metrics.webhooks.labels("delivered").inc()
            log.info("webhook delivered", extra=about)
            return
        give_up_s = endpoint.settings.give_up_s
        chance = random.random()  # noqa: S311 - spreads load, hides nothing
        decision = after_failure(errand.tries, errand.age_ms / 1000, status, give_up_s, chance)
        if decision.wait_s is None:
            await self._webhooks.settle(errand, "failed", status, f"{problem}; given up: {decision.reason}")
            self._metrics.webhooks.labels("failed").inc()
            log.error("webhook given up: %s; %s", problem, decision.reason, extra=about)
            return
        await self._webhooks.settle(errand, "pending", status, problem, int(1000 * decision.wait_s))
        self._metrics.webhooks.labels("retried").inc()
        log.warning("webhook not delivered: %s; %s", problem, decision.reason, extra=about)
