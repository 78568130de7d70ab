"""GET /v1/jobs/{id}/events: streams a job's events (queued, started, tokens, end) as resumable server-sent events.

The events form a log (api/openai/cursor.py). A reader that reconnects with its cursor gets exactly the events after
it, or `stream.reset` and the log of a new epoch. `queue.position`, `interrupted` and `ping` are not in the log and have
no id.

sse-starlette serves the stream: here its handling of disconnects matters more than its cost per event.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TypeVar

from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from api.admission import services_of
from api.jobs import job_headers, own_record, waiting_of
from api.openai import cursor, job_events
from api.openai.cursor import Cursor, Place
from api.openai.errors import ApiError, from_failure
from api.openai.job_events import JobEvent
from api.openai.rendering import CallParts, counted
from api.services import Services
from api.stream.writer import Watched, stream_url
from penstock.engine import Failure
from penstock.loops import ExpectedErrors, retry
from streaming.errors import NewerMessage, Unavailable, UnknownJob
from streaming.jobs.codec import Delta, Terminal
from streaming.jobs.job import JobState
from streaming.jobs.places import QueuePlace
from streaming.jobs.records import MALFORMED, NEWER, Interruption, JobRecord, was_cut_short
from streaming.jobs.relay import GONE
from streaming.jobs.reorder_buffer import ReorderBuffer

log = logging.getLogger(__name__)

T = TypeVar("T")

RESET_DELAY_S = 0.1
"""Delay before a reader gets the log of a new epoch, so that a log that changes constantly cannot spin."""
ROWS_PER_WRITE = 200
"""Deltas rendered and written before the event loop runs other tasks: a few milliseconds."""
DRAIN_MARGIN_S = 1.0
"""How long before the end of drain_s an open stream ends by itself: the server then cuts what is left."""
POSITION_INTERVAL_S = 0.5
"""Interval between look-ups of a waiting job's place in its lane."""
STORE_RETRY_DELAY_S = 0.5
"""Delay before a read of a store that did not answer is tried again."""


EXPIRED = Failure(
    "events_expired", "The job has ended, and its retention passed before all of its events were taken.", 410
)


class HistoryChanged(Exception):
    """Raised when the job's history no longer holds deltas that the reader already has."""


class LogBroken(Exception):
    """Raised where this process cannot read a log to its end. `event` tells that to the reader of /events."""

    def __init__(self, event: JobEvent) -> None:
        super().__init__(event.name)
        self.event = event


async def patiently(read: Callable[[], Awaitable[T]]) -> T:
    """Return what `read` returns, once the store answers. The response has begun and can no longer be refused, so its
    reader waits (pings go on). `read` must be safe to repeat."""
    # The relay of this process logs that the store is away, once for all readers.
    expected = ExpectedErrors(Unavailable, log.debug, "a reader of events waits for the store: %s")
    return await retry(read, expected, itertools.repeat(STORE_RETRY_DELAY_S))


async def events(request: Request) -> Response:
    """Stream from the beginning, or after `Last-Event-ID` (or ?after=), to the job's end."""
    services, record = services_of(request), await own_record(request)
    header, after = request.headers.get("last-event-id"), request.query_params.get("after")
    seen = cursor.read(header) if header else None if after is None else cursor.read(after, "after")
    headers = {"Cache-Control": "no-cache"} | job_headers(record) | stream_url(record.job.id)
    if request.method == "HEAD":  # its connection takes no other request until the answer is over
        return Response(headers=headers, media_type="text/event-stream")
    if seen is not None and seen.number:
        services.metrics.stream_resumes.inc()
    ping = ServerSentEvent(data="{}", event="ping")
    return event_stream(request, _encoded(job_log(services, record, seen)), headers, ping)


def event_stream(
    request: Request, encoded: AsyncIterator[bytes], headers: dict[str, str], ping: ServerSentEvent
) -> EventSourceResponse:
    """Return the answer that streams these events, and `ping` while there are none."""
    services = services_of(request)
    response = EventSourceResponse(
        _while_there(request.scope, encoded),
        headers=headers,
        ping=int(services.settings.keep_alive_s) or 1,
        ping_message_factory=lambda: ping,
        sep="\n",
        send_timeout=services.settings.send_timeout_s,
        shutdown_grace_period=max(0.0, services.settings.drain_s - DRAIN_MARGIN_S),
    )
    del response.headers["connection"]  # the server says whether the connection is kept
    return response


