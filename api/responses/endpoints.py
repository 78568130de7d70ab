"""/v1/responses: create responses, retrieve, follow, cancel and delete them, list their input, count input tokens.

A response is a job: it waits in the same lanes under the same quotas, and `resp_` with the job's id is its id.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from api.admission import Admitted, accept, caller_of, idempotency_key, prepare, read_body, read_request, services_of
from api.auth.keys import Caller
from api.jobs import as_json, as_page, job_headers, wait_for_end
from api.openai import errors
from api.openai.errors import ApiError
from api.openai.rendering import Facts
from api.openai.responses.events import START
from api.openai.responses.items import job_of, response_id
from api.openai.responses.object import RUNNING, ended_response, form_of, response_object
from api.openai.responses.request import Context, InputFields, ResponseRequest
from api.openai.schemas import Kind
from api.query import value_of
from api.responses.replies import Follower, ResponseStream, StoredStream, TokenCount, WholeResponse
from api.responses.stored import add_turn, context_of, find, own_items
from api.services import Services
from api.stream.writer import stream_url
from streaming.errors import StreamingError
from streaming.jobs.records import JobRecord

CANCEL_WAIT_S = 5.0
"""How long a cancel waits for the worker to stop: a running job ends within an engine step."""
DELETE_WAIT_S = 10.0


class Responses:
    """POST /v1/responses and /v1/responses/input_tokens, as plain ASGI like the chat endpoint."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with a response, whole, streamed or queued. Raises ApiError before the answer starts."""
        services: Services = scope["app"].state.services
        caller: Caller = scope["state"]["caller"]
        body = await read_body(scope, receive, services.settings.body_limit)
        asked = read_request(services, scope["state"], self._kind, body)
        refusal: ApiError | None = None
        assert isinstance(asked, InputFields)
        try:
            asked.within(await context_of(services, caller, asked))
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
        status = RUNNING.get(admitted.accepted.state, "queued")
        return as_json(response_object(Facts(admitted.job, admitted.created_ms), status), headers=admitted.headers)
    return (ResponseStream if asked.stream else WholeResponse)(services, admitted)


async def retrieve(request: Request) -> ASGIApp:
    """GET /v1/responses/{id}[?stream=true&starting_after=n]: show the response, or stream its events after one."""
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
    follower = Follower(services, record, START if after is None else after)
    return StoredStream(services, follower, headers)


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
    """POST /v1/responses/{id}/cancel: cancel a response in the background. Idempotent; returns its final object."""
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
    return await wait_for_end(request, record.job.id, wait_s)


async def delete(request: Request) -> Response:
    """DELETE /v1/responses/{id}: delete the response and its job; one that has not ended is cancelled first."""
    services, record = services_of(request), await own_response(request)
    record = await _stopped(request, record, DELETE_WAIT_S)
    if not record.state.final:
        raise errors.response_still_ends()
    if conversation := form_of(record.job).conversation:
        await add_turn(services, record.job.tenant, conversation)
    await services.queue.shorten_retention([record.job.id], 0)
    return as_json({"id": response_id(record.job.id), "object": "response", "deleted": True})


async def listing(request: Request) -> Response:
    """GET /v1/responses/{id}/input_items[?after=&limit=&order=]: list the items of the response's own input."""
    after = request.query_params.get("after")
    items = own_items(await own_response(request))
    places = {item["id"]: place for place, item in enumerate(items)}
    if after is not None and after not in places:
        raise errors.invalid_request("after names no input item of this response.", "after")
    return items_page(request, [(places[item["id"]], item["id"], item) for item in items], places.get(after or ""))


def items_page(request: Request, items: Sequence[tuple[int, str, Any]], after: int | None) -> Response:
    """Build the page that the query asks for, of items in ascending order, each with its number and id. `after`: the
    number of the item that the page continues after. Raises ApiError (400)."""
    query = request.query_params
    limit, oldest_first = value_of(query, "limit") or 20, value_of(query, "order") == "asc"
    if after is not None:
        items = [each for each in items if (each[0] > after if oldest_first else each[0] < after)]
    ordered = items if oldest_first else items[::-1]
    return as_page({item_id: shown for _, item_id, shown in ordered[:limit]}, has_more=limit < len(items))


async def own_response(request: Request) -> JobRecord:
    """Return the record of the response in the path, if the caller owns it. Raises ApiError (404)."""
    named = request.path_params["response_id"]
    record = await find(services_of(request), caller_of(request).tenant, job_of(named))
    if record is None:
        raise errors.response_not_found()
    request.scope["state"]["job"] = record.job.id
    return record
