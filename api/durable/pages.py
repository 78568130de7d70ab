"""Pages of a job's stream: reads the messages after an offset from the store, as it stands, without waiting.

The messages are the job's events as /v1/jobs/{id}/events has them, without those whose bytes would not be the same in
every replay: `queued`, `queue.position` and `interrupted` tell the present state, `started` the name of a worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from api.durable.offsets import StreamOffset
from api.jobs import facts_of, view_of
from api.openai import cursor, errors
from api.openai.cursor import Cursor, Place
from api.openai.job_errors import from_failure
from api.openai.job_events import JobEvent, delta_event, reset_event, terminal_event
from api.openai.rendering import to_json
from api.openai.tool_calls import CallParts
from api.services import Services
from penstock.loops import Sliced
from streaming.errors import NewerMessage
from streaming.jobs.codec import Delta, Run, Section, author
from streaming.jobs.history import NOTHING
from streaming.jobs.records import NEWER, JobRecord, was_cut_short

MAX_MESSAGES = 1_000
"""Messages on a page."""
MESSAGES_PER_SLICE = 200
"""Messages rendered before the event loop runs other tasks: a few milliseconds."""
LEFT_OUT = frozenset(("queued", "queue.position", "started", "interrupted"))


class Page(NamedTuple):
    """The messages after a position."""

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


async def page_after(services: Services, record: JobRecord, offset: StreamOffset | None) -> Page:
    """Read the messages after `offset`; None: from the first one that is kept. If the job is in a later epoch, a reset
    and the messages of that one.

    Raises ApiError (410 if the log has no such offset; an offset may be forged, so a read never begins an epoch; 503),
    UnknownJob, Unavailable.
    """
    log = await _StoredLog.read(services, record)
    if offset is None:
        return await log.page(Place(), Cursor(log.record.epoch, cursor.START))
    if offset.epoch > log.record.epoch:
        raise errors.offset_gone()
    seen = offset.cursor(log.runs)
    place = log.place(seen)
    if place is not None:
        return await log.page(place, seen)
    if seen.epoch == log.record.epoch:
        raise errors.offset_gone()
    reset = reset_event(log.record.epoch)
    return await log.page(Place(), Cursor(log.record.epoch, cursor.START), [message(reset)])


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
        if record.rowless:
            record = await reader.ended(job_id)
        assert record.terminal is not None
        return cls(services, record, record.terminal.rows, record.terminal.sections)

    @property
    def runs(self) -> list[Run]:
        return _runs(self.record)

    @property
    def last(self) -> Cursor:
        """The cursor of the last message."""
        if self.record.terminal is not None:
            return cursor.end(self.record.epoch, self.runs, self.record.terminal)
        return self._cursor(self.rows[-1]) if self.rows else Cursor(self.record.epoch, cursor.START)

    def place(self, seen: Cursor) -> Place | None:
        """Return the position after a cursor; None if the log does not have the messages up to it."""
        place = cursor.resume(seen, self.record)
        if place is None or place.over or not place.runs:
            return place
        if not 0 < place.after <= len(self.rows):
            return None
        return place if author(self.sections, place.after) == place.runs[-1] else None

    async def page(self, place: Place, seen: Cursor, before: Sequence[bytes] = ()) -> Page:
        """Render the messages after `place`, which is the position after `seen`, behind those of `before`."""
        first = len(self.rows) if place.over else min(place.after, len(self.rows))
        end_of_page = min(first + MAX_MESSAGES, len(self.rows))
        work, size = self._rendered(first, end_of_page), end_of_page if self.record.job.parted else end_of_page - first
        found = [*before, *await self.services.store_client.turns.run(work, size)]
        last = self._cursor(self.rows[end_of_page - 1]) if end_of_page > first else seen
        all_rows = end_of_page == len(self.rows)
        closed = self.record.state.final and all_rows
        if closed and not place.over:
            end = terminal_event(await view_of(self.services, self.record))
            assert end.id is not None
            found, last = [*found, message(end)], end.id
        return Page(self.record, found, last, up_to_date=all_rows, closed=closed)

    def _rendered(self, first: int, end: int) -> Sliced[list[bytes]]:
        """Render the deltas at these places. Those before them are read, too, where calls may have begun in them."""
        facts, found = facts_of(self.services, self.record), list[bytes]()
        parts = CallParts() if self.record.job.parted else None
        for place in range(0 if parts is not None else first, end):
            row = self.rows[place]
            called = parts.of(row) if parts is not None else None
            if place >= first:
                found.append(message(delta_event(facts, self._cursor(row), row, called)))
            if place % MESSAGES_PER_SLICE == 0:
                yield
        return found

    def _cursor(self, row: Delta) -> Cursor:
        """Return the cursor of a delta. Raises ApiError (410) if the record does not name the run that wrote it."""
        run, runs = author(self.sections, row.seq), self.runs
        if run is None or run not in runs:
            raise errors.offset_gone()
        return cursor.delta(self.record.epoch, runs.index(run) + 1, row.seq, run)


def _runs(record: JobRecord) -> list[Run]:
    return [logged.run for logged in record.runs]
