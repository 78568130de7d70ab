"""ASGI application: what surrounds every endpoint. It gives each request an id and a trace, times, counts and logs it,
decodes its body, calls the endpoint that the guard has found, and turns its errors into answers.

Plain ASGI, cheap for streams.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import sys
import time
import zlib
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from functools import cache, partial
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.admin.overview import LiveOverview
from api.admission import let_go
from api.anthropic.errors import is_asked, own_headers
from api.auth.answers import is_key_ended
from api.auth.floods import FLOODED
from api.auth.guard import RequestGuard, error_response
from api.auth.hosts import PROBES, Addresses
from api.chat import JobEndpoint
from api.openai import errors
from api.openai.errors import ApiError
from api.openapi import document
from api.routes import ROUTES
from api.services import Services
from streaming import errors as store
from telemetry import tracing as names
from telemetry.logs import EventLog
from telemetry.otlp import Attributes
from telemetry.records.schema import REFUSED, RequestRecord
from telemetry.redaction import redact
from telemetry.tracing import NO_TRACING, TRACEPARENT, TRACESTATE, extract

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

log = logging.getLogger(__name__)


def build_app(services: Services, on_ready: Callable[[], None] = lambda: None) -> ASGIApp:
    """Build the application. Its lifespan starts and stops `services`, and calls `on_ready` in between."""

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        await services.start()
        on_ready()
        yield
        await services.stop()

    app = Starlette(lifespan=lifespan)
    app.state.services = services
    app.state.overview = LiveOverview(services)
    # It is built when it is first asked for.
    app.state.document = cache(partial(document, services.version, services.settings.base_path))
    return Observed(RequestGuard(Endpoints(app), services), services)


REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
OWN_ID = re.compile(r"req_[0-9a-f]{24}")
"""A request id that was made here."""
MAX_LOGGED_PATH = 200
"""Characters of a path without a route that are looked at."""
LINKS = (b"location", b"stream-url")
"""Headers whose values are paths."""
HIDDEN = "..."
"""Stands for what no route has in its path."""
WORDS = frozenset(word for route in ROUTES for word in route.path.split("/") if "{" not in word)
"""Words in the paths of all routes."""
UNLISTED = "other"
"""The route of a request that has none in the table; a label of a metric must not hold a path that a client chose."""

SUBMITTING = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/jobs"),
    *("/v1/embeddings", "/v1/rerank", "/tokenize", "/detokenize", "/v1/messages"),
)
"""Routes whose requests become jobs: one that is refused has a record of its own."""


class Observed:
    """Sets in `scope["state"]`: `request_id`, `headers` (raw, by name), `address` (of the client, also behind a trusted
    proxy), `trace` (W3C context of the server span),
    `received` (monotonic seconds: the request's first byte, from api/stream/connection.py; under another server, now),
    `status` once the answer has started, and `server_send` and `head_of` while it runs. Names the span and the metric
    of a request by `route`, which the guard sets.

    With `[api] base_path`, requests may have it before their path, and links in headers get it.

    With `[api] access_log` it writes a log line at the end of each request, except for health probes and floods.
    """

    def __init__(self, app: ASGIApp, services: Services) -> None:
        self._app, self._services = app, services
        self._base_path = services.settings.base_path
        self._addresses = Addresses(services.settings.proxy_networks)
        self._access = EventLog("api.access", at_once=False) if services.settings.access_log else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        received = state.setdefault("received", time.monotonic())
        if (base := self._base_path) and f"{scope['path']}/".startswith(f"{base}/"):
            scope["path"] = scope["path"][len(base) :] or "/"
        # The first of several headers with one name counts.
        headers: dict[bytes, bytes] = dict(reversed(scope["headers"]))
        request_id = headers.get(b"x-request-id", b"").decode("latin-1")
        if not REQUEST_ID.fullmatch(request_id):
            request_id = new_id()
        tracing = NO_TRACING if scope["path"] in PROBES else self._services.tracing
        span = tracing.enter(scope["method"], _trace_context(headers))
        # Token streams write straight to the server (`server_send`, `connection`), past every middleware.
        address = self._addresses.of(scope)
        state.update(request_id=request_id, headers=headers, address=address, trace=span.carrier(), server_send=send)

        def head_of(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
            """Return these headers and those that every answer has."""
            if base:
                headers = [(name, base.encode() + value if name in LINKS else value) for name, value in headers]
            return [
                *headers,
                *state.get("cors", ()),
                (b"x-request-id", request_id.encode()),
                (b"openai-processing-ms", b"%.0f" % ((time.monotonic() - received) * 1000)),
                *(own_headers(headers, request_id) if is_asked(scope["path"], state["headers"]) else ()),
            ]

        async def stamped(message: Message) -> None:
            if message["type"] == "http.response.start":
                state["status"] = message["status"]
                message["headers"] = head_of(message.get("headers", ()))
                answers = state["connection"].answers if "connection" in state else None  # None: its client has left
                if answers is not None and _has_body(scope["method"], message["headers"]):
                    answers.hold()
            await send(message)

        state["head_of"] = head_of

        try:
            with span:
                await self._app(scope, receive, stamped)
        except asyncio.CancelledError as cut:  # drain_s is over, or the caller's key has ended
            if "status" not in state:
                told = errors.key_ended() if is_key_ended(cut) else errors.draining()
                await error_response(self._services, told, scope)(scope, receive, stamped)
            elif not is_key_ended(cut):
                raise
        finally:
            let_go(self._services, state)
            del state["server_send"], state["head_of"]  # they refer to the scope: break the cycle
            status, route = state.get("status", 500), state.get("route", UNLISTED)
            if span.recorded:
                error = f"HTTP {status}" if status >= 500 else None
                span.end(error=error, attributes=_described(scope, status, state), name=f"{scope['method']} {route}")
            self._services.metrics.requests.labels(state.get("model", ""), route, str(status)).inc()
            told = status < 400 or state.get("code") != FLOODED
            if told and status >= 400 and scope["method"] == "POST" and route in SUBMITTING and "job" not in state:
                self._services.records.write(refusal(state, status, self._services.name))
            if told and self._access is not None and scope["path"] not in PROBES:
                _log(self._access, scope, status, state, span.trace_id)


def _log(access: EventLog, scope: Scope, status: int, state: Mapping[str, Any], trace_id: str) -> None:
    """Write the log line. The route is that of the table: a path may hold anything, as may an id that a client
    chose. Of a path without one, the words are shown that a route has, so that its client can be corrected."""
    request_id, caller, route = state["request_id"], state.get("caller"), state.get("route")
    access.write(
        "request",
        method=scope["method"],
        route=route,
        path=None if route else outline(scope["path"], WORDS),
        status=status,
        ms=round((time.monotonic() - state["received"]) * 1000, 1),
        request_id=request_id if OWN_ID.fullmatch(request_id) else redact(request_id),
        tenant=caller.tenant if caller is not None else None,
        key=(caller.name or None) if caller is not None else None,
        address=state["address"],
        job=state.get("job"),
        trace_id=trace_id,
    )


def _has_body(method: str, headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether a body follows the head at once: then both are sent together."""
    return method != "HEAD" and any(name == b"content-length" and value != b"0" for name, value in headers)


def _described(scope: Scope, status: int, state: Mapping[str, Any]) -> Attributes:
    """Attributes of the span of a request: nothing that its client wrote, but for what the server checked."""
    caller = state.get("caller")
    known = {
        names.METHOD: scope["method"],
        names.STATUS_CODE: status,
        names.ROUTE: state.get("route", UNLISTED),
        names.REQUEST_MODEL: state.get("model"),
        names.JOB_ID: state.get("job"),
        names.TENANT: caller.tenant if caller is not None else None,
        names.ERROR_TYPE: (state.get("code") or str(status)) if status >= 400 else None,
    }
    return {name: value for name, value in known.items() if value}


def refusal(state: Mapping[str, Any], status: int, process: str) -> RequestRecord:
    """The record of a request that became no job. An id that its client chose is left out: it may hold anything."""
    request_id, caller, now_us = state["request_id"], state.get("caller"), int(time.time() * 1e6)
    return RequestRecord(
        id=request_id if OWN_ID.fullmatch(request_id) else new_id(),
        ended_us=now_us,
        received_us=now_us - int((time.monotonic() - state["received"]) * 1e6),
        state=REFUSED,
        model=state.get("model", ""),
        tenant=caller.tenant if caller is not None else "",
        by=process,
        code=state.get("code", ""),
        status=status,
    )


def outline(path: str, words: Collection[str]) -> str:
    """Return the beginning of a path with only these words; anything else could be a secret."""
    return "/".join(word if word in words else HIDDEN for word in path[:MAX_LOGGED_PATH].split("/"))


def _trace_context(headers: Mapping[bytes, bytes]) -> dict[str, str]:
    """Return the W3C trace context that the request carries, if any."""
    if b"traceparent" not in headers:
        return {}
    return extract({name: headers.get(name.encode(), b"").decode("latin-1") for name in (TRACEPARENT, TRACESTATE)})


def new_id() -> str:
    """Return a new request id."""
    return f"req_{random.getrandbits(96):024x}"


# --- the body --------------------------------------------------------------------------------------------------------


SLICE_BYTES = 64 * 1024
PIECE_BYTES = 16 * 1024
"""Encoded bytes that a decompressor gets at once: it copies what it does not take."""
MAX_OVERHEAD_BYTES = 256 * 1024
"""Encoded bytes that may decode to nothing, besides four for each decoded byte: more than a block of zstd, of which
nothing is decoded before its end. Empty parts cost time, too."""
PART_COST_BYTES = 1024
"""Encoded bytes as which the beginning of a part counts, because it takes as long."""
MAX_WINDOW_LOG = 23
"""8 MiB, the largest window of the content coding zstd (RFC 9659)."""


def decoded(scope: Scope, receive: Receive) -> Receive:
    """Return what receives the body of a request without its content coding. It raises ApiError (400, 415).

    It decodes slice by slice: that bounds the memory and the time that a small body may cost which decodes to a large
    one. Readers of a body count the decoded bytes against their own limit, and stop.
    """
    if b"content-encoding" not in scope["state"]["headers"] or scope["method"] not in ("POST", "PUT"):
        return receive  # some clients name a coding with every request
    return _messages(scope, receive).__anext__


async def _messages(scope: Scope, receive: Receive) -> AsyncIterator[Message]:
    """Yield the messages of a decoded body, and then those that come after it."""
    value = b",".join([value for name, value in scope["headers"] if name == b"content-encoding"]).decode("latin-1")
    names = [name.strip().lower().removeprefix("x-") for name in value.split(",")]
    names = [name for name in names if name not in ("", "identity")]
    if len(names) > 1 or not all(name in _NEW for name in names):
        raise errors.unsupported_coding(_NEW)
    if names:
        coding, more = _Coding(names[0]), True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                yield message
                continue
            more = message.get("more_body", False)
            for part in coding.decode(message.get("body", b"")):
                await asyncio.sleep(0)
                yield {"type": "http.request", "body": part, "more_body": True}
        coding.check_end()
        yield {"type": "http.request", "body": b"", "more_body": False}
    while True:
        yield await receive()


class _Coding:
    """Decoder of one coding, which may consist of several parts (members of gzip, frames of zstd)."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._part: Any = None
        """A decompressor of the library."""
        self._taken = self._given = 0

    def decode(self, data: bytes) -> Iterator[bytes]:
        """Yield decoded slices. Raises ApiError (400)."""
        for start in range(0, len(data), PIECE_BYTES):
            piece, full = data[start : start + PIECE_BYTES], False
            self._taken += len(piece)
            while piece or full:
                if self._part is not None and self._part.eof:
                    if self._name == "deflate":
                        raise errors.coding_mismatch(self._name)
                    if self._name == "gzip" and not piece[0]:
                        piece = piece.lstrip(b"\0")  # padding, as gzip(1) takes it
                        self._check_overhead(len(piece))
                        continue
                    self._part = None
                if self._part is None:
                    self._part = _NEW[self._name](piece)
                    self._taken += PART_COST_BYTES
                try:
                    found = self._part.decompress(piece, SLICE_BYTES)
                except (zlib.error, zstd.ZstdError):
                    raise errors.coding_mismatch(self._name) from None
                piece = self._part.unused_data if self._part.eof else getattr(self._part, "unconsumed_tail", b"")
                full = len(found) == SLICE_BYTES and not self._part.eof
                self._given += len(found)
                self._check_overhead(len(piece))
                yield found

    def _check_overhead(self, left: int) -> None:
        """Raise ApiError (400) if most of the data but the last `left` bytes decodes to nothing."""
        if self._taken - left > MAX_OVERHEAD_BYTES + 4 * self._given:
            raise errors.coding_mismatch(self._name)

    def check_end(self) -> None:
        """Raise ApiError (400) if the data is cut off."""
        if self._part is None or not self._part.eof:
            raise errors.coding_mismatch(self._name)


def _new_deflate(data: bytes) -> Any:
    """The standard means zlib's format; some clients send bare deflate data, which cannot begin with this byte."""
    return zlib.decompressobj(zlib.MAX_WBITS if data[0] & 0x8F == 8 else -zlib.MAX_WBITS)


def _new_zstd(_data: bytes) -> Any:
    return zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: MAX_WINDOW_LOG})


