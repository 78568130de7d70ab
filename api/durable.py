"""GET and HEAD /v1/jobs/{id}/stream: a job's messages by the protocol Durable Streams."""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from api.admission import services_of
from api.events import EventStream, LogBroken, job_log
from api.jobs import job_headers, own_record
from api.openai import cursor, errors
from api.openai.cursor import Cursor, ResumePoint
from api.openai.errors import from_failure, invalid_request
from api.openai.job_events import JobEvent, delta_event, reset_event, terminal_event
from api.openai.rendering import CallParts, to_json
from api.query import value_of
from api.services import Services
from api.stream.reply import Watched
from penstock.loops import Sliced
from streaming.errors import NewerMessage
from streaming.jobs.codec import Delta, Run, Section, author
from streaming.jobs.history import NOTHING
from streaming.jobs.job import JobState
from streaming.jobs.records import NEWER, JobRecord, was_cut_short

BEGINNING, TAIL = "-1", "now"
"""The protocol's own offsets: before the first retained message, and after the last one."""
INTERVAL_S = 20
"""Seconds for which a live read has the same cursor, so that a cache may answer several readers at once."""
FIRST_INTERVAL_S = 1_728_432_000
"""Unix time of cursor 0, 2024-10-09: the protocol counts from there."""
MAX_JITTER_S = 3600

_SYNTAX = re.compile(r"([0-9]{15})_([0-9]{15})_([0-9a-zA-Z.-]{1,64})")


def offset_of(last: Cursor) -> str:
    """Return the offset after the event of this cursor (api/openai/cursor.py): the cursor with numbers of a fixed
    width, so that offsets of one stream compare as their positions do. Opaque to clients."""
    return f"{last.epoch:015d}_{last.number:015d}_{last.run}"


def read(text: str) -> Cursor:
    """Parse a client's offset. Raises ApiError (400)."""
    match = _SYNTAX.fullmatch(text)
    if match is None:
        raise invalid_request("offset must be a Stream-Next-Offset as it was received, -1 or now.", "offset")
    return Cursor(int(match[1]), int(match[2]), match[3])


