"""/v1/responses: create responses, retrieve, follow, cancel and delete them, list their input, count input tokens.

A response is a job: it waits in the same lanes under the same quotas, and `resp_` with the job's id is its id.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import ClassVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from api.admission import Admitted, accept, caller_of, idempotency_key, prepare, read_body, read_request, services_of
from api.auth.keys import Caller
from api.chat import JobEndpoint
from api.conversations import add_turn, context_of, find, items_page, own_items
from api.events import EventStream, HistoryChanged, authors, deltas_of, in_parts, patiently
from api.jobs import as_json, job_headers, wait_for_end
from api.openai import errors
from api.openai.errors import ApiError, from_failure, from_terminal, stream_reset
from api.openai.rendering import Facts, to_json
from api.openai.responses.items import job_of, response_id
from api.openai.responses.object import QUEUED, RUNNING, START, EventSequence, ended_response, form_of, response_object
from api.openai.responses.request import Context, InputFields, ResponseRequest
from api.openai.results import answer_in_slices, count_of
from api.query import value_of
from api.services import Services
from api.stream.reply import PING, STREAM_HEADERS, NumberedFlow, NumberedReply, WholeReply, body_message, stream_url
from streaming.errors import DecodeError, NewerMessage, StreamingError, Unavailable, UnknownJob
from streaming.jobs.codec import Delta, Run, Terminal, decode_draft
from streaming.jobs.job import JobState
from streaming.jobs.records import NEWER, JobRecord
from streaming.jobs.relay import GONE

CANCEL_WAIT_S = 5.0
"""How long a cancel waits for the worker to stop: a running job ends within an engine step."""
DELETE_WAIT_S = 10.0


class Responses(JobEndpoint):
    """POST /v1/responses and /v1/responses/input_tokens."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with a response, whole, streamed or queued. Raises ApiError before the answer starts."""
        services: Services = scope["app"].state.services
        caller: Caller = scope["state"]["caller"]
        body = await read_body(scope, receive, services.body_limit)
        asked = read_request(services, scope["state"], self._kind, body)
        refusal: ApiError | None = None
        assert isinstance(asked, InputFields)
        try:
            asked.within(await context_of(services, scope, asked))
        except ApiError as error:
            if not idempotency_key(scope):
                raise
            # A repeated request gets its response, also if what it refers to was deleted meanwhile.
            refusal = error
            asked.within(Context(previous=job_of(asked.previous_response_id or "")))
        queued = isinstance(asked, ResponseRequest) and bool(asked.background) and not asked.stream
        prepared = prepare(services, caller, asked, waits=not queued)
        admitted = await accept(services, scope, prepared, body, waits=not queued, refusal=refusal)
        await (await _reply(services, admitted, asked, queued=queued))(scope, receive, send)


async def _reply(services: Services, admitted: Admitted, asked: InputFields, *, queued: bool) -> ASGIApp:
    if not isinstance(asked, ResponseRequest):
        return TokenCount(services, admitted)
    if queued:
        services.relay.close(admitted.buffer)
        if admitted.accepted.joined:  # it may have ended; no failing read denies the acceptance
            with contextlib.suppress(StreamingError):
                return await shown(services, await services.job_reader.outline(admitted.accepted.id), admitted.headers)
        status = RUNNING.get(admitted.accepted.state, QUEUED)
        return as_json(response_object(Facts(admitted.job, admitted.created_ms), status), headers=admitted.headers)
    return (ResponseStream if asked.stream else WholeResponse)(services, admitted)


async def retrieve(request: Request) -> ASGIApp:
    """Show a response, or stream its events after one.

    GET /v1/responses/{id}[?stream=true&starting_after=n]: show the response, or stream its events after one.
    """
    services, query = services_of(request), request.query_params
    streams, after = value_of(query, "stream") == "true", value_of(query, "starting_after")
    if after is not None and not streams:
        raise errors.invalid_request("starting_after needs stream=true.", "starting_after")
    record = await own_response(request)
    if not streams:
        return await shown(services, record)
    headers = job_headers(record) | stream_url(record.job.id)
    if request.method == "HEAD":  # its connection takes no other request until the answer is over
        return Response(headers=headers, media_type="text/event-stream")
    if after is not None:
        if record.has_lost:
            raise errors.cursor_lost()
        services.metrics.stream_resumes.inc()
    reader = ResponseReader(services, record, START if after is None else after)
    return EventStream(services, reader.events(), STREAM_HEADERS | headers, PING, breaks=True)


async def shown(services: Services, record: JobRecord, headers: dict[str, str] | None = None) -> Response:
    """Build the answer that shows a response as it stands. `headers`: None names its job alone."""
    facts, headers = Facts(record.job, record.created_ms), headers or job_headers(record)
    if record.terminal is None:
        return as_json(response_object(facts, RUNNING[record.state]), headers=headers)
    record = await services.job_reader.with_rows(record)
    assert record.terminal is not None
    rows = record.terminal.rows
    work = ended_response(facts, record.terminal, rows, record.drafts)
    return as_json(await services.store_client.turns.run(work, len(rows)), headers=headers)


