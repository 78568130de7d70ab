"""/v1/batches: hand a file of requests over, look at it, steer it, read what it gives while it runs.

Nothing is computed here, and no line is read: the offline processes do that.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Iterator
from functools import partial
from typing import Any

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse

from api.admission import caller_of, idempotency_key, read_body, services_of, withdraw
from api.auth.keys import Caller
from api.files import listed
from api.jobs import as_json
from api.openai import errors
from api.openai.batch_outputs import so_far
from api.openai.batch_schemas import WINDOWS, BatchRequest
from api.openai.rendering import usage_object
from api.openai.schemas import read_object
from api.openai.validation import explained
from api.query import page_limit
from api.services import Services
from streaming.batches.batch import Batch, BatchState, LineFault
from streaming.batches.ledger import LineOutcome
from streaming.batches.store import BatchCommand, BatchRecord
from streaming.errors import KeyReused, QuotaExceeded, Unavailable, UnknownBatch, UnknownFile

MAX_PER_PAGE = 100


async def create(request: Request) -> Response:
    """POST /v1/batches: the batch, which is kept from now on."""
    services, caller = services_of(request), caller_of(request)
    body = await read_body(request.scope, request.receive, services.settings.body_limit)
    asked = _asked(body)
    if services.refusal:
        raise errors.store_full(services.refusal)
    key = idempotency_key(request.scope)
    batch = _batch(services, caller, asked, services.batches.new_id(caller.tenant, key))
    most = services.quotas(caller).file_bytes
    used = 0 if most is None else await services.kept.file_bytes(caller.tenant)
    if most is not None and used >= most and not (key and await _is_known(services, batch)):
        raise errors.quota_exceeded(QuotaExceeded("file_bytes", used, most))
    input_bytes = 0
    try:
        input_bytes = (await services.files.get(asked.input_file_id, caller.tenant)).size
        await asyncio.to_thread(services.shelf.begin_work, batch.id, asked.input_file_id)
    except (UnknownFile, FileNotFoundError):
        if not key or not await _is_known(services, batch):  # else the file was deleted since
            raise errors.invalid_request("input_file_id names no file of yours.", "input_file_id") from None
    try:
        record = await services.batches.create(batch, hashlib.sha256(body).hexdigest(), most, input_bytes)
    except KeyReused:
        await _take_back(services, batch)
        raise errors.idempotency_key_reused() from None
    except QuotaExceeded as error:
        await _take_back(services, batch)
        if not key:  # else others may be creating it right now
            await asyncio.to_thread(services.shelf.end_work, batch.id)
        raise errors.quota_exceeded(error) from None
    except Unavailable:
        if key:  # it may have been accepted: the client's next try finds it
            raise errors.acceptance_unknown() from None
        services.spawn(withdraw(partial(services.batches.steer, batch.id, "cancel")))  # nobody would ever find it
        raise
    if record.state.final:  # the key led to a batch that has ended
        await asyncio.to_thread(services.shelf.end_work, batch.id)
    return as_json(batch_object(record))


async def _take_back(services: Services, batch: Batch) -> None:
    """Remove what a refused request left in the folder of the batch its key leads to."""
    with contextlib.suppress(UnknownBatch, Unavailable):
        there = await services.batches.get(batch.id, batch.tenant)
        if there.state.final:
            await asyncio.to_thread(services.shelf.end_work, batch.id)
        else:
            used = there.batch.input_file
            await asyncio.to_thread(services.shelf.take_back, batch.id, batch.input_file, used)


def _asked(body: bytes) -> BatchRequest:
    try:
        return BatchRequest.model_validate(read_object(body))
    except ValidationError as error:
        raise explained(error) from None


def _batch(services: Services, caller: Caller, asked: BatchRequest, batch_id: str) -> Batch:
    window = asked.completion_window or "none"
    expiry = asked.output_expires_after
    tokens = caller.batch_tokens
    return Batch(
        id=batch_id,
        tenant=caller.tenant,
        ceiling=caller.ceiling,
        endpoint=asked.endpoint,
        input_file=asked.input_file_id,
        window=window,
        window_ms=WINDOWS[window],
        output_keep_ms=1000 * (expiry.seconds if expiry else services.files_settings.retention_s),
        metadata=asked.metadata or {},
        events=services.wanted.of_batches(caller.tenant),
        token_limit=tokens if tokens is not None else services.batch_settings.enqueued_tokens,
    )


async def _is_known(services: Services, batch: Batch) -> bool:
    try:
        await services.batches.get(batch.id, batch.tenant)
    except UnknownBatch:
        return False
    return True


async def listing(request: Request) -> Response:
    """GET /v1/batches[?after=&limit=]: the caller's, newest first."""
    services, caller, query = services_of(request), caller_of(request), request.query_params
    limit = page_limit(query, 20, MAX_PER_PAGE)
    try:
        after = await services.batches.get(query["after"], caller.tenant) if "after" in query else None
    except UnknownBatch:
        raise errors.invalid_request("after names no batch of yours.", "after") from None
    found = await services.batches.recent(caller.tenant, after, limit + 1)
    return as_json(listed([batch_object(record) for record in found], limit))


