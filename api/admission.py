"""From a request to an accepted job: what is asked, can the engine, is there room. Nothing is sent before."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.types import Receive, Scope

from api.auth.keys import Caller
from api.openai import errors, job_errors
from api.openai.json_weight import Weighed, weighed
from api.openai.schemas import Kind, Request, check_choices, ignored_fields, parse, to_job
from api.services import Services
from runtime.loops import ExpectedErrors, retry
from streaming.errors import (
    Abandoned,
    KeyReused,
    LaneFull,
    NeverFits,
    NoCapacity,
    QuotaExceeded,
    StoreFull,
    Unavailable,
    UnknownBatch,
    UnknownJob,
)
from streaming.ids import joined, partition_of
from streaming.jobs.capabilities import unsupported
from streaming.jobs.cards import ModelCard
from streaming.jobs.job import Job
from streaming.jobs.queue import Accepted
from streaming.jobs.reorder_buffer import ReorderBuffer
from streaming.settings import QuotaSettings

MAX_KEY = 255
WITHDRAW_RETRY_DELAY_S = 1.0


@dataclass(slots=True)
class Admitted:
    """An accepted job and the inbox its replies come to (to be closed by whoever answers)."""

    job: Job
    partition: int
    accepted: Accepted
    inbox: ReorderBuffer
    request: Request
    headers: dict[str, str]
    keyed: bool = False
    """It came with an idempotency key."""
    eta_ms: int | None = None
    """When it is expected to be begun; None: nobody can say."""


def services_of(request: HttpRequest) -> Services:
    """The process's services."""
    services: Services = request.app.state.services
    return services


def caller_of(request: HttpRequest) -> Caller:
    """Who asks, as the guard found (api/auth/guard.py). KeyError where it lets anyone in: that is a mistake of ours."""
    caller: Caller = request.scope["state"]["caller"]
    return caller


def header(scope: Scope, name: bytes, default: str = "") -> str:
    """A header of a request that came through api/middleware.py; its name in lower case. The framework's own way costs
    a request object and a search per header."""
    value: bytes | None = scope["state"]["headers"].get(name)
    return default if value is None else value.decode("latin-1")


async def read_body(scope: Scope, receive: Receive, limit: int) -> Weighed:
    """The whole body, of JSON, of at most `limit` bytes and quickly parsed. Raises ApiError (400, 413, 415),
    ClientDisconnect."""
    kind = header(scope, b"content-type").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise errors.unsupported_media_type()
    length = header(scope, b"content-length")
    if length.isdecimal() and int(length) > limit:
        raise errors.payload_too_large(limit)
    body, more = bytearray(), True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > limit:
            raise errors.payload_too_large(limit)
    return await weighed(body)


async def admit(services: Services, scope: Scope, receive: Receive, kind: Kind, *, waits: bool) -> Admitted:
    """Accept the job a request asks for. `waits`: somebody holds a response open for it.

    Raises ApiError; after it nothing was accepted, except where its message says so (503 store_unavailable).
    """
    caller: Caller = scope["state"]["caller"]
    body = await read_body(scope, receive, services.settings.body_limit)
    asked = parse(kind, body)
    check_choices(asked, services.settings.max_choices_per_request)
    services.model(asked.model)
    key = idempotency_key(scope)
    # A full store takes nothing new, but a request that comes again for its answer brings nothing.
    if refusal := services.durability_error if key else services.refusal:
        raise errors.store_full(refusal)
    state = scope["state"]
    state["model"] = asked.model
    job_id = services.queue.new_id(caller.tenant, key)
    partition = partition_of(job_id) or 0
    job = to_job(
        asked,
        job_id=job_id,
        tenant=caller.tenant,
        ceiling=caller.ceiling,
        reply_to=services.relay.address if waits else "",
        trace=state["trace"],
        received_us=services.clock.at(state["received"], partition),
        clock_us=services.clock.error_us(partition),
        events="" if waits else services.wanted.of_jobs(caller.tenant),
    )
    card = services.cards.get(job.model)
    if card is not None and (failure := unsupported(job, card.capabilities)):
        raise job_errors.from_failure(failure)
    must_run = bool(asked.queue.do_not_queue)
    quota = services.quotas(caller)
    accepted, inbox = await _accept(services, job, key, body, quota, must_run=must_run, waits=waits, card=card)
    eta_ms = None if accepted.joined else services.eta_ms(job.model, job.priority, accepted.waiting)
    return Admitted(job, partition, accepted, inbox, asked, _headers(asked, accepted, eta_ms), bool(key), eta_ms)