def live_cursor(seen: int | None, now_s: float | None = None) -> int:
    """Return the cursor of a live read: the number of the present interval, but always more than the client's last one,
    so that no cache can answer a reader for ever with the same bytes. `now_s`: Unix time."""
    current = int(((time.time() if now_s is None else now_s) - FIRST_INTERVAL_S) // INTERVAL_S)
    if seen is None or seen < current:
        return current
    return seen + max(1, random.randint(1, MAX_JITTER_S) // INTERVAL_S)  # noqa: S311 - jitter


MAX_MESSAGES = 1_000
"""Messages on a page."""
MESSAGES_PER_SLICE, SLICE_BYTES = 200, 64 * 1024
"""Messages rendered before the event loop runs other tasks, and their bytes: a few milliseconds. One message may have
the log-probabilities of a whole prompt."""
LEFT_OUT = frozenset(("queued", "queue.position", "started", "interrupted"))


class Page(NamedTuple):
    """The messages after a position.

    They are the job's events as /v1/jobs/{id}/events has them, without those whose bytes would not be the same in every
    replay: `queued`, `queue.position` and `interrupted` tell the present state, `started` the name of a worker.
    """

    record: JobRecord
    messages: Sequence[bytes]
    next: Cursor
    """The position after them."""
    up_to_date: bool
    """There are no more yet."""
    closed: bool = False
    """There will never be more."""


def message(event: JobEvent) -> bytes:
    """Encode an event of the log as one message of the stream."""
    return to_json({"event": event.name, "id": str(event.id), "data": event.data})


async def page_after(services: Services, record: JobRecord, seen: Cursor | None) -> Page:
    """Read the messages after the event `seen`; None: from the first one that is kept. If the job is in a later epoch,
    a reset and the messages of that one.

    Raises ApiError (410 if the log has no such offset; an offset may be forged, so a read never begins an epoch; 503),
    UnknownJob, Unavailable.
    """
    log = await _StoredLog.read(services, record)
    epoch = log.record.epoch
    if seen is None:
        return await log.page(ResumePoint(), Cursor(epoch, cursor.START))
    if (point := log.point(seen)) is not None:
        return await log.page(point, seen)
    if seen.epoch >= epoch:
        raise errors.offset_gone()
    return await log.page(ResumePoint(), Cursor(epoch, cursor.START), [message(reset_event(epoch))])


async def tail(services: Services, record: JobRecord) -> Page:
    """Read the position after the last message, without the messages. Raises as `page_after`."""
    log = await _StoredLog.read(services, record)
    return Page(log.record, (), log.last, up_to_date=True, closed=log.record.state.final)


@dataclass(frozen=True, slots=True)
class _StoredLog:
    """What the store has of a job's log at one moment: its record, its deltas from the first on, and their authors."""

    services: Services
    record: JobRecord
    rows: Sequence[Delta] = ()
    sections: Sequence[Section] = ()

    @classmethod
    async def read(cls, services: Services, record: JobRecord) -> _StoredLog:
        """Read the log. The record is read again after the workers' logs, which may be trimmed once the job has ended
        or another worker has it. Raises ApiError (503), UnknownJob, Unavailable."""
        reader, job_id = services.job_reader, record.job.id
        while record.terminal is None:
            try:
                history = (await reader.history(job_id, record.runs)).intact if record.runs else NOTHING
            except NewerMessage:
                raise from_failure(NEWER) from None
            known, record = record, await reader.outline(job_id)
            if record.terminal is None and record.epoch == known.epoch and _runs(record) == _runs(known):
                return cls(services, record, history.rows, history.sections)
        if record.newer or was_cut_short(record):  # its tokens could not be read
            raise from_failure(NEWER)
        record = await reader.with_rows(record)
        assert record.terminal is not None
        return cls(services, record, record.terminal.rows, record.terminal.sections)

    @property
    def last(self) -> Cursor:
        """The cursor of the last message."""
        if self.record.terminal is not None:
            return cursor.end(self.record.epoch, _runs(self.record), self.record.terminal)
        return self._cursor(self.rows[-1]) if self.rows else Cursor(self.record.epoch, cursor.START)

    def point(self, seen: Cursor) -> ResumePoint | None:
        """Return the position after a cursor; None if the log does not have the messages up to it."""
        point = cursor.resume(seen, self.record)
        if point is None or point.over or not point.runs:
            return point
        if not 0 < point.after <= len(self.rows):
            return None
        return point if author(self.sections, point.after) == point.runs[-1] else None

    async def page(self, point: ResumePoint, seen: Cursor, before: Sequence[bytes] = ()) -> Page:
        """Render the messages after `point`, which is the position after `seen`, behind those of `before`."""
        first = len(self.rows) if point.over else min(point.after, len(self.rows))
        end_of_page = min(first + MAX_MESSAGES, len(self.rows))
        found = [*before, *await self.services.store_client.turns.run(self._rendered(first, end_of_page))]
        last = self._cursor(self.rows[end_of_page - 1]) if end_of_page > first else seen
        all_rows = end_of_page == len(self.rows)
        closed = self.record.state.final and all_rows
        if closed and not point.over:
            end = terminal_event(self.record)
            assert end.id is not None
            found, last = [*found, message(end)], end.id
        return Page(self.record, found, last, up_to_date=all_rows, closed=closed)

    def _rendered(self, first: int, end: int) -> Sliced[list[bytes]]:
        """Render the deltas at these indexes. Those before them are read, too, where calls may have begun in them."""
        facts, found = self.services.facts(self.record.job, self.record.created_ms), list[bytes]()
        parts, size = CallParts() if self.record.job.parted else None, 0
        for index in range(0 if parts is not None else first, end):
            row = self.rows[index]
            called = parts.of(row) if parts is not None else None
            if index >= first:
                found.append(message(delta_event(facts, self._cursor(row), row, called)))
                size += len(found[-1])
            if size >= SLICE_BYTES or index % MESSAGES_PER_SLICE == 0:
                size = 0
                yield
        return found

    def _cursor(self, row: Delta) -> Cursor:
        """Return the cursor of a delta. Raises ApiError (410) if the record does not name the run that wrote it."""
        run, runs = author(self.sections, row.seq), _runs(self.record)
        if run is None or run not in runs:
            raise errors.offset_gone()
        return cursor.delta(self.record.epoch, runs.index(run) + 1, row.seq, run)


def _runs(record: JobRecord) -> list[Run]:
    return [logged.run for logged in record.runs]


LONG_POLL_S = 20.0
"""Time that a long-poll waits for a message; less than the time that clients wait for an answer."""
PING = b": ping\n\n"
SSE_S = 60.0
"""Time after which the server ends a stream of events, and its reader comes back with its last offset."""

_SAFETY = {"X-Content-Type-Options": "nosniff", "Cross-Origin-Resource-Policy": "same-origin"}
_REVALIDATED = {"Cache-Control": "private, no-cache"}
"""A browser may keep a page, and asks with its ETag before it uses it: the job may be gone meanwhile."""
_UNCACHED = {"Cache-Control": "no-store"}
_MEDIA_TYPE = "application/json"
_ENDS = frozenset(("error", *(state.value for state in JobState if state.final)))
"""Names of the last message of a stream."""


async def stream(request: Request) -> ASGIApp:
    """Read a job's messages after an offset (Durable Streams).

    Read the messages of a job. Raises ApiError (400, 404, 410, 503).
    """
    services = services_of(request)
    text, live, seen = _parsed(request)
    after = None if text in (BEGINNING, TAIL) else read(text)
    record = await own_record(request)
    if request.method == "HEAD":
        page = await tail(services, record)
        return Response(headers=_headers(page) | _UNCACHED, media_type=_MEDIA_TYPE)
    page = await (tail(services, record) if text == TAIL else page_after(services, record, after))
    if live == "sse":
        headers = {"Content-Type": "text/event-stream", "X-Accel-Buffering": "no", **_REVALIDATED, **_SAFETY}
        return EventStream(services, _events(services, page, seen), headers | job_headers(record), PING)
    if not live:
        return _catch_up(request, page, text)
    if not page.messages and not page.closed:
        page = await _next_page(request, services, page)
    headers = _headers(page) | _UNCACHED
    if not page.closed:
        headers["Stream-Cursor"] = str(live_cursor(seen))
    return _json(page.messages, headers) if page.messages else Response(status_code=204, headers=headers)


def _parsed(request: Request) -> tuple[str, str, int | None]:
    """Return what a client asks for: the offset as it was sent, how to read on, and the last cursor. Raises ApiError
    (400)."""
    query = request.query_params
    for name in ("offset", "live", "cursor"):
        if len(query.getlist(name)) > 1:
            raise errors.invalid_request(f"{name} must be there once.", name)
    text, live = query.get("offset"), value_of(query, "live")
    if live and text is None:
        raise errors.invalid_request("live needs an offset: -1 for the beginning, now for the end.", "offset")
    return BEGINNING if text is None else text, live or "", value_of(query, "stream_cursor")


def _headers(page: Page) -> dict[str, str]:
    """Return the headers that tell a reader where it is."""
    headers = {"Stream-Next-Offset": offset_of(page.next), **job_headers(page.record), **_SAFETY}
    if page.up_to_date:
        headers["Stream-Up-To-Date"] = "true"
    if page.closed:
        headers["Stream-Closed"] = "true"
    return headers


def _catch_up(request: Request, page: Page, start: str) -> Response:
    if start == TAIL:
        return _json((), _headers(page) | _UNCACHED)
    # Of two pages with the same bounds, one may be the last so far and the other not.
    state = ":closed" if page.closed else ":tail" if page.up_to_date else ""
    tag = f'"{page.record.job.id}:{start}:{offset_of(page.next)}{state}"'
    headers = _headers(page) | _REVALIDATED | {"ETag": tag}
    known = [each.strip().removeprefix("W/") for each in request.headers.get("if-none-match", "").split(",")]
    return Response(status_code=304, headers=headers) if tag in known else _json(page.messages, headers)


def _json(messages: Sequence[bytes], headers: dict[str, str]) -> Response:
    return Response(b"[" + b",".join(messages) + b"]", headers=headers, media_type=_MEDIA_TYPE)


async def _pages(services: Services, record: JobRecord, seen: Cursor) -> AsyncGenerator[Page, None]:
    """Yield the messages after a position as they come, to the end of the stream, or until it cannot be read here: the
    reader comes back and is told why."""
    try:
        async for events in job_log(services, record, seen, shown=True):
            kept = [(event, event.id) for event in events if event.id is not None and event.name not in LEFT_OUT]
            if kept:
                event, last = kept[-1]
                messages = [message(each) for each, _ in kept]
                more = len(messages) >= MESSAGES_PER_SLICE  # they may have come at the same time
                yield Page(record, messages, last, up_to_date=not more, closed=event.name in _ENDS)
    except LogBroken:
        return


async def _next_page(request: Request, services: Services, page: Page) -> Page:
    """Wait for the next messages; return the page as it is if none come in time, or the client has left."""
    try:
        async with asyncio.timeout(LONG_POLL_S) as limit:

            def stop() -> None:
                if not limit.expired():
                    limit.reschedule(asyncio.get_running_loop().time())

            with Watched(request.scope["state"]["connection"], stop):
                async with aclosing(_pages(services, page.record, page.next)) as pages:
                    async for found in pages:
                        return found
    except TimeoutError:
        pass
    return page


async def _events(services: Services, page: Page, seen: int | None) -> AsyncGenerator[bytes, None]:
    """Yield what there is and then what comes, each with a `control` event behind it."""
    cursor = live_cursor(seen)
    yield _encoded(page, cursor)
    if page.closed:
        return
    limit_s = asyncio.get_running_loop().time() + SSE_S
    async with aclosing(_pages(services, page.record, page.next)) as pages:
        while True:
            try:
                async with asyncio.timeout_at(limit_s):
                    found = await anext(pages)
            except (TimeoutError, StopAsyncIteration):
                return
            yield _encoded(found, cursor)


def _encoded(page: Page, cursor: int) -> bytes:
    control: dict[str, str | bool] = {"streamNextOffset": offset_of(page.next)}
    if not page.closed:
        control["streamCursor"] = str(cursor)
    if page.up_to_date or page.closed:
        control["upToDate"] = True
    if page.closed:
        control["streamClosed"] = True
    data = b"event: data\ndata:[%b]\n\n" % b",".join(page.messages) if page.messages else b""
    return data + b"event: control\ndata:%b\n\n" % to_json(control)
