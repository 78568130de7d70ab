"""GET and HEAD /v1/jobs/{id}/stream: a job's messages by the read path of the Durable Streams protocol.

A read returns what there is after an offset. With `live=long-poll` it waits for more, and with `live=sse` it streams.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from contextlib import aclosing
from typing import NamedTuple

from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.requests import Request
from starlette.responses import Response

from api.admission import services_of
from api.durable import offsets
from api.durable.offsets import StreamOffset, live_cursor
from api.durable.pages import LEFT_OUT, MESSAGES_PER_SLICE, Page, message, page_after, tail
from api.events import LogBroken, event_stream, job_log
from api.jobs import job_headers, own_record
from api.openai import errors
from api.openai.cursor import Cursor
from api.openai.job_events import JobEvent
from api.openai.rendering import to_json
from api.query import whole_number
from api.services import Services
from api.stream.watch import Watched
from streaming.jobs.job import JobState
from streaming.jobs.records import JobRecord

LONG_POLL_S = 20.0
"""Time that a long-poll waits for a message; less than the time that clients wait for an answer."""
SSE_S = 60.0
"""Time after which the server ends a stream of events, and its reader comes back with its last offset."""
MAX_CURSOR = 10**12

_SAFETY = {"X-Content-Type-Options": "nosniff", "Cross-Origin-Resource-Policy": "same-origin"}
_REVALIDATED = {"Cache-Control": "private, no-cache"}
"""A browser may keep a page, and asks with its ETag before it uses it: the job may be gone meanwhile."""
_UNCACHED = {"Cache-Control": "no-store"}
_MEDIA_TYPE = "application/json"
_ENDS = frozenset(("error", *(state.value for state in JobState if state.final)))
"""Names of the last message of a stream."""


class _Read(NamedTuple):
    """What a client asks for."""

    offset: StreamOffset | None
    text: str
    """The offset as the client sent it."""
    live: str
    cursor: int | None


async def stream(request: Request) -> Response:
    """Read the messages of a job. Raises ApiError (400, 404, 410, 503)."""
    services, asked = services_of(request), _parsed(request)
    record = await own_record(request)
    if request.method == "HEAD":
        page = await tail(services, record)
        return Response(headers=_headers(page) | _UNCACHED, media_type=_MEDIA_TYPE)
    at_tail = asked.text == offsets.TAIL
    page = await (tail(services, record) if at_tail else page_after(services, record, asked.offset))
    if asked.live == "sse":
        return _sse_response(services, page, asked)
    if not asked.live:
        return _catch_up(request, page, asked.text)
    if not page.messages and not page.closed:
        page = await _next_page(request, services, page)
    headers = _headers(page) | _UNCACHED
    if not page.closed:
        headers["Stream-Cursor"] = str(live_cursor(asked.cursor))
    return _json(page.messages, headers) if page.messages else Response(status_code=204, headers=headers)


def _parsed(request: Request) -> _Read:
    """Raises ApiError (400)."""
    query = request.query_params
    for name in ("offset", "live", "cursor"):
        if len(query.getlist(name)) > 1:
            raise errors.invalid_request(f"{name} must be there once.", name)
    text, live, cursor = query.get("offset"), query.get("live"), query.get("cursor")
    if live not in (None, "long-poll", "sse"):
        raise errors.invalid_request("live must be long-poll or sse, or left out.", "live")
    if live and text is None:
        raise errors.invalid_request("live needs an offset: -1 for the beginning, now for the end.", "offset")
    sentinel = text in (None, offsets.BEGINNING, offsets.TAIL)
    offset = None if sentinel else offsets.read(text or "")
    number = whole_number(cursor, "cursor", 0, MAX_CURSOR) if cursor is not None else None
    return _Read(offset, text or offsets.BEGINNING, live or "", number)


def _headers(page: Page) -> dict[str, str]:
    """Return the headers that tell a reader where it is."""
    headers = {"Stream-Next-Offset": str(StreamOffset.of(page.next)), **job_headers(page.record), **_SAFETY}
    if page.up_to_date:
        headers["Stream-Up-To-Date"] = "true"
    if page.closed:
        headers["Stream-Closed"] = "true"
    return headers


def _catch_up(request: Request, page: Page, start: str) -> Response:
    if start == offsets.TAIL:
        return _json((), _headers(page) | _UNCACHED)
    # Of two pages with the same bounds, one may be the last so far and the other not.
    state = ":closed" if page.closed else ":tail" if page.up_to_date else ""
    tag = f'"{page.record.job.id}:{start}:{StreamOffset.of(page.next)}{state}"'
    headers = _headers(page) | _REVALIDATED | {"ETag": tag}
    known = [each.strip().removeprefix("W/") for each in request.headers.get("if-none-match", "").split(",")]
    return Response(status_code=304, headers=headers) if tag in known else _json(page.messages, headers)


def _json(messages: Sequence[bytes], headers: dict[str, str]) -> Response:
    return Response(b"[" + b",".join(messages) + b"]", headers=headers, media_type=_MEDIA_TYPE)


class _MessageBatch(NamedTuple):
    """Messages that came together, while their reader waited."""

    messages: Sequence[bytes]
    next: Cursor
    closed: bool

    @property
    def full(self) -> bool:
        """More may have come at the same time."""
        return len(self.messages) >= MESSAGES_PER_SLICE


async def _batches(services: Services, record: JobRecord, seen: Cursor) -> AsyncGenerator[_MessageBatch, None]:
    """Yield the messages after a position as they come, to the end of the stream, or until it cannot be read here: the
    reader comes back and is told why."""
    try:
        async for events in job_log(services, record, seen, shown=True):
            if (batch := _batch(events)) is not None:
                yield batch
    except LogBroken:
        return


def _batch(events: Iterable[JobEvent]) -> _MessageBatch | None:
    kept = [(event, event.id) for event in events if event.id is not None and event.name not in LEFT_OUT]
    if not kept:
        return None
    event, last = kept[-1]
    return _MessageBatch([message(each) for each, _ in kept], last, event.name in _ENDS)


async def _next_page(request: Request, services: Services, page: Page) -> Page:
    """Wait for the next messages; return the page as it is if none come in time, or the client has left."""
    try:
        async with asyncio.timeout(LONG_POLL_S) as limit:

            def stop() -> None:
                if not limit.expired():
                    limit.reschedule(asyncio.get_running_loop().time())

            with Watched(request.scope, request.receive, stop):
                async with aclosing(_batches(services, page.record, page.next)) as batches:
                    async for batch in batches:
                        return Page(page.record, batch.messages, batch.next, not batch.full, batch.closed)
    except TimeoutError:
        pass
    return page


def _sse_response(services: Services, page: Page, asked: _Read) -> EventSourceResponse:
    headers = _REVALIDATED | _SAFETY | job_headers(page.record) | {"Content-Type": "text/event-stream"}
    return event_stream(services, _events(services, page, asked.cursor), headers, ServerSentEvent(comment="ping"))


async def _events(services: Services, page: Page, seen: int | None) -> AsyncIterator[bytes]:
    """Yield what there is and then what comes, each with a `control` event behind it."""
    cursor = live_cursor(seen)
    yield _encoded(page.messages, page.next, cursor, up_to_date=page.up_to_date, closed=page.closed)
    if page.closed:
        return
    limit_s = asyncio.get_running_loop().time() + SSE_S
    async with aclosing(_batches(services, page.record, page.next)) as batches:
        while True:
            try:
                async with asyncio.timeout_at(limit_s):
                    batch = await anext(batches)
            except (TimeoutError, StopAsyncIteration):
                return
            yield _encoded(batch.messages, batch.next, cursor, up_to_date=not batch.full, closed=batch.closed)


def _encoded(messages: Sequence[bytes], after: Cursor, cursor: int, *, up_to_date: bool, closed: bool) -> bytes:
    control: dict[str, str | bool] = {"streamNextOffset": str(StreamOffset.of(after))}
    if not closed:
        control["streamCursor"] = str(cursor)
    if up_to_date or closed:
        control["upToDate"] = True
    if closed:
        control["streamClosed"] = True
    data = b"event: data\ndata:[%b]\n\n" % b",".join(messages) if messages else b""
    return data + b"event: control\ndata:%b\n\n" % to_json(control)
