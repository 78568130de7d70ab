"""GET /v1/jobs/{id}/events: a job's life as server-sent events with ids, to be resumed behind any of them.

The events are a log (api/openai/cursor.py): a reader who comes back gets exactly the events behind its cursor, or
`stream.reset` and the log of a new epoch. `queue.position` and `ping` are no part of the log and have no id.

Served by sse-starlette: its cost per event does not matter here, its care for disconnects does.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence

from msgspec.structs import replace
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.requests import Request

from api.admission import services_of
from api.jobs import facts_of, job_headers, own_record, view_of
from api.openai import cursor
from api.openai.cursor import Cursor, Place
from api.openai.job_errors import from_failure
from api.openai.rendering import (
    JobEvent,
    delta_event,
    position_event,
    queued_event,
    reset_event,
    started_event,
    terminal_event,
)
from api.services import Services
from streaming.errors import NewerMessage, UnknownJob
from streaming.jobs.frames import Delta
from streaming.jobs.history import History
from streaming.jobs.job import JobState
from streaming.jobs.records import MALFORMED, NEWER, JobRecord
from streaming.jobs.relay import GONE
from streaming.jobs.reorder_buffer import ReorderBuffer
from streaming.jobs.terminal import Failure, Terminal

RESET_PAUSE_S = 0.1
"""Before a reader is given the log of a new epoch: whatever changes all the time is not told all the time."""
ROWS_AT_ONCE = 200
"""Deltas told, and written together, before the event loop has its turn: a few milliseconds."""
LOOK_EVERY_S = 0.5
"""How often a waiting job's place in the lane is looked up."""


EXPIRED = Failure(
    "events_expired", "The job has ended, and its retention passed before all of its events were taken.", 410
)


class HistoryChanged(Exception):
    """Raised when what a reader was shown is not in the job's history any more."""


async def events(request: Request) -> EventSourceResponse:
    """From the beginning, or behind `Last-Event-ID` (or ?after=), to the job's end."""
    services, record = services_of(request), await own_record(request)
    text = request.headers.get("last-event-id") or request.query_params.get("after")
    seen = cursor.read(text) if text else None
    if seen is not None and seen.number:
        services.metrics.stream_resumes.inc()
    return EventSourceResponse(
        _joined(_events(services, record, seen)),
        headers={"Cache-Control": "no-cache"} | job_headers(record),
        ping=int(services.settings.keep_alive_s) or 1,
        ping_message_factory=lambda: ServerSentEvent(data="{}", event="ping"),
        sep="\n",
        send_timeout=services.settings.send_timeout_s,
    )


async def _joined(stream: AsyncIterator[Iterable[JobEvent]]) -> AsyncIterator[bytes]:
    """One write for all that comes together: for many deltas a write each would cost more than they do."""
    async for told in stream:
        if data := b"".join([event.encode() for event in told]):
            yield data


async def _events(services: Services, record: JobRecord, seen: Cursor | None) -> AsyncIterator[Iterable[JobEvent]]:
    """Everything behind a cursor; from the start again, and saying so, where the store has lost what a reader saw."""
    place = cursor.resume(seen, record) if seen else Place()
    while True:
        if place is None:
            record = await _new_epoch(services, record, seen)
            yield [reset_event(record.epoch)]
            seen, place = Cursor(record.epoch, cursor.START), Place()
        try:
            async for told in EventReader(services, record, place).events():
                yield told
            return
        except HistoryChanged:
            seen, place = Cursor(record.epoch, cursor.START), None
            await asyncio.sleep(RESET_PAUSE_S)


async def _new_epoch(services: Services, record: JobRecord, seen: Cursor | None) -> JobRecord:
    """The job's record in a later epoch than its reader's: no event id is used for two things. An id without a run, of
    an earlier version, is none of this log's: other readers need not begin anew for it."""
    record = await services.journal.outline(record.job.id)
    if seen is None or (seen.run and seen.epoch == record.epoch):
        await services.queue.reset(record.job.id, record.resets)
        record = await services.journal.outline(record.job.id)
    return record


