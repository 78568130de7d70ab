"""Admission control: validates a request, checks limits, and turns it into an accepted job in the queue.

No byte of the answer is sent before the job is accepted, so every refusal has its own HTTP status.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

import msgspec
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.types import Receive, Scope

from api.auth.keys import Caller
from api.openai import errors
from api.openai.errors import ApiError, Wait
from api.openai.json_body import Weighed, weighed
from api.openai.schemas import Kind, Request
from api.prepared import PreparedRequest
from api.services import Services
from api.waits import WaitLimit, exceeds
from penstock.loops import ExpectedErrors, retry
from penstock.text import without_mark
from streaming import errors as store
from streaming.ids import joined, partition_of
from streaming.jobs.job import CancelledBy, Job
from streaming.jobs.queue import Accepted
from streaming.jobs.relay import ReorderBuffer
from streaming.jobs.settings import QuotaSettings
from telemetry import tracing as names
from telemetry.tracing import Attributes, is_sampled


async def out_of_reach(services: Services, job: Job, limit: WaitLimit) -> ApiError | None:
    """Return the refusal of a job that exceeds a limit unless it starts at once; None if it may start in time.

    The lane's wait alone refuses nothing, because jobs may have left the lane since, and because a job with a tight
    limit goes before others: those that would start before it are counted now.
    """
    waits = services.waits
    if not waits.plans.can_judge(job.model):
        return None
    settled = waits.has_all_workers(job.model)
    if not exceeds(waits.wait(job), limit, settled=settled):
        return None
    try:
        waiting = await services.job_reader.expected_place(job, services.cards.get(job.model))
    except store.Unavailable:
        return None  # the put will find out
    wait = waits.wait(job, waiting)
    if wait is None or not exceeds(wait, limit, settled=settled):
        return None
    return errors.deadline_unreachable(limit.field, limit.ms, job.priority, wait)


log = logging.getLogger(__name__)

MAX_KEY_CHARS = 255
WITHDRAW_RETRY_DELAY_S = 1.0
WITHDRAW_PAUSES_S = (1.0, 4.0, 16.0, 64.0)
"""Pauses before each look for an unanswered put; the look before found none."""


@dataclass(slots=True)
class Admitted:
    """An accepted job, and the buffer that receives its tokens; the code that answers the request must close it."""

    job: Job
    """It has the id of the accepted one, if the idempotency key led to that."""
    partition: int
    accepted: Accepted
    buffer: ReorderBuffer
    request: Request
    headers: dict[str, str]
    keyed: bool = False
    """The request has an idempotency key."""
    wait: Wait | None = None
    """Expected time until a worker starts the job; None: unknown."""

    @property
    def created_ms(self) -> int:
        return self.accepted.created_ms or int(time.time() * 1000)


def services_of(request: HttpRequest) -> Services:
    """Return the process's services."""
    services: Services = request.app.state.services
    return services


def caller_of(request: HttpRequest) -> Caller:
    """Return the caller that api/auth/guard.py authenticated. Raises KeyError on a route open to anyone."""
    caller: Caller = request.scope["state"]["caller"]
    return caller


def header(scope: Scope, name: bytes, default: str = "") -> str:
    """Return a header of a request; `name` is lower case. api/middleware.py has indexed the headers, which is cheaper
    than the framework's request object."""
    value: bytes | None = scope["state"]["headers"].get(name)
    return default if value is None else value.decode("latin-1")


async def read_body(scope: Scope, receive: Receive, limit: int) -> Weighed:
    """Read a whole JSON body of at most `limit` bytes, and check that it parses fast enough.

    Raises:
        ApiError: 400, 413, 415.
        ClientDisconnect: the client left before the end of the body.
    """
    if (kind := header(scope, b"content-type")) != "application/json":
        kind = kind.partition(";")[0].strip().lower()
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
    return await weighed(without_mark(body))


async def admit(services: Services, scope: Scope, receive: Receive, kind: Kind, *, waits: bool) -> Admitted:
    """Validate a request and put its job in the queue.

    Args:
        waits: the response stays open until the job ends.

    Raises:
        ApiError: the request is refused. No job was accepted, except where the message says so (503 store_unavailable).
    """
    body = await read_body(scope, receive, services.settings.body_limit)
    prepared = services.prepared.read(services, scope["state"], kind, body, waits=waits)
    return await accept(services, scope, prepared, body, waits=waits)


async def accept(
    services: Services,
    scope: Scope,
    prepared: PreparedRequest,
    body: bytes,
    *,
    waits: bool,
    refusal: ApiError | None = None,
) -> Admitted:
    """Put the job of a valid request in the queue; `waits` and errors as in `admit`. `refusal`: why no new job is
    accepted; only the existing one of its idempotency key is returned then."""
    caller: Caller = scope["state"]["caller"]
    key = idempotency_key(scope)
    # A full store accepts no new job, but a repeated request with its key may still fetch its answer.
    if full := services.store.refusal if key else services.refusal:
        raise errors.store_full(full)
    state = scope["state"]
    form = prepared.job.response
    job_id = services.queue.new_id(caller.tenant, key, form.conversation if form is not None else "")
    partition = partition_of(job_id) or 0
    job = msgspec.structs.replace(
        prepared.job,
        id=job_id,
        prompt=prepared.prompt,
        trace=state["trace"],
        received_us=services.clock.at(state["received"], partition),
        clock_us=services.clock.error_us(partition),
    )
    put = partial(_put, services, prepared, job, partition, key, body, services.quotas(caller), refusal)
    began_ns = time.time_ns()
    accepted, buffer = await _accept(services, job, put, waits=waits)
    state["job"] = accepted.id
    if services.tracing.recording and is_sampled(job.trace) and not accepted.joined:
        about: Attributes = {names.JOB_ID: accepted.id, names.PRIORITY: str(job.priority)}
        services.tracing.span("enqueue", job.trace, "producer", began_ns, about).end()
    headers, wait = {"X-Job-Id": accepted.id, "X-Queue-Position": str(accepted.place.before)}, None
    if accepted.joined:
        job = msgspec.structs.replace(job, id=accepted.id)
    elif found := services.waits.show(job, accepted.place.in_lane):
        wait = found[1]
        headers["X-Queue-ETA-Ms"] = str(wait.eta_ms)
        # It is compared with the measured one.
        services.wait_sampler.note(job.id, *found, prepared.limit and prepared.limit.ms)
    if prepared.ignored:
        headers["X-Ignored-Fields"] = prepared.ignored
    return Admitted(job, partition, accepted, buffer, prepared.asked, headers, bool(key), wait)


