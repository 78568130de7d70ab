"""Admission control: validates a request, checks limits, and turns it into an accepted job in the queue.

No byte of the answer is sent before the job is accepted, so every refusal has its own HTTP status.

Most chats of a client differ only in their messages. So everything that follows from the other fields, from the caller
and from the model's card is prepared once for all requests whose other fields have the same bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec.structs import replace
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.types import Receive, Scope

from api.auth.answers import is_key_ended
from api.auth.keys import Caller
from api.openai import errors
from api.openai.errors import ApiError, Wait
from api.openai.fields import MAX_MESSAGES, Counted
from api.openai.json_body import Weighed, is_heavy, weighed
from api.openai.schemas import ChatRequest, Kind, Request, check_choices, ignored_fields, parse, recipients, to_job
from api.waits import WaitLimit, exceeds, limit_of
from penstock.engine import ChatTurn, ModelCard
from penstock.loops import ExpectedErrors, retry
from penstock.text import without_mark
from streaming import errors as store
from streaming.fleet.aliases import Target
from streaming.fleet.settings import served_names
from streaming.ids import joined, partition_of
from streaming.jobs.job import CancelledBy, Chat, Job, Prompt, has_media, unsupported
from streaming.jobs.queue import Accepted
from streaming.jobs.relay import ReorderBuffer
from streaming.jobs.waiting import Cost, cost_of, prompt_tokens
from streaming.order import Priority
from telemetry import tracing as names
from telemetry.otlp import Attributes
from telemetry.tracing import is_sampled

if TYPE_CHECKING:
    from api.services import Services

log = logging.getLogger(__name__)

MAX_KEY_CHARS = 255
LARGE_BYTES, MAX_LARGE_BYTES = 2 << 20, 128 << 20
"""A body with more is large; and how much all of them may have at once in one process, unless there is one alone."""
WITHDRAW_RETRY_DELAY_S = 1.0
WITHDRAW_PAUSES_S = (1.0, 4.0, 16.0, 64.0)
"""Pauses before each look for an unanswered put; the look before found none."""


# --- what every endpoint reads ---------------------------------------------------------------------------------------


def services_of(request: HttpRequest) -> Services:
    """Return the process's services."""
    services: Services = request.app.state.services
    return services


def caller_of(request: HttpRequest) -> Caller:
    """Return the caller that api/auth/guard.py authenticated. Raises KeyError on a route open to anyone."""
    caller: Caller = request.scope["state"]["caller"]
    return caller


def header(scope: Scope, name: bytes, default: str = "") -> str:
    """Return a header of a request; `name` is lower case. api/app.py has indexed the headers, which is cheaper
    than the framework's request object."""
    value: bytes | None = scope["state"]["headers"].get(name)
    return default if value is None else value.decode("latin-1")


async def read_body(scope: Scope, receive: Receive, limit: int) -> Weighed:
    """Read a whole JSON body of at most `limit` bytes, and check that it parses fast enough. Raises as `receive_body`;
    ApiError also for one that does not."""
    return await weighed(await receive_body(scope, receive, limit))


async def receive_body(scope: Scope, receive: Receive, limit: int) -> bytearray:
    """Read a whole JSON body of at most `limit` bytes.

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
        size = len(body)
        if size > limit:
            raise errors.payload_too_large(limit)
        if size > LARGE_BYTES:
            hold(scope, size)
    return without_mark(body)


def hold(scope: Scope, size: int) -> None:
    """Count the bytes of a large body, until its job is accepted or its request ends. Raises ApiError (503)."""
    services, state = scope["app"].state.services, scope["state"]
    others = services.large_bytes - state.get("large", 0)
    if others and others + size > MAX_LARGE_BYTES:
        raise errors.store_full("the large bodies of other requests are being read")
    services.large_bytes, state["large"] = others + size, size


def let_go(services: Services, state: dict[str, Any]) -> None:
    """Count the body of a request no longer. Idempotent."""
    services.large_bytes -= state.pop("large", 0)


def idempotency_key(scope: Scope) -> str:
    """Return the Idempotency-Key header, prefixed so that it cannot equal the key of a broker message; "" without one.

    Raises ApiError (400).
    """
    if b"idempotency-key" not in scope["state"]["headers"]:
        return ""
    key = header(scope, b"idempotency-key")
    if len(key) > MAX_KEY_CHARS:
        raise errors.invalid_request(f"Idempotency-Key has {len(key)} characters, at most {MAX_KEY_CHARS} are taken.")
    return joined("header", key) if key else ""


# --- preparation -----------------------------------------------------------------------------------------------------


MAX_CACHED = 512
MAX_OPTIONS_BYTES = 2048
"""Of the fields beside the messages; requests with more are prepared each time."""


class PreparedRequest(msgspec.Struct, frozen=True):
    """A valid request, and its job without id, trace and times."""

    asked: Request
    """Without its messages, if `prompt` has them."""
    job: Job
    prompt: Prompt
    card: ModelCard | None
    """Of the model, if one was known."""
    cost: Cost
    """Of this request's `prompt`, not of the cached one."""
    limit: WaitLimit | None
    """The tighter of max_queue_ms and deadline_ms; None: the request has neither."""
    ignored: str
    """The value of X-Ignored-Fields."""
    has_media: bool = False
    """Whether a turn of `prompt` has images, recordings or documents."""


