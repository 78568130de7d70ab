"""/v1/messages: Anthropic's Messages API. Creates messages, shows and follows them, and counts input tokens.

A message is a job: it waits in the same lanes under the same quotas, and `msg_` with the job's id is its id.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import ClassVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Send

from api.admission import Admitted, services_of
from api.anthropic.answer import PING, SPAN, START, MessageEvents, job_of
from api.anthropic.errors import error_event
from api.chat import JobEndpoint
from api.events import EventStream, HistoryChanged, authors, deltas_of, in_parts, patiently
from api.jobs import job_headers, own_record, result_of
from api.openai import errors
from api.openai.errors import ApiError, from_failure, from_terminal, stream_reset
from api.query import value_of, whole_number
from api.responses import TokenCount
from api.services import Services
from api.stream.reply import STREAM_HEADERS, NumberedFlow, NumberedReply, Reply, stream_url
from streaming.errors import DecodeError, NewerMessage, UnknownJob
from streaming.jobs.codec import Delta, Terminal
from streaming.jobs.records import NEWER, JobRecord
from streaming.jobs.relay import GONE


async def retrieve(request: Request) -> ASGIApp:
    """GET /v1/messages/{id}[?stream=true&starting_after=n]: show the message, or 202 with its job while it has not
    ended; or stream its events, after one that `Last-Event-ID` or `starting_after` names."""
    services, query = services_of(request), request.query_params
    request.path_params["job_id"] = job_of(request.path_params["message_id"])
    record = await own_record(request)
    if record.fault:
        raise from_failure(record.unread)
    if record.job.message is None:
        raise errors.job_not_found()
    seen, after = request.headers.get("last-event-id"), value_of(query, "starting_after")
    accepts, request_id = request.headers.get("accept", ""), request.scope["state"]["request_id"]
    streams = seen or "text/event-stream" in accepts or value_of(query, "stream") == "true"
    if after is None and seen:
        after = whole_number(seen, "Last-Event-ID", 0, 10**15 - 1)
    if not streams:
        errors.refuse_if(after is not None, "starting_after", "needs stream=true")
        return await result_of(request, record)
    headers = STREAM_HEADERS | job_headers(record) | stream_url(record.job.id)
    if request.method == "HEAD":  # its connection takes no other request until the answer is over
        return Response(headers=headers)
    if after is not None:
        if record.has_lost or after // SPAN != record.resets:
            raise errors.cursor_lost()
        services.metrics.stream_resumes.inc()
    rest = _events(services, record, START if after is None else after, request_id)
    return EventStream(services, rest, headers, PING, breaks=True)


async def _events(services: Services, record: JobRecord, after: int, request_id: str) -> AsyncGenerator[bytes, None]:
    """Yield the events of a message after number `after`: the bytes that its first reader got."""
    job_id, events = record.job.id, MessageEvents(record.job, record.resets, after)
    runs = {logged.run for logged in record.runs}
    buffer = services.relay.open(job_id)
    try:
        async with aclosing(deltas_of(services, record, buffer)) as taken:
            async for rows, terminal, _ in taken:
                if not runs.issuperset(found := authors(buffer, rows, terminal)):
                    now = await patiently(lambda: services.job_reader.outline(job_id))
                    if now.resets != record.resets:
                        raise HistoryChanged
                    runs |= found
                async for data in in_parts(services, rows, events.deltas):
                    yield data
                if terminal is not None:
                    yield events.end(terminal)
        if after < events.number:
            return
        error = errors.cursor_lost()
    except HistoryChanged:
        error = stream_reset(record.job)
    except UnknownJob:
        error = from_failure(GONE)
    except (NewerMessage, DecodeError):
        error = from_failure(NEWER)
    except ApiError as told:
        error = told
    services.metrics.count_error(error.code)
    yield error_event(error, request_id)


# --- replies ----------------------------------------------------------------------------------------------------------


class MessageStream(NumberedReply):
    """Streams a new message."""

    ping = PING

    def __init__(self, services: Services, admitted: Admitted) -> None:
        super().__init__(services, admitted)
        self._sequence = MessageEvents(self._job)
        self._flow = NumberedFlow(self._metrics.per_token, self._sequence)

    def _new_renderer(self) -> MessageEvents:
        return self._sequence

    async def _stream(self, send: Send) -> None:
        """As StreamReply. A job that the request has joined may have begun anew, so its events are read as any later
        reader reads them."""
        if not self._admitted.accepted.joined:
            await super()._stream(send)
            return
        services, job_id = self._services, self._buffer.job_id
        services.relay.close(self._buffer)
        record = await patiently(lambda: services.job_reader.outline(job_id))
        if record.terminal is not None and not record.completed:
            await self._send_error(send, from_terminal(record.terminal))
            return
        self._start()
        events = _events(services, record, START, self._request_id)
        await self._writer.write_events(events, services.settings.keep_alive_s, PING)

    def _render(self, rows: list[Delta], terminal: Terminal | None) -> bytes:
        """As StreamReply; a long time of thinking that is not shown is told by pings."""
        data, now = super()._render(rows, terminal), time.monotonic()
        if not data and now - self._pinged_s >= self._services.settings.keep_alive_s:
            data = PING
        self._pinged_s = now if data else self._pinged_s
        return data

    def _error_event(self, error: ApiError) -> bytes:
        self._services.metrics.count_error(error.code)
        return error_event(error, self._request_id)


class MessageCount(TokenCount):
    """Sends the number of a request's input tokens."""

    head: ClassVar[dict[str, str]] = {}


class Messages(JobEndpoint):
    """POST /v1/messages."""

    streamed: type[Reply] = MessageStream


class TokenCounts(Messages):
    """POST /v1/messages/count_tokens, whose answer is whole and waited for whatever its client asks for."""

    streamed = whole = MessageCount
    queues = False
