"""From a request to an accepted job: who asks, may they, can the engine, is there room. Nothing is sent before."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.types import Receive, Scope

from api import errors
from api.keys import Caller
from api.schemas import Kind, Request, ignored_fields, parse, to_job
from api.services import Services
from streaming.capabilities import unsupported
from streaming.errors import KeyReused, LaneFull, NoCapacity, Unavailable, UnknownJob
from streaming.inbox import Inbox
from streaming.keys import partition_of
from streaming.messages import Job
from streaming.queue import Accepted

MAX_KEY = 255
WITHDRAW_EVERY_S = 1.0


@dataclass(slots=True)
class Admitted:
    """An accepted job and the inbox its replies come to (to be closed by whoever answers)."""

    job: Job
    partition: int
    accepted: Accepted
    inbox: Inbox
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
    """Who asks. Raises ApiError (401)."""
    return services_of(request).keyring.caller(request.headers.get("authorization"))


def header(scope: Scope, name: bytes, default: str = "") -> str:
    """A header of a request that came through api/middleware.py; its name in lower case. The framework's own way costs
    a request object and a search per header."""
    value: bytes | None = scope["state"]["headers"].get(name)
    return default if value is None else value.decode("latin-1")


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """The whole body, of JSON and of at most `limit` bytes. Raises ApiError (413, 415), ClientDisconnect."""
    kind = header(scope, b"content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise errors.unsupported_media_type()
    body, more = bytearray(), True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > limit:
            raise errors.payload_too_large(limit)
    return bytes(body)


async def admit(services: Services, scope: Scope, receive: Receive, kind: Kind, *, waits: bool) -> Admitted:
    """Accept the job a request asks for. `waits`: somebody holds a response open for it.

    Raises ApiError; after it nothing was accepted, except where it says so (503 store_unavailable).
    """
    caller = services.keyring.caller(header(scope, b"authorization"))
    body = await read_body(scope, receive, services.settings.body_limit)
    asked = parse(kind, body)
    services.model(asked.model)
    if services.refusal:
        raise errors.store_full(services.refusal)
    state = scope["state"]
    state["model"] = asked.model
    key = idempotency_key(scope)
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
        raise errors.from_failure(failure)
    inbox = services.relay.open(job.id, whole=not job.stream)
    try:
        accepted = await _put(services, job, key, body, must_run=bool(asked.queue.do_not_queue))
    except BaseException:
        services.relay.close(inbox)
        raise
    inbox.accepted = True
    if accepted.joined:
        inbox = await _join(services, inbox, accepted.id)
    eta_ms = None if accepted.joined else services.eta_ms(job.model, job.priority, accepted.waiting)
    return Admitted(job, partition, accepted, inbox, asked, _headers(asked, accepted, eta_ms), bool(key), eta_ms)


async def _put(services: Services, job: Job, key: str, body: bytes, *, must_run: bool) -> Accepted:
    digest = hashlib.sha256(body).hexdigest() if key else ""
    try:
        return await services.queue.put(job, idempotency_key=key, digest=digest, must_run=must_run)
    except LaneFull as error:
        raise errors.queue_full(error.waiting, services.pace.retry_s(job.model, error.waiting)) from None
    except NoCapacity:
        raise errors.no_capacity(services.pace.retry_s(job.model, 0)) from None
    except KeyReused:
        raise errors.idempotency_key_reused() from None
    except Unavailable:
        if not key:  # with a key the client's next try finds the job, without one nobody ever would
            services.later(_withdraw(services, job.id))
        raise


async def _withdraw(services: Services, job_id: str) -> None:
    """Cancel a job that was refused with 503 although its put may have arrived, once the store answers again."""
    while True:
        await asyncio.sleep(WITHDRAW_EVERY_S)
        try:
            await services.queue.cancel(job_id)
        except UnknownJob:
            return
        except Unavailable:
            continue
        return


async def _join(services: Services, inbox: Inbox, job_id: str) -> Inbox:
    """Listen to the job an idempotency key led to, from its first token."""
    services.relay.close(inbox)
    joined = services.relay.open(job_id)
    try:
        await services.relay.follow(joined)
    except Unavailable:
        services.relay.close(joined)
        raise
    return joined


def idempotency_key(scope: Scope) -> str:
    """Raises ApiError (400); "" if there is none."""
    key = header(scope, b"idempotency-key")
    if len(key) > MAX_KEY:
        raise errors.invalid_request(f"Idempotency-Key has {len(key)} characters, at most {MAX_KEY} are taken.")
    return key


def _headers(asked: Request, accepted: Accepted, eta_ms: int | None) -> dict[str, str]:
    headers = {"X-Job-Id": accepted.id, "X-Queue-Position": str(accepted.waiting)}
    if eta_ms is not None:
        headers["X-Queue-ETA-Ms"] = str(eta_ms)
    if ignored := ignored_fields(asked):
        headers["X-Ignored-Fields"] = ", ".join(ignored)
    return headers
