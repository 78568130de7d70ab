"""GET /v1/jobs/{id}/events: streams a job's events (queued, started, tokens, end) as resumable server-sent events.

The events form a log (api/openai/cursor.py). A reader that reconnects with its cursor gets exactly the events after
it, or `stream.reset` and the log of a new epoch. `queue.position`, `interrupted` and `ping` are not in the log and have
no id.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from api.admission import services_of
from api.jobs import job_headers, own_record, waiting_of
from api.openai import cursor, job_events
from api.openai.cursor import Cursor, ResumePoint
from api.openai.errors import ApiError, from_failure
from api.openai.job_events import JobEvent
from api.openai.rendering import CallParts, Waiting, counted
from api.services import Services
from api.stream.reply import STREAM_HEADERS, ClientGone, PacedWriter, body_message, start_message, stream_url
from penstock.engine import Failure
from penstock.loops import ExpectedErrors, retry
from streaming.errors import NewerMessage, Unavailable, UnknownJob
from streaming.jobs.codec import Delta, Run, Terminal
from streaming.jobs.job import JobState
from streaming.jobs.records import MALFORMED, NEWER, Interruption, JobRecord, was_cut_short
from streaming.jobs.relay import GONE, ReorderBuffer

log = logging.getLogger(__name__)

T = TypeVar("T")

RESET_DELAY_S = 0.1
"""Delay before a reader gets the log of a new epoch, so that a log that changes constantly cannot spin."""
ROWS_PER_WRITE = 200
"""Deltas rendered and written before the event loop runs other tasks: a few milliseconds."""
PING = b"event: ping\ndata: {}\n\n"
POSITION_INTERVAL_S = 0.5
"""Interval between look-ups of a job that waits: its position in its lane, and whether a worker has begun it."""
STORE_RETRY_DELAY_S = 0.5
"""Delay before a read of a store that did not answer is tried again."""


EXPIRED = Failure(
    "events_expired", "The job has ended, and its retention passed before all of its events were taken.", 410
)


class HistoryChanged(Exception):
    """Raised when the job's history no longer holds what the reader already has."""


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


async def deltas_of(
    services: Services, record: JobRecord, buffer: ReorderBuffer
) -> AsyncGenerator[tuple[Sequence[Delta], Terminal | None, JobRecord], None]:
    """Yield the deltas of a job's log behind what a new buffer has, as they come, and at last the end with them. A job
    that waits and has no deltas is looked at every POSITION_INTERVAL_S: each time, its record comes without deltas.
    Closes the buffer. Raises HistoryChanged, UnknownJob, NewerMessage."""
    buffer.accepted = True
    keep_alive_s = services.settings.keep_alive_s
    try:
        await patiently(lambda: services.relay.subscribe(buffer, record.job))
        waits = record.state is JobState.QUEUED and not buffer.seq
        terminal: Terminal | None = None
        while terminal is None:
            rows, terminal = await buffer.take(POSITION_INTERVAL_S if waits else keep_alive_s)
            if buffer.rewound:
                raise HistoryChanged
            if waits and not rows and terminal is None:
                record = await patiently(partial(services.job_reader.again, record))
            waits = waits and not rows and record.state is JobState.QUEUED
            failure = terminal.failure if terminal is not None else None
            yield rows, None if failure in (GONE, NEWER) else terminal, record
            if failure is GONE:
                raise UnknownJob(buffer.job_id)
            if failure is NEWER:
                raise NewerMessage(b"")
    finally:
        services.relay.close(buffer)


def authors(buffer: ReorderBuffer, rows: Sequence[Delta], terminal: Terminal | None) -> set[Run]:
    """Return the runs that wrote these deltas, and with the end all that wrote the text."""
    found = {buffer.author(row.seq) for row in rows}
    sections = terminal.sections if terminal is not None else ()
    return {run for run in found if run is not None} | {section.run for section in sections}


def is_waiting(record: JobRecord) -> bool:
    """Whether a job waits for its first worker."""
    return record.state is JobState.QUEUED and not record.runs


async def in_parts(
    services: Services, rows: Sequence[Delta], render: Callable[[Sequence[Delta]], T], most: int = ROWS_PER_WRITE
) -> AsyncIterator[T]:
    """Render deltas in parts of at most so many, so that a long list does not block the event loop."""
    for first in range(0, len(rows), most):
        part = rows[first : first + most]
        async with services.store_client.turns if len(part) == most else contextlib.nullcontext():
            rendered = render(part)
        yield rendered