class EventReader:
    """One reader's way through the log of a job's events, within one epoch."""

    def __init__(self, services: Services, record: JobRecord, place: Place) -> None:
        self._services, self._record, self._place = services, record, place
        self._runs = [logged.run for logged in record.runs]
        self._started = len(place.runs)
        """How many of them were told of."""
        self._seq, self._last = place.after, place.runs
        """The last delta that was told, and the runs of which the last one wrote it."""
        self._ended: Terminal | None = None
        """The end, once it was heard."""
        self._over = False
        """The end was announced before the store forgot the job."""

    async def events(self) -> AsyncIterator[Iterable[JobEvent]]:
        """The rest of the log, or why this process cannot tell it. Raises HistoryChanged."""
        try:
            async for told in self._events():
                yield told
        except UnknownJob:
            yield [await self._lost()]
        except NewerMessage:
            yield [JobEvent("error", None, from_failure(NEWER).body)]

    async def _events(self) -> AsyncIterator[Iterable[JobEvent]]:
        if self._place.over:
            return
        async for told in self._before_start():
            yield told
        terminal = self._record.terminal
        if not _was_cut_short(self._record):
            async for told in self._deltas():
                yield told
            terminal = self._ended
        record = await self._at_end(terminal)
        if _was_cut_short(record):
            async for told in self._logged(record):
                yield told
        yield [*self._starts(record, len(record.runs)), terminal_event(await view_of(self._services, record))]

    async def _at_end(self, terminal: Terminal | None) -> JobRecord:
        """The record of the job that has ended. Where its retention has passed while the reader was taking its events,
        its end is told by what was heard. Raises UnknownJob, HistoryChanged."""
        try:
            record = await self._services.journal.outline(self._record.job.id)
        except UnknownJob:
            if terminal is None or terminal.failure is GONE:
                raise
            return dataclasses.replace(self._record, state=terminal.state, terminal=terminal)
        if not record.state.final or record.epoch != self._record.epoch:
            raise HistoryChanged
        if record.rowless and terminal is not None and terminal.failure is MALFORMED:
            return dataclasses.replace(record, terminal=terminal)  # its summary alone can be read
        return record

    async def _before_start(self) -> AsyncIterator[Iterable[JobEvent]]:
        """`queued`, the place in the lane whenever it changes, and the first `started`."""
        services, record = self._services, self._record
        position: int | None = None
        if not self._place.queued:
            position = await services.journal.position(record, LOOK_EVERY_S)
            yield [queued_event(await view_of(services, record, position=position))]
        inbox = services.relay.open(record.job.id, rowless=True)
        try:
            while record.state is JobState.QUEUED and not record.runs:
                now = await services.journal.position(record, LOOK_EVERY_S)
                view = await view_of(services, record, position=now)
                if view.position != position:
                    position = view.position
                    yield [position_event(view)]
                began = time.monotonic()
                await inbox.take(LOOK_EVERY_S)
                if time.monotonic() - began < LOOK_EVERY_S and inbox.terminal is not None:
                    return
                record = await services.journal.again(record)
        finally:
            services.relay.close(inbox)
        if not self._started and record.runs and record.epoch == self._record.epoch:
            yield list(self._starts(record, 1))

    async def _deltas(self) -> AsyncIterator[Iterable[JobEvent]]:
        """Deltas, each run's behind its `started`, until the job's end."""
        services, place = self._services, self._place
        inbox = services.relay.open(self._record.job.id, place.after, runs=place.runs)
        inbox.accepted = True
        try:
            await services.relay.follow(inbox)
            while True:
                rows, terminal = await inbox.take(services.settings.keep_alive_s)
                if inbox.rewound:
                    raise HistoryChanged
                async for told in self._told(rows, inbox):
                    yield told
                if terminal is not None and terminal.failure is NEWER:
                    raise NewerMessage(b"")
                if terminal is not None:
                    self._ended, self._over = terminal, inbox.over
                    return
        finally:
            services.relay.close(inbox)

    async def _logged(self, record: JobRecord) -> AsyncIterator[Iterable[JobEvent]]:
        """The rest of the deltas of a job that was cut short, from its log, as far as it is there."""
        assert record.terminal is not None
        history = await self._services.journal.history(record.job.id, record.runs)
        inbox = ReorderBuffer(record.job.id, self._seq, runs=self._last)
        inbox.end(_with_history(record.terminal, history))
        if inbox.rewound:
            raise HistoryChanged
        self._record, self._runs = record, [logged.run for logged in record.runs]
        rows, _ = await inbox.take(0)
        async for told in self._told(rows, inbox):
            yield told

    async def _told(self, rows: Sequence[Delta], inbox: ReorderBuffer) -> AsyncIterator[Iterable[JobEvent]]:
        """The events of these deltas. Of very many, others have their turn in between."""
        for first in range(0, len(rows), ROWS_AT_ONCE):
            part = rows[first : first + ROWS_AT_ONCE]
            authors = {inbox.author(row.seq) for row in part}
            if not authors.issubset(self._runs):
                await self._look_again()
            if len(part) < ROWS_AT_ONCE:
                yield list(self._deltas_of(part, inbox))
                continue
            async with self._services.wire.turns:
                told = list(self._deltas_of(part, inbox))
            yield told

    def _deltas_of(self, rows: Sequence[Delta], inbox: ReorderBuffer) -> Iterator[JobEvent]:
        """Raises HistoryChanged."""
        facts = facts_of(self._services, self._record)
        for row in rows:
            run = inbox.author(row.seq)
            if run is None or run not in self._runs:
                raise HistoryChanged
            place = self._runs.index(run) + 1
            yield from self._starts(self._record, place)
            self._seq, self._last = row.seq, (run,)
            yield delta_event(facts, cursor.delta(self._record.epoch, place, row.seq, run), row)

    async def _look_again(self) -> None:
        """Another worker has begun the job."""
        record = await self._services.journal.outline(self._record.job.id)
        if record.epoch != self._record.epoch:
            raise HistoryChanged
        self._record, self._runs = record, [logged.run for logged in record.runs]

    def _starts(self, record: JobRecord, upto: int) -> Iterator[JobEvent]:
        """`started` of every run up to this one that was not told of."""
        for place in range(self._started + 1, upto + 1):
            run = record.runs[place - 1].run
            self._started = place
            yield started_event(cursor.started(record.epoch, place, self._seq + 1, run), run.worker, place)

    async def _lost(self) -> JobEvent:
        """The end of a job that the store does not know any more. Of one that had ended nobody can say how."""
        if self._over:
            return JobEvent("error", None, from_failure(EXPIRED).body)
        terminal = Terminal(self._record.job.id, JobState.FAILED, 0, failure=GONE)
        lost = dataclasses.replace(self._record, state=JobState.FAILED, terminal=terminal)
        return terminal_event(await view_of(self._services, lost))


def _was_cut_short(record: JobRecord) -> bool:
    """Whether a script ended a job that a worker had begun: no result is stored, its deltas are in the log alone."""
    return record.terminal is not None and not record.terminal.sections and bool(record.runs)


def _with_history(terminal: Terminal, history: History) -> Terminal:
    """A terminal without a result, with what its job's log still holds."""
    rows = tuple(history.rows) if history.whole else ()
    return replace(terminal, seq=len(rows), sections=history.sections if rows else (), rows=rows)