class _Message(msgspec.Struct, forbid_unknown_fields=True):
    """A message whose validation changes nothing and finds nothing."""

    role: Literal["system", "user", "assistant"]
    content: str


class _Body(msgspec.Struct):
    messages: msgspec.Raw


_split = msgspec.json.Decoder(_Body).decode
_messages = msgspec.json.Decoder(Annotated[list[_Message], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)]).decode

_Options: TypeAlias = tuple[bytes, bytes]
"""What a body has before and behind its messages."""


class PreparedRequests:
    """Prepares the requests of one process, with a cache for those of plain chats. What it holds of callers, such as
    `user` and `metadata`, ends with the next `clear`, every few seconds."""

    def __init__(self) -> None:
        self._cache: dict[tuple[Kind, _Options, str, Priority, tuple[str, ...], bool], PreparedRequest] = {}

    def clear(self) -> None:
        """Prepare every request anew from now on."""
        self._cache.clear()

    def read(
        self, services: Services, state: dict[str, Any], kind: Kind, body: bytes, *, waits: bool
    ) -> PreparedRequest:
        """Validate a body. `state`: of its scope. `waits`: the response stays open until the job ends.

        Raises ApiError (400, 404).
        """
        caller: Caller = state["caller"]
        plain = _plain(body) if kind in ("chat", "job") else None
        if plain is None:
            return prepare(services, caller, read_request(services, state, kind, body), waits=waits)
        options, turns = plain
        key = (kind, options, caller.tenant, caller.ceiling, caller.models, waits)
        known = self._cache.get(key)
        if known is None or known.card is not services.cards.get(known.job.model):
            asked = read_request(services, state, kind, body)
            made = prepare(services, caller, asked, waits=waits)
            if not isinstance(asked, ChatRequest):
                return made
            job = replace(made.job, prompt=Chat(()))
            known = replace(made, asked=asked.model_copy(update={"messages": []}), job=job)
            if len(self._cache) >= MAX_CACHED:
                del self._cache[next(iter(self._cache))]
            self._cache[key] = known
        job, prompt = known.job, Chat(tuple([ChatTurn(turn.role, turn.content) for turn in turns]))
        state["model"] = job.model
        cost = replace(known.cost, prompt=prompt_tokens(prompt, job.sampling, job.tools))
        return replace(known, prompt=prompt, cost=cost)


def _plain(body: bytes) -> tuple[_Options, Sequence[_Message]] | None:
    """Split the body of a chat; None if its messages are not plain, or if it is not a valid one for any other reason.
    That two decoders read the body makes no difference: all but the messages is, byte by byte, what was validated."""
    if is_heavy(body):
        return None
    try:
        given = bytes(_split(body).messages)
        messages = _messages(given)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    prefix, _, suffix = body.partition(given)
    return ((prefix, suffix), messages) if len(prefix) + len(suffix) <= MAX_OPTIONS_BYTES else None


def read_request(services: Services, state: dict[str, Any], kind: Kind, body: bytes) -> Request:
    """Validate a body, and note its model in the `state` of its scope. Raises ApiError (400, 404)."""
    asked = parse(kind, body, services.aliases.default)
    check_choices(asked, services.settings.max_choices_per_request)
    found = model_of(services, state["caller"], asked.model)
    state["model"] = found.model
    return asked.naming(found.model, found.adapter)