_NEW = {"gzip": lambda _data: zlib.decompressobj(16 + zlib.MAX_WBITS), "deflate": _new_deflate, "zstd": _new_zstd}


# --- the endpoint ----------------------------------------------------------------------------------------------------


class Endpoints:
    """Calls the endpoint that the guard has found, with a decoded body, and turns its errors into answers.

    The framework has no part in a request: its layers would add half of a chat's own cost. Endpoints that answer with a
    job are ASGI applications; all others take a Request and return the answer.
    """

    def __init__(self, app: Starlette) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["app"], state = self._app, scope["state"]
        receive, endpoint = decoded(scope, receive), state["endpoint"]
        try:
            if isinstance(endpoint, JobEndpoint):
                await endpoint(scope, receive, send)
            else:
                await (await endpoint(Request(scope, receive, send)))(scope, receive, send)
        except Exception as error:  # one request must not stop the others
            if not await self._answered(error, scope, receive, send):
                raise

    async def _answered(self, error: Exception, scope: Scope, receive: Receive, send: Send) -> bool:
        """Answer an error; False if the server must close the connection."""
        state = scope["state"]
        begun = "status" in state
        if isinstance(error, ClientDisconnect) and not begun:  # nobody reads this answer; metrics count its status
            log.debug("a client disconnected in its request", extra={"request_id": state["request_id"]})
            await Response(status_code=CLIENT_GONE)(scope, receive, send)
            return True
        refusal = None if begun else _refusal(error, scope["method"])
        told = refusal or errors.internal_error(state["request_id"])
        if refusal is None:  # a bug, or anything that breaks off an answer
            log.error("request failed", exc_info=error, extra={"request_id": state["request_id"]})
        else:
            _forget_frames(error)
        state["code"] = told.code
        if not begun:
            await error_response(self._app.state.services, told, scope)(scope, receive, send)
        return refusal is not None