async def _while_there(scope: Scope, encoded: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Stop once the client has left. Its cancellation alone does not end a stream that is always busy, as anyio cancels
    only a task that waits: of 2,000 who came back at once, those who had left kept the others waiting (F31)."""
    with Watched(scope) as client:
        async for data in encoded:
            if client.lost:
                return
            yield data


async def _encoded(stream: AsyncIterator[Iterable[JobEvent]]) -> AsyncIterator[bytes]:
    """Encode events, those that come together as one write: a write each would cost more than the events."""
    try:
        async for rendered in stream:
            if data := b"".join([event.encode() for event in rendered]):
                yield data
    except LogBroken as broken:
        yield broken.event.encode()


async def job_log(
    services: Services, record: JobRecord, seen: Cursor | None, *, shown: bool = False
) -> AsyncIterator[Iterable[JobEvent]]:
    """Yield every event after a cursor; if the store has not those that the reader has, a reset and all events.

    Only the loss of events that this process has shown begins a new epoch of the job. A cursor may be forged, so what
    a reader says that it has changes nothing: no event of the new text has the id of one of the old text, because
    another run wrote it. Raises LogBroken.

    Args:
        shown: This process has read the events up to `seen` from the log.
    """
    place = cursor.resume(seen, record) if seen else Place()
    while True:
        if place is None:
            record = await (_new_epoch if shown else _outline)(services, record)
            services.metrics.stream_resets.inc()
            yield [job_events.reset_event(record.epoch)]
            place, shown = Place(), True
        try:
            async for rendered in EventReader(services, record, place).events():
                yield rendered
                shown = shown or any(event.id is not None for event in rendered)
            return
        except HistoryChanged:
            place = None
            await asyncio.sleep(RESET_DELAY_S)


async def _outline(services: Services, record: JobRecord) -> JobRecord:
    """Return the job's record as it is now."""
    return await patiently(lambda: services.job_reader.outline(record.job.id))


async def _new_epoch(services: Services, record: JobRecord) -> JobRecord:
    """Return the job's record in a later epoch than `record`, in which no event id names an event of this one."""
    known = await _outline(services, record)
    if known.epoch != record.epoch:
        return known
    await patiently(lambda: services.queue.reset(known.job.id, known.resets))
    return await _outline(services, known)


class EventReader:
    """Reads the event log of one job for one reader, within one epoch."""

    def __init__(self, services: Services, record: JobRecord, place: Place) -> None:
        self._services, self._record, self._place = services, record, place
        self._runs = [logged.run for logged in record.runs]
        self._started = len(place.runs)
        """How many runs the reader has the `started` event of."""
        self._seq, self._last = place.after, place.runs
        """Number of the last delta that the reader has, and the runs up to the one that wrote it."""
        self._parts = CallParts() if record.job.parted else None
        self._ended: Terminal | None = None
        """The terminal record, once the buffer has delivered it."""
        self._had_ended = False
        """The job had ended before the store forgot it."""

    async def events(self) -> AsyncIterator[Iterable[JobEvent]]:
        """Yield the rest of the log. Raises HistoryChanged, LogBroken."""
        if self._place.over:
            return
        try:
            async for rendered in self._before_start():
                yield rendered
            async for rendered in self._deltas():
                yield rendered
            record = await self._at_end()
            if was_cut_short(record):  # its tokens could not be read
                raise NewerMessage(b"")
            yield [*self._starts(record, len(record.runs)), job_events.terminal_event(record)]
        except UnknownJob:
            raise LogBroken(self._lost()) from None
        except NewerMessage:
            raise LogBroken(self._error(from_failure(NEWER))) from None

    async def _at_end(self) -> JobRecord:
        """Return the record of the ended job. If its retention passed meanwhile, use the terminal record that the
        buffer delivered. Raises UnknownJob, HistoryChanged."""
        terminal = self._ended
        try:
            record = await _outline(self._services, self._record)
        except UnknownJob:
            if terminal is None or terminal.failure is GONE:
                raise
            return dataclasses.replace(self._record, state=terminal.state, terminal=terminal)
        if not record.state.final or record.epoch != self._record.epoch:
            raise HistoryChanged
        if record.rowless and terminal is not None and terminal.failure is MALFORMED:
            return dataclasses.replace(record, terminal=terminal)  # its rows cannot be read
        return record

    async def _before_start(self) -> AsyncIterator[Iterable[JobEvent]]:
        """Yield `queued`, `queue.position` whenever it changes, and the first `started`."""
        services, record = self._services, self._record
        position: int | None = None
        if not self._place.queued:
            place = await self._queue_place(record)
            position = place.before
            yield [job_events.queued_event(record.epoch, await waiting_of(services, record, place))]
        buffer = services.relay.open(record.job.id, rowless=True)
        try:
            while record.state is JobState.QUEUED and not record.runs:
                waiting = await waiting_of(services, record, await self._queue_place(record))
                if waiting.position != position:
                    position = waiting.position
                    yield [job_events.position_event(waiting)]
                started_s = time.monotonic()
                await buffer.take(POSITION_INTERVAL_S)
                if time.monotonic() - started_s < POSITION_INTERVAL_S and buffer.terminal is not None:
                    return
                record = await patiently(partial(services.job_reader.again, record))
        finally:
            services.relay.close(buffer)
        if not self._started and record.runs and record.epoch == self._record.epoch:
            yield list(self._starts(record, 1))

    async def _queue_place(self, record: JobRecord) -> QueuePlace:
        return await patiently(lambda: self._services.job_reader.place(record, POSITION_INTERVAL_S))

    async def _deltas(self) -> AsyncIterator[Iterable[JobEvent]]:
        """Yield the deltas of each run, after its `started`, until the job's end."""
        services, place = self._services, self._place
        if self._parts is not None:  # what a delta of calls means depends on those before it, so they are read again
            place = Place()
        buffer = services.relay.open(self._record.job.id, place.after, runs=place.runs)
        buffer.accepted = True
        try:
            await patiently(lambda: services.relay.follow(buffer))
            interruption: Interruption | None = None
            while True:
                rows, terminal = await buffer.take(services.settings.keep_alive_s)
                if buffer.rewound:
                    raise HistoryChanged
                async for rendered in self._rendered(rows, buffer):
                    yield rendered
                if buffer.interruption != interruption and terminal is None:
                    interruption = buffer.interruption
                    if interruption is not None and interruption.place >= self._started:  # no later run has begun
                        yield [job_events.interrupted_event(interruption.attempt)]
                if terminal is not None:
                    if terminal.failure is NEWER:
                        raise NewerMessage(b"")
                    self._ended, self._had_ended = terminal, buffer.over
                    return
        finally:
            services.relay.close(buffer)

    async def _rendered(self, rows: Sequence[Delta], buffer: ReorderBuffer) -> AsyncIterator[Iterable[JobEvent]]:
        """Render the events of these deltas, in parts, so that a long list does not block the event loop."""
        for first in range(0, len(rows), ROWS_PER_WRITE):
            part = rows[first : first + ROWS_PER_WRITE]
            authors = {buffer.author(row.seq) for row in part}
            if not authors.issubset(self._runs):  # another worker has started the job
                record = await _outline(self._services, self._record)
                if record.epoch != self._record.epoch:
                    raise HistoryChanged
                self._record, self._runs = record, [logged.run for logged in record.runs]
            async with self._services.store_client.turns if len(part) == ROWS_PER_WRITE else contextlib.nullcontext():
                rendered = list(self._deltas_of(part, buffer))
            yield rendered

    def _deltas_of(self, rows: Sequence[Delta], buffer: ReorderBuffer) -> Iterator[JobEvent]:
        """Yield the events of deltas, with `started` where a new run begins. Raises HistoryChanged."""
        facts = self._services.facts(self._record.job, self._record.created_ms)
        for row in rows:
            run = buffer.author(row.seq)
            if run is None or run not in self._runs:
                raise HistoryChanged
            parts = None if self._parts is None else self._parts.of(row)
            if row.seq <= self._place.after:  # the reader has it
                if run not in self._place.runs:
                    raise HistoryChanged
                continue
            place = self._runs.index(run) + 1
            yield from self._starts(self._record, place)
            self._seq, self._last = row.seq, (run,)
            yield job_events.delta_event(facts, cursor.delta(self._record.epoch, place, row.seq, run), row, parts)

    def _starts(self, record: JobRecord, last_place: int) -> Iterator[JobEvent]:
        """Yield `started` for every run up to this one that the reader does not have yet."""
        for place in range(self._started + 1, last_place + 1):
            run = record.runs[place - 1].run
            self._started = place
            yield job_events.started_event(cursor.started(record.epoch, place, self._seq + 1, run), place, record)

    def _error(self, error: ApiError) -> JobEvent:
        """Return the last event of a log that cannot be read to its end."""
        return JobEvent("error", None, counted(error, self._services.metrics.count_error))

    def _lost(self) -> JobEvent:
        """Return the last event of a job that the store lost. Of one that had ended, the outcome is unknown."""
        if self._had_ended:
            return self._error(from_failure(EXPIRED))
        terminal = Terminal(self._record.job.id, JobState.FAILED, 0, failure=GONE)
        lost = dataclasses.replace(self._record, state=JobState.FAILED, terminal=terminal)
        return job_events.terminal_event(lost)
