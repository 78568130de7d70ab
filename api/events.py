"""GET /v1/jobs/{id}/events: a job's life as server-sent events with ids, to be resumed behind any of them.

Served by sse-starlette: its cost per event does not matter here, its care for disconnects does.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.requests import Request

from api.admission import services_of
from api.jobs import facts_of, job_headers, own_record, view_of
from api.render import Event, delta_event, event_id, queued_event, read_event_id, started_event, terminal_event
from api.services import Services
from streaming.journal import Record
from streaming.messages import State

LOOK_EVERY_S = 0.5
"""How often a waiting job's place in the lane is looked up."""


async def events(request: Request) -> EventSourceResponse:
    """From the beginning, or behind `Last-Event-ID` (or ?after=), to the job's end."""
    services, record = services_of(request), await own_record(request)
    cursor = request.headers.get("last-event-id") or request.query_params.get("after")
    epoch, after = read_event_id(cursor) if cursor else (record.epoch, 0)
    if after:
        services.metrics.stream_resumes.inc()
    return EventSourceResponse(
        _encoded(_events(services, record, epoch, after)),
        headers={"Cache-Control": "no-cache"} | job_headers(record),
        ping=int(services.settings.keep_alive_s) or 1,
        ping_message_factory=lambda: ServerSentEvent(data="{}", event="ping"),
        sep="\n",
        send_timeout=services.settings.send_timeout_s,
    )


async def _encoded(stream: AsyncIterator[Event]) -> AsyncIterator[bytes]:
    async for event in stream:
        yield event.encode()


async def _events(services: Services, record: Record, epoch: int, after: int) -> AsyncIterator[Event]:
    """Everything behind `after`; from the start again, and saying so, where the store has lost what a reader saw."""
    if epoch != record.epoch or after > await _head(services, record, after):
        yield _reset(record)
        after = 0
    async for event in _before_start(services, record, after):
        yield event
    while True:
        async for event in _tokens(services, record, after):
            yield event
        again = await services.journal.record(record.job.id)
        if again.state.final and again.epoch == record.epoch:
            break
        record, after = again, 0
        yield _reset(record)
    yield terminal_event(await view_of(services, again))


def _reset(record: Record) -> Event:
    """What the reader has seen is not what is stored: say so, never splice."""
    return Event("stream.reset", event_id(record.epoch, 0), {"epoch": record.epoch})


async def _tokens(services: Services, record: Record, after: int) -> AsyncIterator[Event]:
    """Deltas until the job's end, or until the store is found to have lost some of them."""
    inbox = services.relay.open(record.job.id, after)
    inbox.accepted = True
    facts = facts_of(services, record)
    try:
        await services.relay.follow(inbox)
        while not inbox.rewound:
            rows, terminal = await inbox.take(services.settings.keep_alive_s)
            for row in rows:
                yield delta_event(facts, record.epoch, row)
            if terminal is not None:
                return
    finally:
        services.relay.close(inbox)


async def _before_start(services: Services, record: Record, after: int) -> AsyncIterator[Event]:
    """`queued` whenever the place in the lane changes, then `started`."""
    inbox = services.relay.open(record.job.id, whole=True)
    position: int | None = None
    try:
        while record.state is State.QUEUED:
            view = await view_of(services, record)
            if view.position != position:
                position = view.position
                yield queued_event(view, after)
            began = time.monotonic()
            await inbox.take(LOOK_EVERY_S)
            if time.monotonic() - began < LOOK_EVERY_S and inbox.terminal is not None:
                return
            record = await services.journal.record(record.job.id)
    finally:
        services.relay.close(inbox)
    if record.started_ms:
        yield started_event(await view_of(services, record, deep=False), record.worker, after)


async def _head(services: Services, record: Record, after: int) -> int:
    """The number of the last stored delta; only looked up for a reader who claims to have seen some."""
    if not after:
        return 0
    if record.terminal is not None:
        return record.terminal.seq
    rows = await services.journal.deltas(record)
    return rows[-1].seq if rows else 0