async def cancel(request: Request) -> Response:
    """Cancel a response in the background.

    POST /v1/responses/{id}/cancel: cancel a response in the background. Idempotent; returns its final object.
    """
    services, record = services_of(request), await own_response(request)
    if not form_of(record.job).background:
        message = "Only a response created with background can be cancelled: close the connection of any other."
        raise errors.invalid_request(message, "response_id")
    return await shown(services, await _stopped(request, record, CANCEL_WAIT_S))


async def _stopped(request: Request, record: JobRecord, wait_s: float) -> JobRecord:
    """Cancel a response unless it has ended, and return its record, once it has ended or after `wait_s`."""
    services = services_of(request)
    if record.state.final:
        return record
    await services.queue.cancel(record.job.id)
    return await wait_for_end(request, record.job, wait_s)


async def delete(request: Request) -> Response:
    """Delete a response.

    DELETE /v1/responses/{id}: delete the response and its job; one that has not ended is cancelled first.
    """
    services, record = services_of(request), await own_response(request)
    record = await _stopped(request, record, DELETE_WAIT_S)
    if not record.state.final:
        raise errors.response_still_ends()
    if conversation := form_of(record.job).conversation:
        await add_turn(services, record.job.tenant, conversation)
    await services.queue.shorten_retention([record.job.id], 0, [record.job.id] if record.job.media else ())
    return as_json({"id": response_id(record.job.id), "object": "response", "deleted": True})


async def listing(request: Request) -> Response:
    """List the input of a response.

    GET /v1/responses/{id}/input_items[?after=&limit=&order=]: list the items of the response's own input.
    """
    after = request.query_params.get("after")
    items = own_items(await own_response(request))
    places = {item["id"]: place for place, item in enumerate(items)}
    if after is not None and after not in places:
        raise errors.invalid_request("after names no input item of this response.", "after")
    return items_page(request, [(places[item["id"]], item["id"], item) for item in items], places.get(after or ""))


async def own_response(request: Request) -> JobRecord:
    """Return the record of the response in the path, if the caller owns it. Raises ApiError (404)."""
    named = request.path_params["response_id"]
    record = await find(services_of(request), caller_of(request).tenant, job_of(named))
    if record is None:
        raise errors.response_not_found()
    request.scope["state"]["job"] = record.job.id
    return record


# --- their events -----------------------------------------------------------------------------------------------------