def model_of(services: Services, caller: Caller, name: str) -> Target:
    """Return what a caller means by a name. Raises ApiError (403: its key is not for it, 404)."""
    found = services.meant(caller.tenant, name)
    if not may_use(caller, name, *(found.names if found is not None else ())):
        raise errors.outside_of_key("models", name)
    if found is None:
        raise errors.model_not_found(name, [*served_names(services.models), *services.aliases.listed(caller.tenant)])
    return found


def may_use(caller: Caller, *names: str) -> bool:
    """Whether the caller's key is for a model, by one of its names."""
    return not caller.models or not set(names).isdisjoint(caller.models)


def prepare(services: Services, caller: Caller, asked: Request, *, waits: bool) -> PreparedRequest:
    """Prepare a valid request. Raises ApiError (400) for what its model's engine does not support."""
    card = services.cards.get(asked.model)
    events, webhook = recipients(services.subscriptions, caller.tenant, asked, waits=waits)
    job = to_job(
        asked,
        tenant=caller.tenant,
        ceiling=caller.ceiling,
        reply_to=services.relay.address if waits else "",
        events=events,
        webhook=webhook,
        card=card,
    )
    if card is not None and (failure := unsupported(job, card)):
        raise errors.from_failure(failure)
    ignored = ", ".join(ignored_fields(asked, card))
    limit, media = limit_of(job), has_media(job.prompt)
    return PreparedRequest(asked, job, job.prompt, card, cost_of(job, card), limit, ignored, media)


# --- acceptance ------------------------------------------------------------------------------------------------------


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


async def admit(services: Services, scope: Scope, receive: Receive, kind: Kind, *, waits: bool) -> Admitted:
    """Validate a request and put its job in the queue.

    Args:
        waits: the response stays open until the job ends.

    Raises:
        ApiError: the request is refused. No job was accepted, except where the message says so (503 store_unavailable).
    """
    body = await weighed(await receive_body(scope, receive, services.body_limit))
    prepared = services.prepared.read(services, scope["state"], kind, body, waits=waits)
    return await accept(services, scope, prepared, body, waits=waits)


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
        waiting = await services.job_reader.expected_position(job, services.cards.get(job.model))
    except store.Unavailable:
        return None  # the put will find out
    wait = waits.wait(job, waiting)
    if wait is None or not exceeds(wait, limit, settled=settled):
        return None
    return errors.deadline_unreachable(limit.field, limit.ms, job.priority, wait)


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
    state, key = scope["state"], idempotency_key(scope)
    caller: Caller = state["caller"]
    # A full store accepts no new job, but a repeated request with its key may still fetch its answer.
    if full := services.store.refusal if key else services.refusal:
        raise errors.store_full(full)
    form = prepared.job.response
    conversation, has_limits = form.conversation if form is not None else "", caller.tenant in services.keyring.limited
    job_id = services.queue.new_id(caller.tenant, key, conversation, limited=has_limits)
    partition, scheduled = partition_of(job_id) or 0, prepared.job.scheduled
    job = replace(
        prepared.job,
        id=job_id,
        prompt=prepared.prompt,
        trace=state["trace"],
        # The time until a later start is no part of what the request took.
        received_us=0 if scheduled else services.clock.at(state["received"], partition),
        clock_us=services.clock.error_us(partition),
    )
    media: Sequence[bytes] = ()
    if prepared.has_media or services.content is not None or len(body) > services.settings.body_limit:
        prepared, job, media = await _checked(services, prepared, job, len(body))
    began_ns = time.time_ns()
    while True:
        buffer = services.relay.open(job.id, whole=not job.stream)
        try:
            accepted = await _put(services, prepared, job, partition, caller, key, body, refusal, media)
        except BaseException:
            services.relay.close(buffer)
            raise
        buffer.accepted = True
        if not (accepted.joined and waits):
            break
        services.relay.close(buffer)
        # If that job was abandoned by its client, or has expired meanwhile, the key is free: put again.
        with contextlib.suppress(store.Abandoned, store.UnknownJob):
            buffer = await _join(services, replace(job, id=accepted.id))
            break
    state["job"] = accepted.id
    let_go(services, state)
    if services.tracing.recording and is_sampled(job.trace) and not accepted.joined:
        about: Attributes = {names.JOB_ID: accepted.id, names.PRIORITY: str(job.priority)}
        services.tracing.span("enqueue", job.trace, "producer", began_ns, about).end()
    headers, wait = {"X-Job-Id": accepted.id}, None
    if not scheduled:
        headers["X-Queue-Position"] = str(accepted.position.before)
    if accepted.joined:
        job = replace(job, id=accepted.id)
    elif scheduled:
        pass
    elif found := services.waits.show(job, accepted.position.in_lane):
        wait = found[1]
        headers["X-Queue-ETA-Ms"] = str(wait.eta_ms)
        # It is compared with the measured one.
        services.wait_sampler.note(job.id, *found, prepared.limit and prepared.limit.ms)
    if accepted.rates:
        headers |= errors.rate_headers(accepted.rates)
    if prepared.ignored:
        headers["X-Ignored-Fields"] = prepared.ignored
    return Admitted(job, partition, accepted, buffer, prepared.asked, headers, bool(key), wait)


