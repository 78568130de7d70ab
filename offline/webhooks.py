"""Webhooks: delivers the events of jobs and batches to receivers, with retries, to allowed addresses only."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hmac
import logging
import random
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
from httpcore2 import default_ssl_context

from api.openai.rendering import job_object, to_json
from api.openai.responses.items import job_of, response_id
from api.openai.responses.object import outcome
from offline.tools import OfflineTools
from penstock.config import ConfigError
from penstock.guard import ERRORS, Forbidden, guarded_pool
from penstock.loops import ExpectedErrors, run_periodically, spawn
from streaming.batches.store import Batches
from streaming.errors import Unavailable, UnknownBatch, UnknownJob
from streaming.events import (
    DeliveryAttempt,
    Event,
    Outbox,
    State,
    Webhooks,
    WebhookSettings,
    allows_url,
    endpoints_for,
    signing_key,
)
from streaming.jobs.reader import JobReader
from streaming.jobs.records import JobRecord
from telemetry import tracing as names
from telemetry.otlp import Attributes
from telemetry.tracing import TRACEPARENT, Span

FIRST_S, FACTOR, MAX_WAIT_S = 5.0, 6.0, 6 * 3600.0
JITTER = 0.2
"""Fraction by which a wait varies, so that deliveries that failed together are not retried together."""

GONE = 410


def after_failure(tries: int, age_s: float, status: int, give_up_s: float, chance: float) -> tuple[float | None, str]:
    """Seconds until a delivery is retried, and why: 5 s, 30 s, 3 min, 18 min, 1.8 h, then every 6 h, up to `give_up_s`;
    None: it is given up.

    Args:
        tries: failed attempts so far.
        age_s: time since the first attempt.
        status: HTTP status of the last answer, 0 if there was none.
        give_up_s: no attempt is made later than this after the first one.
        chance: a random number from 0 to 1, for the jitter.
    """
    if status == GONE:
        return None, "the endpoint answered 410 Gone"
    wait_s = min(FIRST_S * FACTOR ** min(tries - 1, 10), MAX_WAIT_S) * (1 + JITTER * (2 * chance - 1))
    if age_s + wait_s > give_up_s:
        return None, f"{tries} attempts in {age_s:.0f} s, and the next would be after {give_up_s:.0f} s"
    return wait_s, f"attempt {tries} failed, the next is in {wait_s:.0f} s"


PREFIX = "response."
BY_STATE = {"expired": "failed"}
"""The status of a response whose record is gone, for states of jobs that responses do not have."""
SHOWN = (
    *("id", "status", "endpoint", "model", "priority", "created_at", "completed_at", "attempts", "usage", "error"),
    *("cancelled_by", "metadata"),
)
"""Fields of the job object that messages have."""


async def with_data(events: Sequence[Event], reader: JobReader, batches: Batches) -> list[tuple[Event, str]]:
    """Return the events with the data of their messages. That of a record that is gone has only id and status.

    A response's event gets its id and its final status: the job's state alone does not say whether a token limit ended
    the text. Raises Unavailable.
    """
    jobs = list({event.subject for event in events if event.subject.startswith("job_")})
    records = dict(zip(jobs, await reader.records(jobs, resultless=jobs), strict=True))
    told = []
    for event in events:
        record, is_batch = records.get(event.subject), event.subject.startswith("batch_")
        own = record if record is not None and record.job.tenant == event.tenant else None
        event, data = (event, await _of_batch(event, batches)) if is_batch else _of_job(event, own)  # noqa: PLW2901
        told.append((event, to_json(data).decode()))
    return told


def _of_job(event: Event, record: JobRecord | None) -> tuple[Event, dict[str, Any]]:
    state = event.type.rpartition(".")[2]
    data: dict[str, Any] = {}
    if record is not None and record.terminal is not None:
        shown = job_object(record)
        data = {name: shown[name] for name in SHOWN}
        if data["error"]:
            del data["error"]["message"]  # a server may quote the prompt in it
        data["result_url"] = f"/v1/jobs/{event.subject}/result" if record.completed else None
    if event.type.startswith(PREFIX):
        status: str = BY_STATE.get(state, state)
        if record is not None and record.terminal is not None:
            status = outcome(record.terminal).status
        name = response_id(event.subject)
        if data.get("result_url"):
            data["result_url"] = f"/v1/responses/{name}"
        event, state = replace(event, type=PREFIX + status, subject=name), status
    return event, data | {"id": event.subject, "status": state}


async def _of_batch(event: Event, batches: Batches) -> dict[str, Any]:
    data: dict[str, Any] = {"id": event.subject, "status": event.type.rpartition(".")[2]}
    try:
        record = await batches.get(event.subject, event.tenant)
    except UnknownBatch:
        return data
    progress = record.progress
    return data | {
        "metadata": dict(record.batch.metadata),
        "request_counts": {"total": progress.total, "completed": progress.completed, "failed": progress.failed},
        "output_file_id": progress.output_file or None,
        "error_file_id": progress.error_file or None,
    }


log = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.25
MAX_EVENTS = 100
MAX_IN_FLIGHT = 8
"""Concurrent attempts at one endpoint, in one process."""
MAX_ANSWER_BYTES = 64 * 1024
"""Bytes read of an endpoint's answer."""
ENDS: Mapping[str, tuple[State, int, str]] = {
    "delivered": ("delivered", logging.INFO, "webhook delivered"),
    "retried": ("pending", logging.WARNING, "webhook not delivered: %s; %s"),
    "failed": ("failed", logging.ERROR, "webhook given up: %s; %s"),
}
"""By what came of an attempt: the state of its message, the level and the words of the log line."""