async def show(request: Request) -> Response:
    """GET /v1/batches/{id}."""
    return as_json(batch_object(await own_batch(request)))


async def cancel(request: Request) -> Response:
    """POST /v1/batches/{id}/cancel: finished lines are kept. Idempotent while it is being cancelled."""
    return await _steer(request, "cancel")


async def pause(request: Request) -> Response:
    """POST /v1/batches/{id}/pause: no line is begun until it is resumed; its window goes on."""
    return await _steer(request, "pause")


async def resume(request: Request) -> Response:
    """POST /v1/batches/{id}/resume."""
    return await _steer(request, "resume")


async def _steer(request: Request, wish: BatchCommand) -> Response:
    services, record = services_of(request), await own_batch(request)
    before = await services.batches.steer(record.batch.id, wish)
    steered = before in (BatchState.VALIDATING, BatchState.IN_PROGRESS)
    there_already = wish == "cancel" and before in (BatchState.CANCELLING, BatchState.CANCELLED)
    if not steered and not there_already:
        raise errors.batch_not_steered(wish, before.value)
    return as_json(batch_object(await services.batches.get(record.batch.id, record.batch.tenant)))


async def output(request: Request) -> Response:
    """GET /v1/batches/{id}/output: the lines that were answered, in the order of the input, also while it runs."""
    return await _given(request, LineOutcome.DONE)


async def failures(request: Request) -> Response:
    """GET /v1/batches/{id}/errors: the lines that failed."""
    return await _given(request, LineOutcome.FAILED)


async def _given(request: Request, outcome: LineOutcome) -> Response:
    services, record = services_of(request), await own_batch(request)
    if not record.state.final:
        folder = services.shelf.work(record.batch.id)
        return StreamingResponse(_bytes(record.batch.id, folder, outcome), media_type="application/jsonl")
    progress = record.progress
    file_id = progress.output_file if outcome is LineOutcome.DONE else progress.error_file
    if not file_id:
        return Response(b"", media_type="application/jsonl")
    path = services.shelf.path(file_id)
    if not await asyncio.to_thread(path.exists):
        raise errors.file_not_found()
    return FileResponse(path, media_type="application/jsonl")


def _bytes(batch_id: str, folder: Any, outcome: LineOutcome) -> Iterator[bytes]:
    """In a thread. If the batch ends meanwhile and its folder goes, the reader has what it had: a part of the whole."""
    try:
        yield from so_far(batch_id, folder, outcome)
    except FileNotFoundError:
        return


async def own_batch(request: Request) -> BatchRecord:
    """The batch in the path, if it is the caller's. Raises UnknownBatch (404)."""
    return await services_of(request).batches.get(request.path_params["batch_id"], caller_of(request).tenant)


def batch_object(record: BatchRecord) -> dict[str, Any]:
    """OpenAI's batch object, and Penstock's own fields behind it: paused, lane, pace."""
    batch, progress, state = record.batch, record.progress, record.state
    ended = {state: _seconds(progress.ended_ms)} if state.final else {}
    usage = progress.usage
    tokens = usage_object(usage)
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": progress.model or None,
        "errors": {"object": "list", "data": [_fault(each) for each in progress.faults]} if progress.faults else None,
        "input_file_id": batch.input_file,
        "completion_window": batch.window,
        "status": state.value,
        "output_file_id": progress.output_file or None,
        "error_file_id": progress.error_file or None,
        "created_at": record.created_ms // 1000,
        "in_progress_at": _seconds(progress.began_ms),
        "expires_at": _seconds(record.expires_ms),
        "finalizing_at": _seconds(progress.finalizing_ms),
        "completed_at": ended.get(BatchState.COMPLETED),
        "failed_at": ended.get(BatchState.FAILED),
        "expired_at": ended.get(BatchState.EXPIRED),
        "cancelling_at": _seconds(record.cancelling_ms),
        "cancelled_at": ended.get(BatchState.CANCELLED),
        "request_counts": {"total": progress.total, "completed": progress.completed, "failed": progress.failed},
        "usage": {
            "input_tokens": usage.prompt,
            "input_tokens_details": tokens["prompt_tokens_details"],
            "output_tokens": usage.completion,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt + usage.completion,
        },
        "metadata": dict(batch.metadata) or None,
        "paused": record.paused,
        "lane": progress.lane or None,
        "lane_reason": progress.lane_reason or None,
        "lines_computed": progress.computed,
        "lines_in_queue": progress.in_queue,
        "lines_retried": progress.retried,
        "lines_per_second": progress.per_second,
    }


def _fault(fault: LineFault) -> dict[str, Any]:
    return {"code": fault.code, "line": fault.line or None, "message": fault.message, "param": fault.param}


def _seconds(ms: int) -> int | None:
    return ms // 1000 if ms else None