async def _accept(
    services: Services,
    job: Job,
    key: str,
    body: bytes,
    quota: QuotaSettings,
    *,
    must_run: bool,
    waits: bool,
    card: ModelCard | None,
) -> tuple[Accepted, ReorderBuffer]:
    """The accepted job, or the one its idempotency key led to, and the inbox of its replies."""
    while True:
        inbox = services.relay.open(job.id, whole=not job.stream)
        try:
            accepted = await _put(services, job, key, body, quota, must_run=must_run, card=card)
        except BaseException:
            services.relay.close(inbox)
            raise
        inbox.accepted = True
        if not (accepted.joined and waits):
            return accepted, inbox
        services.relay.close(inbox)
        # Where the job found has ended since for want of a client, or is forgotten, its key is free: put again.
        with contextlib.suppress(Abandoned, UnknownJob):
            return accepted, await _join(services, accepted.id, whole=not job.stream)


async def _put(
    services: Services,
    job: Job,
    key: str,
    body: bytes,
    quota: QuotaSettings,
    *,
    must_run: bool,
    card: ModelCard | None,
) -> Accepted:
    digest = hashlib.sha256(body).hexdigest() if key else ""
    try:
        return await services.queue.put(
            job,
            idempotency_key=key,
            digest=digest,
            must_run=must_run,
            card=card,
            refusal=services.headroom.reason,
            quota=quota,
        )
    except QuotaExceeded as error:
        raise errors.quota_exceeded(error) from None
    except NeverFits as error:
        raise errors.too_large_for_store(job, error.needed, error.most) from None
    except StoreFull as error:
        raise errors.store_full(str(error)) from None
    except LaneFull as error:
        raise errors.queue_full(error.waiting, services.pace.retry_s(job.model, error.waiting)) from None
    except NoCapacity:
        raise errors.no_capacity(services.pace.retry_s(job.model, 0)) from None
    except KeyReused:
        raise errors.idempotency_key_reused() from None
    except Unavailable:
        if key:  # the put may have arrived: the client's next try finds the job
            raise errors.acceptance_unknown() from None
        services.spawn(withdraw(partial(services.queue.cancel, job.id)))  # nobody would ever find it
        raise


async def withdraw(cancel: Callable[[], Awaitable[object]]) -> None:
    """Take back a job, batch or file that was refused with 503 although its put may have arrived, once the store
    answers."""
    delays_s = itertools.repeat(WITHDRAW_RETRY_DELAY_S)
    await asyncio.sleep(WITHDRAW_RETRY_DELAY_S)
    with contextlib.suppress(UnknownJob, UnknownBatch):
        await retry(cancel, ExpectedErrors(Unavailable), delays_s)


async def _join(services: Services, job_id: str, *, whole: bool) -> ReorderBuffer:
    """Listen to the job an idempotency key led to, from its first token.

    Raises ApiError, UnknownJob; Abandoned.
    """
    inbox = services.relay.open(job_id, whole=whole)
    inbox.accepted = True
    try:
        await services.relay.follow(inbox, joining=True)
    except Unavailable:
        services.relay.close(inbox)
        raise job_errors.job_unreadable(job_id) from None
    except BaseException:
        services.relay.close(inbox)
        raise
    return inbox


def idempotency_key(scope: Scope) -> str:
    """The header's value, told apart from keys of other origin (broker messages); "" if there is none.

    Raises ApiError (400).
    """
    key = header(scope, b"idempotency-key")
    if len(key) > MAX_KEY:
        raise errors.invalid_request(f"Idempotency-Key has {len(key)} characters, at most {MAX_KEY} are taken.")
    return joined("header", key) if key else ""


def _headers(asked: Request, accepted: Accepted, eta_ms: int | None) -> dict[str, str]:
    headers = {"X-Job-Id": accepted.id, "X-Queue-Position": str(accepted.waiting)}
    if eta_ms is not None:
        headers["X-Queue-ETA-Ms"] = str(eta_ms)
    if ignored := ignored_fields(asked):
        headers["X-Ignored-Fields"] = ", ".join(ignored)
    return headers