def _forget_frames(error: BaseException | None) -> None:
    """Take the tracebacks off an error that is answered. A traceback refers to frames: if a variable there refers to
    the error, the whole request waits for the garbage collector, which takes 60 ms every few hundred refusals."""
    while error is not None:
        error.__traceback__ = None
        error = error.__context__


CLIENT_GONE = 499
"""Status of a client that disconnected, as nginx logs it; no standard defines one."""

ANSWERS: dict[type[Exception], Callable[[Any], ApiError]] = {
    ApiError: lambda error: error,
    store.UnknownJob: lambda _: errors.job_not_found(),
    store.UnknownFile: lambda _: errors.file_not_found(),
    store.UnknownBatch: lambda _: errors.batch_not_found(),
    store.UnknownMessage: lambda _: errors.webhook_not_found(),
    store.UnknownConversation: lambda _: errors.conversation_not_found(),
    store.ConversationChanged: lambda _: errors.conversation_locked(),
    store.QuotaExceeded: errors.quota_exceeded,
    store.LimitReached: errors.limit_reached,
    store.StoreFull: lambda error: errors.store_full(str(error)),
    store.KeyReused: lambda _: errors.idempotency_key_reused(),
}
"""The answers to errors that mean the same at every endpoint, such as those of the store."""


def _refusal(error: Exception, method: str) -> ApiError | None:
    """Return the answer to an exception; None to one that is a bug."""
    if isinstance(error, store.Unavailable):
        log.warning("refused, the store is down: %s", error)
        return errors.store_unavailable(read=method in ("GET", "HEAD"))
    return next((ANSWERS[kind](error) for kind in type(error).__mro__ if kind in ANSWERS), None)