class ResponseReader:
    """Renders the events after number `after` for one reader.

    The bytes are those that the first reader got. If the engine starts the text again meanwhile, the reader renders
    the text that was given up, too, from the job's record.

    Args:
        live: events up to `after` were rendered here for the same reader, so the store must still have them.
        measure: gets the deltas as they arrive.
    """

    def __init__(
        self,
        services: Services,
        record: JobRecord,
        after: int,
        *,
        live: bool = False,
        measure: Callable[[Sequence[Delta]], None] = lambda rows: None,
    ) -> None:
        self._services, self._record, self._measure = services, record, measure
        self._live = live
        self._sequence = EventSequence(Facts(record.job, record.created_ms), after)
        self.ended: Terminal | None = None
        """How the response ended, once the last event was rendered."""

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the rest of the sequence; b"" where there is nothing to write."""
        try:
            while True:
                drafts = len(self._record.drafts)
                try:
                    async with aclosing(self._from_start()) as rendered:
                        async for data in rendered:
                            yield data
                    return
                except HistoryChanged:
                    await self._read_again()
                if len(self._record.drafts) == drafts:
                    self._services.metrics.stream_resets.inc()
                    yield self._sequence.fail(stream_reset(self._record.job))
                    return
                self._live = True
                self._sequence = EventSequence(Facts(self._record.job, self._record.created_ms), self._sequence.has)
        except UnknownJob:
            yield self._sequence.fail(from_failure(GONE))
        except (NewerMessage, DecodeError):
            yield self._sequence.fail(from_failure(NEWER))

    async def _from_start(self) -> AsyncGenerator[bytes, None]:
        """Render the whole sequence; what the reader has is counted and not yielded. Raises HistoryChanged if another
        text was given up meanwhile, or the store has no longer what the reader has."""
        services, sequence, record, had = self._services, self._sequence, self._record, self._sequence.has
        yield sequence.opening() + (sequence.running() if record.state is JobState.RUNNING else b"")
        for draft in map(decode_draft, record.drafts):
            async for data in in_parts(services, draft.rows, sequence.deltas):
                yield data
            yield sequence.begin_again()
        if self._live and record.drafts and sequence.number - 1 < had:
            raise HistoryChanged  # the draft lacks what the reader has of it
        buffer, runs = services.relay.open(record.job.id), {logged.run for logged in record.runs}
        async with aclosing(deltas_of(services, record, buffer)) as taken:
            async for rows, terminal, seen in taken:
                if not runs.issuperset(authors(buffer, rows, terminal)):
                    runs |= await self._read_again()
                if len(self._record.drafts) > len(record.drafts):
                    raise HistoryChanged
                if rows:
                    self._measure(rows)
                async for data in in_parts(services, rows, sequence.deltas):
                    yield data
                if terminal is not None:
                    self.ended, rest = terminal, sequence.end(terminal)
                    yield rest if had < sequence.number else sequence.fail(errors.cursor_lost())
                elif seen.state is JobState.RUNNING:
                    yield sequence.running()

    async def _read_again(self) -> set[Run]:
        """Read the record again; return the runs that it names."""
        job_id = self._record.job.id
        self._record = await patiently(lambda: self._services.job_reader.outline(job_id))
        return {logged.run for logged in self._record.runs}


# --- replies to the request that created a response -------------------------------------------------------------------


FORGET_AFTER_S = 60
"""How long the job of a response that is not stored is kept after its answer, for a retry with its idempotency key."""


async def forget(services: Services, admitted: Admitted) -> None:
    """Let the job of a response that has ended and is not stored expire soon."""
    form = admitted.job.response
    if form is not None and not form.store:
        # If this fails, it expires with the retention of jobs, and is not shown until then.
        with contextlib.suppress(Unavailable, ApiError):
            if form.conversation:
                await add_turn(services, admitted.job.tenant, form.conversation)
            await services.queue.shorten_retention([admitted.accepted.id], FORGET_AFTER_S)


class ResponseStream(NumberedReply):
    """Streams a new response. Its id goes out at once, before a worker has the job.

    Nearly every token takes the fast path. Where the engine may have to start again (JSON), and once the job's history
    has changed, the events come from a ResponseReader.
    """

    def __init__(self, services: Services, admitted: Admitted) -> None:
        super().__init__(services, admitted)
        self._events = EventSequence(self._facts)
        self._flow = NumberedFlow(self._metrics.per_token, self._events)

    def _new_renderer(self) -> EventSequence:
        return self._events

    def _check(self) -> None:
        if self._buffer.rewound:
            raise HistoryChanged
        super()._check()

    async def _stream(self, send: Send) -> None:
        self._unwritten = self._events.opening()
        self._start()
        from_store = self._job.constrained
        if not from_store:
            try:
                await super()._stream(send)
            except HistoryChanged:
                from_store = True
        if from_store:
            await self._stream_from_store()
        await forget(self._services, self._admitted)

    async def _stream_from_store(self) -> None:
        """Write the rest of the events from the store."""
        services = self._services
        data, self._unwritten = self._unwritten, b""
        await self._writer.write(data, more=True)
        services.relay.close(self._buffer)
        keep_alive_s = services.settings.keep_alive_s
        await self._writer.write_events(self._rest(), keep_alive_s, PING, on_written=self._note_first_sent)
        self._delivery.last_got = self._delivery.last_sent = time.monotonic()

    async def _rest(self) -> AsyncGenerator[bytes, None]:
        services, job_id = self._services, self._buffer.job_id
        try:
            record = await patiently(lambda: services.job_reader.outline(job_id))
        except UnknownJob:
            yield self._events.fail(from_failure(GONE))
            return
        reader = ResponseReader(services, record, self._events.has, live=True, measure=self._measure)
        async with aclosing(reader.events()) as events:
            async for data in events:
                yield data
        self._buffer.terminal = reader.ended

    async def _fail(self, send: Send, error: ApiError) -> None:
        self._services.metrics.count_error(error.code)
        await send(body_message(self._events.fail(error), more=False))


class WholeResponse(WholeReply):
    """Sends the object of a new response once it has ended."""

    async def _whole(self, terminal: Terminal, rows: list[Delta]) -> bytes:
        services, drafts = self._services, tuple[bytes, ...]()
        if self._job.constrained:  # its engine may have started again
            with contextlib.suppress(UnknownJob):
                drafts = (await patiently(lambda: services.job_reader.outline(terminal.job))).drafts
        work = answer_in_slices(self._facts, terminal, rows, drafts)
        body = to_json(await services.store_client.turns.run(work, len(rows)))
        await forget(services, self._admitted)
        return body


class TokenCount(WholeReply):
    """Sends the number of a request's input tokens, as the engine counted them or told their ids."""

    head: ClassVar[dict[str, str]] = {"object": "response.input_tokens"}

    async def _whole(self, terminal: Terminal, rows: list[Delta]) -> bytes:
        if terminal.state is not JobState.COMPLETED:
            raise from_terminal(terminal)
        count = terminal.usage.prompt if self._job.task is None else count_of("".join([row.text for row in rows]))
        return to_json({**self.head, "input_tokens": count})