async def _checked(
    services: Services, prepared: PreparedRequest, job: Job, size: int
) -> tuple[PreparedRequest, Job, Sequence[bytes]]:
    """Take the media out of a job, which may change its cost, and apply the content rules. `size`: bytes of the body.
    Raises ApiError (400, 413), Unavailable."""
    limit, media = services.settings.body_limit, tuple[bytes, ...]()
    if prepared.has_media:
        job, media = await services.media.taken(job, prepared.card, limit, size)
        prepared = replace(prepared, cost=cost_of(job, prepared.card))
    elif size > limit:
        raise errors.payload_too_large(limit)
    return prepared, job if services.content is None else await services.content.admitted(job, size), media


async def _put(
    services: Services,
    prepared: PreparedRequest,
    job: Job,
    partition: int,
    caller: Caller,
    key: str,
    body: bytes,
    refused: ApiError | None,
    media: Sequence[bytes],
) -> Accepted:
    digest = ""
    if key:  # a body may be a valid request of several endpoints, whose jobs have other answers
        has_own = job.task is not None or job.message is not None
        kind = b"count" if isinstance(prepared.asked, Counted) else job.endpoint.encode() if has_own else b""
        digest = hashlib.sha256(kind + body).hexdigest()
    reason, late = services.headroom.brief, None
    refusal = refused or (store.StoreFull(reason) if reason else None)
    try:
        if refusal is None and prepared.limit is not None:
            late = await out_of_reach(services, job, prepared.limit)
        return await services.queue.put(
            job,
            idempotency_key=key,
            digest=digest,
            must_run=bool(prepared.asked.queue.do_not_queue) or late is not None,
            cost=prepared.cost,
            partition=partition,
            refusal=refusal,
            quota=services.quotas(caller),
            key_limits=caller.limits,
            version=prepared.asked.version_read,
            caller=caller.name,
            media=media,
        )
    except store.NeverFits as error:
        raise errors.too_large_for_store(job, error.needed) from None
    except store.LaneFull as error:
        raise errors.queue_full(error.waiting, error.own, *services.waits.retry(job, error.waiting)) from None
    except store.NoCapacity:
        raise late or errors.no_capacity(*services.waits.retry(job)) from None
    except (store.Unavailable, asyncio.CancelledError) as error:
        cancel = partial(services.queue.cancel, job.id, CancelledBy.NOT_ACCEPTED)
        raise unanswered(services, error, key, cancel) from None


async def _join(services: Services, job: Job) -> ReorderBuffer:
    """Open a buffer for an existing job (found by idempotency key), from its first token.

    Raises:
        ApiError: the job cannot be read now.
        UnknownJob, Abandoned: the job is gone, and its key is free again.
    """
    buffer = services.relay.open(job.id, whole=not job.stream)
    buffer.accepted = True
    try:
        await services.relay.subscribe(buffer, joining=True)
    except store.Unavailable:
        services.relay.close(buffer)
        raise errors.job_unreadable(job) from None
    except BaseException:
        services.relay.close(buffer)
        raise
    return buffer


def unanswered(services: Services, error: BaseException, key: str, cancel: Callable[[], Awaitable[object]]) -> ApiError:
    """Return the answer to a request whose put was not answered and may have succeeded. `error`: Unavailable, or that
    this process stops; `key`: the idempotency key of the request; `cancel` takes back what was put."""
    if isinstance(error, asyncio.CancelledError):  # drain_s is over, or the caller's key has ended
        return errors.key_ended() if is_key_ended(error) else errors.put_cut_off()
    if key:  # the client's retry finds what was put
        return errors.acceptance_unknown()
    services.spawn(withdraw(cancel))  # without a key no client could find it
    return errors.not_accepted()


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