class EventStream:
    """ASGI response: server-sent events at the reader's pace, and `ping` while there are none.

    When this process ends, the stream ends; if it `breaks`, without its last chunk, so that its reader cannot take what
    it has for the whole.
    """

    def __init__(
        self,
        services: Services,
        events: AsyncGenerator[bytes, None],
        headers: Mapping[str, str],
        ping: bytes,
        *,
        breaks: bool = False,
    ) -> None:
        self._services, self._events, self._headers = services, events, dict(headers)
        self._ping, self._breaks = ping, breaks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream."""
        state, settings, streams = scope["state"], self._services.settings, self._services.metrics.open_streams
        writer = PacedWriter(state["server_send"], state["connection"], settings.send_timeout_s)
        streams.inc()
        try:
            await send(start_message(200, self._headers))
            await writer.write_events(self._events, settings.keep_alive_s, self._ping)
        except (ClientGone, OSError):
            pass
        except asyncio.CancelledError:  # drain_s is over
            if self._breaks:
                writer.cut_off()
                raise
            await state["server_send"](body_message(b"", more=False))
        finally:
            streams.dec()


async def events(request: Request) -> ASGIApp:
    """Follow a job, from its start or after an event.

    Stream from the beginning, or after `Last-Event-ID` (or ?after=), to the job's end.
    """
    services, record = services_of(request), await own_record(request)
    header, after = request.headers.get("last-event-id"), request.query_params.get("after")
    seen = cursor.read(header) if header else None if after is None else cursor.read(after, "after")
    headers = STREAM_HEADERS | job_headers(record) | stream_url(record.job.id)
    if request.method == "HEAD":  # its connection takes no other request until the answer is over
        return Response(headers=headers)
    if seen is not None and seen.number:
        services.metrics.stream_resumes.inc()
    return EventStream(services, _encoded(job_log(services, record, seen)), headers, PING)


async def _encoded(stream: AsyncIterator[Iterable[JobEvent]]) -> AsyncGenerator[bytes, None]:
    """Encode events, those that come together as one write: a write each would cost more than the events."""
    try:
        async for rendered in stream:
            yield b"".join([event.encode() for event in rendered])
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
    point = cursor.resume(seen, record) if seen else ResumePoint()
    while True:
        if point is None:
            try:
                record = await (_new_epoch if shown else _outline)(services, record)
            except UnknownJob:
                raise LogBroken(_lost(record)) from None
            services.metrics.stream_resets.inc()
            yield [job_events.reset_event(record.epoch)]
            point, shown = ResumePoint(), True
        try:
            async for rendered in EventReader(services, record, point).events():
                yield rendered
                shown = shown or any(event.id is not None for event in rendered)
            return
        except HistoryChanged:
            point = None
            await asyncio.sleep(RESET_DELAY_S)


async def _outline(services: Services, record: JobRecord) -> JobRecord:
    """Return the job's record as it is now."""
    return await patiently(lambda: services.job_reader.outline(record.job.id))


def _lost(record: JobRecord) -> JobEvent:
    """Return the last event of a job that the store lost."""
    terminal = Terminal(record.job.id, JobState.FAILED, 0, failure=GONE)
    return job_events.terminal_event(dataclasses.replace(record, state=JobState.FAILED, terminal=terminal))


async def _new_epoch(services: Services, record: JobRecord) -> JobRecord:
    """Return the job's record in a later epoch than `record`, in which no event id names an event of this one."""
    known = await _outline(services, record)
    if known.epoch != record.epoch:
        return known
    await patiently(lambda: services.queue.reset(known.job.id, known.resets))
    return await _outline(services, known)