def body_of(attempt: DeliveryAttempt) -> bytes:
    """Return the body, the same for every attempt: OpenAI's event object, without the result."""
    created = attempt.at_ms // 1000
    event = {"id": attempt.event, "object": "event", "created_at": created, "type": attempt.type}
    data = msgspec.Raw(attempt.data.encode()) if attempt.data else {"id": attempt.subject}
    return msgspec.json.encode(event | {"data": data})


def _no_store() -> ExpectedErrors:
    return ExpectedErrors(Unavailable, log.debug, "no webhooks until the store answers: %s")


class WebhookEndpoint:
    """One configured receiver of webhooks. Raises ConfigError when its `ca_file` cannot be used."""

    def __init__(self, name: str, settings: WebhookSettings) -> None:
        self.name, self.settings = name, settings
        self._pool = guarded_pool(settings.networks, _tls_context(name, settings))

    @property
    def lease_ms(self) -> int:
        """Lease of one attempt: covers the request and saving its outcome."""
        return int(2000 * self.settings.timeout_s)

    async def send(self, attempt: DeliveryAttempt, trace: str = "") -> tuple[int, str]:
        """Make one attempt. Returns the answer's status (0: none) and the problem ("": delivered). No redirects.
        `trace`: the `traceparent` that it carries; "": none."""
        url = attempt.url or self.settings.url
        if attempt.url and not allows_url(self.settings, url):
            return 0, "`urls` of its endpoint no longer allow the URL that the request names"
        body = body_of(attempt)
        headers = signed_headers(self.settings.secret, attempt.id, attempt.now_ms // 1000, body)
        headers |= {"content-type": "application/json", "user-agent": "penstock"}
        headers |= {TRACEPARENT: trace} if trace else {}
        posting, size = self._pool.stream("POST", url, headers=list(headers.items()), content=body), 0
        try:
            async with asyncio.timeout(self.settings.timeout_s), posting as response:
                async for chunk in response.aiter_stream():
                    size += len(chunk)
                    if size > MAX_ANSWER_BYTES:
                        break
        except Forbidden as error:
            return 0, str(error)
        except ERRORS as error:
            return 0, f"{type(error).__name__}: {error}".rstrip(": ")
        status = int(response.status)
        return status, "" if 200 <= status < 300 else f"the endpoint answered {status}"

    async def close(self) -> None:
        await self._pool.aclose()


def _tls_context(name: str, settings: WebhookSettings) -> ssl.SSLContext:
    """Trust the CAs of `ca_file` alone, or those of the system. Loading them takes longer than an attempt, so it is
    done once for each endpoint. Raises ConfigError."""
    if settings.ca_file is None:
        return default_ssl_context()
    try:
        return ssl.create_default_context(cafile=settings.ca_file)
    except OSError as error:  # includes ssl.SSLError, raised for a file that is not PEM
        raise ConfigError(f"webhooks.{name}.ca_file", f"{settings.ca_file} cannot be used: {error}") from None


class WebhookDispatcher:
    """Delivers webhooks; one per process, and any number of processes share the work.

    It polls Redis, where due messages and their leases are, and needs no Celery task. Each endpoint has its own limit
    of concurrent attempts, so a slow endpoint delays no other.
    """

    def __init__(self, tools: OfflineTools, name: str, endpoints: Sequence[WebhookEndpoint]) -> None:
        self._outbox, self._webhooks = Outbox(tools.store_client, "webhooks"), Webhooks(tools.store_client)
        self._job_reader, self._batches = JobReader(tools.store_client), Batches(tools.store_client)
        self._name, self._endpoints, self._metrics, self._tracing = name, endpoints, tools.metrics, tools.tracing
        self._rows = {endpoint.name: endpoint.settings for endpoint in endpoints}

    async def keep_going(self) -> None:
        """Run until cancelled, whatever the store and the endpoints do."""
        async with asyncio.TaskGroup() as group:
            group.create_task(run_periodically(self._fan_out, POLL_INTERVAL_S, _no_store()))
            for endpoint in self._endpoints:
                group.create_task(self._keep_delivering(endpoint))

    async def _fan_out(self) -> None:
        """Raises Unavailable."""
        events = await self._outbox.collect(self._name, MAX_EVENTS)
        for event, data in await with_data(events, self._job_reader, self._batches):
            await self._webhooks.dispatch(event, endpoints_for(event, self._rows), data)

    async def _keep_delivering(self, endpoint: WebhookEndpoint) -> None:
        under_way: set[asyncio.Task[None]] = set()
        try:
            await run_periodically(partial(self._start_attempts, endpoint, under_way), POLL_INTERVAL_S, _no_store())
        finally:
            for task in under_way:
                task.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)
            await endpoint.close()

    async def _start_attempts(self, endpoint: WebhookEndpoint, under_way: set[asyncio.Task[None]]) -> None:
        """Start an attempt for each due message, up to MAX_IN_FLIGHT (a partition may return a few more)."""
        room = MAX_IN_FLIGHT - len(under_way)
        for attempt in await self._webhooks.outgoing(endpoint.name, room, endpoint.lease_ms) if room > 0 else []:
            spawn(self._attempt_safely(endpoint, attempt), under_way)

    async def _attempt_safely(self, endpoint: WebhookEndpoint, attempt: DeliveryAttempt) -> None:
        try:
            await self._attempt(endpoint, attempt)
        except Unavailable as error:
            log.warning("the outcome of a webhook could not be saved, it is sent again: %s", error)
        except Exception:
            # A bug in one attempt must not stop the other messages; this one is retried when its lease expires.
            log.exception("an attempt failed", extra={"endpoint": endpoint.name, "message_id": attempt.id})

    async def _attempt(self, endpoint: WebhookEndpoint, attempt: DeliveryAttempt) -> None:
        """Send the message once and save the outcome. Raises Unavailable."""
        span = await self._begin_span(endpoint, attempt)
        try:
            status, problem = await endpoint.send(attempt, span.carrier()[TRACEPARENT] if span.recorded else "")
        except Exception as error:  # a defect: a failed attempt like others, so that retries slow down and end
            log.exception("a webhook could not be sent", extra={"endpoint": endpoint.name, "message_id": attempt.id})
            status, problem = 0, f"{type(error).__name__}: {error}"
        span.end(error=problem or None, attributes={names.STATUS_CODE: status} if status else None)
        end, reason, wait_s = "delivered", "", None
        if problem:
            chance = random.random()  # noqa: S311 - spreads load, not a secret
            give_up_s = endpoint.settings.give_up_s
            wait_s, reason = after_failure(attempt.tries, attempt.age_ms / 1000, status, give_up_s, chance)
            end = "failed" if wait_s is None else "retried"
        state, level, words = ENDS[end]
        said = f"{problem}; given up: {reason}" if end == "failed" else problem
        await self._webhooks.settle(attempt, state, status, said, int(1000 * (wait_s or 0)))
        self._metrics.webhooks.labels(end).inc()
        about = {"endpoint": endpoint.name, "message_id": attempt.id, "type": attempt.type}
        log.log(level, words, *((problem, reason) if problem else ()), extra=about)

    async def _begin_span(self, endpoint: WebhookEndpoint, attempt: DeliveryAttempt) -> Span:
        """Begin the span of an attempt, in the trace of the job, response or batch that it tells of, if that is still
        kept. Raises Unavailable."""
        parent: Mapping[str, str] = {}
        tenant, subject = endpoint.settings.tenant, attempt.subject
        with contextlib.suppress(UnknownJob, UnknownBatch):
            if self._tracing.recording and subject.startswith("batch_"):
                parent = (await self._batches.get(subject, tenant)).batch.trace
            elif self._tracing.recording:
                parent = (await self._job_reader.outline(job_of(subject) or subject, tenant)).job.trace
        about: Attributes = {names.METHOD: "POST", names.ENDPOINT: endpoint.name, names.EVENT_TYPE: attempt.type}
        about = {**about, names.TRY: attempt.tries}
        return self._tracing.span(f"webhook {attempt.type}", parent, "client", attributes=about)


def signed_headers(secret: str, message: str, timestamp: int, body: bytes) -> dict[str, str]:
    """Return the three headers of one attempt; `timestamp` is in Unix seconds. Raises ValueError for a bad secret."""
    signed = b"%b.%d.%b" % (message.encode(), timestamp, body)
    digest = base64.b64encode(hmac.digest(signing_key(secret), signed, "sha256")).decode()
    return {"webhook-id": message, "webhook-timestamp": str(timestamp), "webhook-signature": f"v1,{digest}"}