async def _accept(
    services: Services, job: Job, put: Callable[[], Awaitable[Accepted]], *, waits: bool
) -> tuple[Accepted, ReorderBuffer]:
    """Put the job, or join the one that has its idempotency key; return it with the buffer for its tokens."""
    while True:
        buffer = services.relay.open(job.id, whole=not job.stream)
        try:
            accepted = await put()
        except BaseException:
            services.relay.close(buffer)
            raise
        buffer.accepted = True
        if not (accepted.joined and waits):
            return accepted, buffer
        services.relay.close(buffer)
        # If that job was abandoned by its client, or has expired meanwhile, the key is free: put again.
        with contextlib.suppress(store.Abandoned, store.UnknownJob):
            return accepted, await _join(services, accepted.id, whole=not job.stream)


async def _put(
    services: Services,
    prepared: PreparedRequest,
    job: Job,
    partition: int,
    key: str,
    body: bytes,
    quota: QuotaSettings,
    refused: ApiError | None,
) -> Accepted:
    asked = prepared.asked
    digest = ""
    if key:  # a body may be a valid request of two endpoints, whose jobs have other answers
        kind = job.endpoint.encode() if job.task is not None else b""
        digest = hashlib.sha256(kind + body).hexdigest()
    reason = services.headroom.reason
    refusal = refused or (store.StoreFull(reason) if reason else None)
    late: ApiError | None = None
    try:
        if refusal is None and prepared.limit is not None:
            late = await out_of_reach(services, job, prepared.limit)
        return await services.queue.put(
            job,
            idempotency_key=key,
            digest=digest,
            must_run=bool(asked.queue.do_not_queue) or late is not None,
            cost=prepared.cost,
            partition=partition,
            refusal=refusal,
            quota=quota,
            version=asked.version_read,
        )
    except store.NeverFits as error:
        raise errors.too_large_for_store(job, error.needed, error.most) from None
    except store.LaneFull as error:
        retry_s = services.waits.retry_s(job, error.waiting)
        raise errors.queue_full(error.waiting, error.own, retry_s, _eta_ms(services, job)) from None
    except store.NoCapacity:
        if late is not None:
            raise late from None
        retry_s = services.waits.retry_s(job)
        raise errors.no_capacity(retry_s, _eta_ms(services, job)) from None
    except store.Unavailable:
        if key:  # the put may have succeeded: the client's retry finds the job
            raise errors.acceptance_unknown() from None
        # Without a key no client could find it.
        services.spawn(withdraw(partial(services.queue.cancel, job.id, CancelledBy.NOT_ACCEPTED)))
        raise errors.not_accepted() from None
    except asyncio.CancelledError:  # drain_s is over
        raise errors.put_cut_off() from None


def _eta_ms(services: Services, job: Job) -> int | None:
    """Return when a job put now would start."""
    wait = services.waits.wait(job)
    return None if wait is None else wait.eta_ms


async def withdraw(cancel: Callable[[], Awaitable[object]]) -> None:
    """Cancel a job, batch or file whose put was not answered, and that its client was told is not accepted.

    Retries `cancel` until the store answers. If there is nothing to cancel, the put may still be on its way, for as
    long as TCP sends it again: looks for it again, at growing intervals.
    """
    expected = ExpectedErrors(store.Unavailable, log.debug, "a refused put is withdrawn later: %s")
    for pause_s in WITHDRAW_PAUSES_S:
        await asyncio.sleep(pause_s)
        with contextlib.suppress(store.UnknownJob, store.UnknownBatch, store.UnknownFile):
            await retry(cancel, expected, itertools.repeat(WITHDRAW_RETRY_DELAY_S))
            return


async def _join(services: Services, job_id: str, *, whole: bool) -> ReorderBuffer:
    """Open a buffer for an existing job (found by idempotency key), from its first token.

    Raises:
        ApiError: the job cannot be read now.
        UnknownJob, Abandoned: the job is gone, and its key is free again.
    """
    buffer = services.relay.open(job_id, whole=whole)
    buffer.accepted = True
    try:
        await services.relay.follow(buffer, joining=True)
    except store.Unavailable:
        services.relay.close(buffer)
        raise errors.job_unreadable(job_id) from None
    except BaseException:
        services.relay.close(buffer)
        raise
    return buffer


def idempotency_key(scope: Scope) -> str:
    """Return the Idempotency-Key header, prefixed so that it cannot equal the key of a broker message; "" without one.

    Raises ApiError (400).
    """
    key = header(scope, b"idempotency-key")
    if len(key) > MAX_KEY_CHARS:
        raise errors.invalid_request(f"Idempotency-Key has {len(key)} characters, at most {MAX_KEY_CHARS} are taken.")
    return joined("header", key) if key else ""