class EventReader:
    """Reads the event log of one job for one reader, within one epoch."""

    def __init__(self, services: Services, record: JobRecord, point: ResumePoint) -> None:
        self._services, self._record, self._point = services, record, point
        self._runs = [logged.run for logged in record.runs]
        self._started = len(point.runs)
        """How many runs the reader has the `started` event of."""
        self._seq = point.after
        """Number of the last delta that the reader has."""
        self._parts = CallParts() if record.job.parted else None
        self._buffer: ReorderBuffer | None = None
        self._position: int | None = None
        """The job's position in the queue, as the reader was told."""

    async def events(self) -> AsyncIterator[Iterable[JobEvent]]:
        """Yield the rest of the log. Raises HistoryChanged, LogBroken."""
        if self._point.over:
            return
        try:
            if not self._point.queued:
                waiting = await self._waiting(self._record)
                self._position = waiting.before
                yield [job_events.queued_event(self._record.epoch, waiting)]
            if looked := await self._look(self._record):
                yield looked
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
        terminal = self._buffer.terminal if self._buffer is not None else None
        try:
            record = await _outline(self._services, self._record)
        except UnknownJob:
            if terminal is None:
                raise
            return dataclasses.replace(self._record, state=terminal.state, terminal=terminal)
        if not record.state.final or record.epoch != self._record.epoch:
            raise HistoryChanged
        if record.rowless and terminal is not None and terminal.failure is MALFORMED:
            return dataclasses.replace(record, terminal=terminal)  # its rows cannot be read
        return record

    async def _waiting(self, record: JobRecord) -> Waiting:
        position = await patiently(lambda: self._services.job_reader.position(record, POSITION_INTERVAL_S))
        return await waiting_of(self._services, record, position)

    async def _look(self, seen: JobRecord) -> list[JobEvent]:
        """Render what is new of a job that the reader has no start of: its queue position, or its first start."""
        if self._started:
            return []
        if is_waiting(seen):
            waiting = await self._waiting(seen)
            if waiting.before == self._position:
                return []
            self._position = waiting.before
            return [job_events.position_event(waiting)]
        return list(self._starts(seen, 1)) if seen.runs and seen.epoch == self._record.epoch else []

    async def _deltas(self) -> AsyncIterator[Iterable[JobEvent]]:
        """Yield the deltas of each run, after its `started`, until the job's end."""
        services, point = self._services, self._point
        if self._parts is not None:  # what a delta of calls means depends on those before it, so they are read again
            point = ResumePoint()
        buffer = self._buffer = services.relay.open(self._record.job.id, point.after, runs=point.runs)
        interruption: Interruption | None = None
        async with contextlib.aclosing(deltas_of(services, self._record, buffer)) as taken:
            async for rows, terminal, seen in taken:
                if not rows and terminal is None and (looked := await self._look(seen)):
                    yield looked
                if not {buffer.author(row.seq) for row in rows}.issubset(self._runs):  # another worker has started it
                    record = await _outline(services, self._record)
                    if record.epoch != self._record.epoch:
                        raise HistoryChanged
                    self._record, self._runs = record, [logged.run for logged in record.runs]
                most = 1 if self._record.job.echo else ROWS_PER_WRITE  # one may have a prompt's log-probabilities
                async for rendered in in_parts(services, rows, lambda part: list(self._deltas_of(part, buffer)), most):
                    yield rendered
                if buffer.interruption != interruption and terminal is None:
                    interruption = buffer.interruption
                    if interruption is not None and interruption.ordinal >= self._started:  # no later run has begun
                        yield [job_events.interrupted_event(interruption.attempt)]

    def _deltas_of(self, rows: Sequence[Delta], buffer: ReorderBuffer) -> Iterator[JobEvent]:
        """Yield the events of deltas, with `started` where a new run begins. Raises HistoryChanged."""
        facts = self._services.facts(self._record.job, self._record.created_ms)
        for row in rows:
            run = buffer.author(row.seq)
            if run is None or run not in self._runs:
                raise HistoryChanged
            parts = None if self._parts is None else self._parts.of(row)
            if row.seq <= self._point.after:  # the reader has it
                if run not in self._point.runs:
                    raise HistoryChanged
                continue
            ordinal = self._runs.index(run) + 1
            yield from self._starts(self._record, ordinal)
            self._seq = row.seq
            yield job_events.delta_event(facts, cursor.delta(self._record.epoch, ordinal, row.seq, run), row, parts)

    def _starts(self, record: JobRecord, last_ordinal: int) -> Iterator[JobEvent]:
        """Yield `started` for every run up to this one that the reader does not have yet."""
        for ordinal in range(self._started + 1, last_ordinal + 1):
            run = record.runs[ordinal - 1].run
            self._started = ordinal
            yield job_events.started_event(cursor.started(record.epoch, ordinal, self._seq + 1, run), ordinal, record)

    def _error(self, error: ApiError) -> JobEvent:
        """Return the last event of a log that cannot be read to its end."""
        return JobEvent("error", None, counted(error, self._services.metrics.count_error))

    def _lost(self) -> JobEvent:
        """Return the last event of this job, which the store lost. If it had ended, the outcome is unknown."""
        if self._buffer is not None and self._buffer.over:
            return self._error(from_failure(EXPIRED))
        return _lost(self._record)
