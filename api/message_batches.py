"""/v1/messages/batches: batches of Anthropic's Messages API, on the machinery of all batches."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from api.admission import caller_of, receive_body, services_of
from api.anthropic.batches import ENDPOINT, batch_of, input_lines, message_batch_object, results
from api.batches import accept_batch, check_key, command_batch, own_batch
from api.jobs import as_json
from api.openai import errors
from api.openai.batch_lines import BatchRequest, blocks
from api.query import value_of
from streaming.batches.store import BatchRecord
from streaming.errors import UnknownBatch

PER_CALL = 100


async def create(request: Request) -> Response:
    """POST /v1/messages/batches: accept the batch durably and return it."""
    services, caller = services_of(request), caller_of(request)
    check_key(caller)
    body = bytes(await receive_body(request.scope, request.receive, services.settings.body_limit))
    lines = await asyncio.to_thread(input_lines, body, services.batch_settings.max_lines)
    if services.refusal:
        raise errors.store_full(services.refusal)
    asked = BatchRequest(input_file_id=services.files.new_id(caller.tenant), endpoint=ENDPOINT)
    return as_json(message_batch_object(await accept_batch(request, asked, body, lines)))


async def listing(request: Request) -> Response:
    """GET /v1/messages/batches[?before_id=|after_id=&limit=]: list the caller's batches of messages, newest first."""
    services, caller, query = services_of(request), caller_of(request), request.query_params
    limit, name = value_of(query, "batch_limit") or 20, "before_id" if "before_id" in query else "after_id"
    errors.refuse_if(name != "after_id" and "after_id" in query, name, "excludes after_id")
    place, more, found = batch_of(query[name]) if name in query else None, True, list[BatchRecord]()
    while more and len(found) <= limit:
        try:
            page = await services.batches.recent(caller.tenant, place, PER_CALL, newest_first=name == "after_id")
        except UnknownBatch:
            raise errors.invalid_request(f"{name} names no batch of yours.", name) from None
        found += [record for record in page if _is_of_messages(record)]
        place, more = page[-1].batch.id if page else place, bool(page)
    data = [message_batch_object(record) for record in found[:limit]][:: 1 if name == "after_id" else -1]
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
    return as_json({"data": data, "has_more": len(found) > limit, **ends})


async def show(request: Request) -> Response:
    """GET /v1/messages/batches/{id}: show the batch."""
    return as_json(message_batch_object(await _own(request)))


async def cancel(request: Request) -> Response:
    """POST /v1/messages/batches/{id}/cancel: cancel the batch; finished requests keep their results. Idempotent."""
    return as_json(message_batch_object(await command_batch(request, await _own(request), "cancel")))


async def result_lines(request: Request) -> Response:
    """GET /v1/messages/batches/{id}/results: stream the results of a batch that has ended."""
    services, record = services_of(request), await _own(request)
    if not record.state.final:
        raise errors.invalid_request("The batch has not ended: its results come when processing_status is 'ended'.")
    if record.progress.faults:
        raise errors.invalid_request(record.progress.faults[0].message)
    names = [name for name in (record.progress.output_file, record.progress.error_file) if name]
    paths = [services.file_store.path(name) for name in names]
    if not all(await asyncio.to_thread(lambda: [path.exists() for path in paths])):
        raise errors.file_not_found()
    return StreamingResponse(blocks(results(paths)), media_type="application/x-jsonl")


async def delete(request: Request) -> Response:
    """DELETE /v1/messages/batches/{id}: delete a batch that has ended, with its results."""
    services, record = services_of(request), await _own(request)
    if not record.state.final:
        raise errors.batch_not_commanded("be deleted", record.state.value)
    for name in filter(None, (record.progress.output_file, record.progress.error_file)):
        await asyncio.to_thread(services.file_store.remove, name)
        await services.files.forget(name, record.batch.tenant)
    await services.batches.forget(record.batch.id, record.batch.tenant)
    return as_json({"id": request.path_params["message_batch_id"], "type": "message_batch_deleted"})


async def _own(request: Request) -> BatchRecord:
    """Return the batch in the path, if it is one of messages and the caller's. Raises UnknownBatch (404)."""
    request.path_params["batch_id"] = batch_of(request.path_params["message_batch_id"])
    record = await own_batch(request)
    if not _is_of_messages(record):
        raise UnknownBatch(record.batch.id)
    return record


def _is_of_messages(record: BatchRecord) -> bool:
    """Whether it is a batch of messages, and no schedule, which this API has not."""
    return record.batch.endpoint == ENDPOINT and not record.batch.cron
