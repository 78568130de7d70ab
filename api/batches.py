"""/v1/batches: create, list, show, cancel, pause and resume batches, and read their output while they run.

These endpoints read no line of a file: the offline processes compute batches.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Sequence
from functools import partial
from typing import Any

from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse

from api.admission import caller_of, idempotency_key, read_body, services_of, unanswered
from api.auth.keys import Caller
from api.files import file_limits, keep_input
from api.jobs import as_json, as_page, ignored_header
from api.openai import errors
from api.openai.batch_lines import WINDOWS, BatchRequest, so_far
from api.openai.json_body import read_object, validated
from api.openai.responses.object import usage_object
from api.query import value_of
from api.services import Services
from streaming.batches.cron import Cron
from streaming.batches.ledger import LineOutcome
from streaming.batches.store import Batch, BatchCommand, BatchRecord, BatchState, LineFault
from streaming.errors import KeyReused, QuotaExceeded, Unavailable, UnknownBatch, UnknownFile


async def create(request: Request) -> Response:
    """Compute every line of a file.

    POST /v1/batches: accept the batch durably and return it.
    """
    services = services_of(request)
    check_key(caller_of(request))
    body = await read_body(request.scope, request.receive, services.settings.body_limit)
    asked = _asked(body)
    if services.refusal:
        raise errors.store_full(services.refusal)
    return as_json(batch_object(await accept_batch(request, asked, body)), headers=ignored_header(asked))


def check_key(caller: Caller) -> None:
    """Raise ApiError (403) for a key with models: the lines of a batch name any model, and are read later."""
    if caller.models:
        raise errors.outside_of_key("models", "batches")


async def accept_batch(request: Request, asked: BatchRequest, body: bytes, lines: Sequence[bytes] = ()) -> BatchRecord:
    """Accept a batch durably. `lines`: its input, if that is no file. Raises ApiError, StreamingError."""
    services, caller = services_of(request), caller_of(request)
    key = idempotency_key(request.scope)
    batch_id, trace = services.batches.new_id(caller.tenant, key), request.scope["state"]["trace"]
    batch = replace(_batch(services, caller, asked, batch_id, trace), lines=len(lines))
    limits = await file_limits(services, caller)
    limit_bytes = limits.quota
    if (schedule := asked.schedule) is not None:
        batch = replace(batch, cron=schedule.cron, timezone=schedule.timezone, file_limit=limit_bytes)
    if limit_bytes is not None and limits.used >= limit_bytes and not (key and await _is_known(services, batch)):
        raise QuotaExceeded("file_bytes", limits.used, limit_bytes)
    data = b"".join(lines)
    input_bytes = len(data)
    try:
        if data:
            await keep_input(services, batch, data, limits)
        else:
            input_bytes = (await services.files.get(asked.input_file_id, caller.tenant)).size
            await asyncio.to_thread(services.file_store.begin_work, batch.id, asked.input_file_id)
    except (UnknownFile, FileNotFoundError):
        if not (key and await _is_known(services, batch)):  # with a key: its file was deleted since
            raise errors.invalid_request("input_file_id names no file of yours.", "input_file_id") from None
    try:
        record = await services.batches.create(batch, hashlib.sha256(body).hexdigest(), limit_bytes, input_bytes)
    except (KeyReused, QuotaExceeded):
        await _discard_input(services, batch)
        if not key:  # with a key another request may be creating it right now
            await asyncio.to_thread(services.file_store.end_work, batch.id)
        elif data:
            await asyncio.to_thread(services.file_store.take_back, batch.id, batch.input_file, "")
        raise
    except (Unavailable, asyncio.CancelledError) as error:
        raise unanswered(services, error, key, partial(services.batches.request, batch.id, "cancel")) from None
    if record.state.final or record.batch.input_file != batch.input_file:  # the key led to a batch of before
        await _discard_input(services, batch)
    return record


async def _discard_input(services: Services, batch: Batch) -> None:
    """Remove what a refused request left in the work folder of the batch that its key names."""
    with contextlib.suppress(UnknownBatch, Unavailable):
        existing = await services.batches.get(batch.id, batch.tenant)
        if existing.state.final:
            await asyncio.to_thread(services.file_store.end_work, batch.id)
        else:
            used = existing.batch.input_file
            await asyncio.to_thread(services.file_store.take_back, batch.id, batch.input_file, used)


def _asked(body: bytes) -> BatchRequest:
    fields = read_object(body)
    queue = fields.get("queue")
    if fields.get("webhook") or (isinstance(queue, dict) and queue.get("webhook")):
        name = "webhook" if fields.get("webhook") else "queue.webhook"
        raise errors.invalid_request(f"{name} has no place in a batch: subscribe to batch.completed instead.", name)
    return validated(BatchRequest, fields)


def _batch(services: Services, caller: Caller, asked: BatchRequest, batch_id: str, trace: dict[str, str]) -> Batch:
    window = asked.completion_window or "24h"
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
        events=services.subscriptions.of(caller.tenant, "batch"),
        store_share=services.quotas(caller).store_share,
        caller=caller.name,
        key_limits=caller.limits,
        limited=services.is_limited(caller.tenant),
        token_limit=tokens if tokens is not None else services.batch_settings.enqueued_tokens,
        trace=trace,
    )


async def _is_known(services: Services, batch: Batch) -> bool:
    try:
        await services.batches.get(batch.id, batch.tenant)
    except UnknownBatch:
        return False
    return True


async def listing(request: Request) -> Response:
    """List your batches.

    GET /v1/batches[?after=&limit=]: list the caller's batches, newest first.
    """
    services, caller, query = services_of(request), caller_of(request), request.query_params
    limit = value_of(query, "limit") or 20
    try:
        found = await services.batches.recent(caller.tenant, query.get("after"), limit + 1)
    except UnknownBatch:
        raise errors.invalid_request("after names no batch of yours.", "after") from None
    return as_page({record.batch.id: batch_object(record) for record in found[:limit]}, has_more=len(found) > limit)


async def show(request: Request) -> Response:
    """Show a batch.

    GET /v1/batches/{id}: show the batch.
    """
    return as_json(batch_object(await own_batch(request)))


async def cancel(request: Request) -> Response:
    """Cancel a batch; finished lines are kept.

    POST /v1/batches/{id}/cancel: cancel the batch; finished lines are kept. Idempotent.
    """
    return await _command(request, "cancel")


async def pause(request: Request) -> Response:
    """Pause a batch: start no more lines.

    POST /v1/batches/{id}/pause: start no further lines until it is resumed; its deadline stays.
    """
    return await _command(request, "pause")


async def resume(request: Request) -> Response:
    """Resume a paused batch.

    POST /v1/batches/{id}/resume: start lines again.
    """
    return await _command(request, "resume")


async def _command(request: Request, command: BatchCommand) -> Response:
    return as_json(batch_object(await command_batch(request, await own_batch(request), command)))


async def command_batch(request: Request, record: BatchRecord, command: BatchCommand) -> BatchRecord:
    """Tell a batch to do something, and return its record after that. Raises ApiError (409)."""
    services = services_of(request)
    before = await services.batches.request(record.batch.id, command)
    applied = before in (BatchState.SCHEDULED, BatchState.VALIDATING, BatchState.IN_PROGRESS)
    already_cancelled = command == "cancel" and before in (BatchState.CANCELLING, BatchState.CANCELLED)
    if not applied and not already_cancelled:
        raise errors.batch_not_commanded(command, before.value)
    return await services.batches.get(record.batch.id, record.batch.tenant)


async def output(request: Request) -> Response:
    """Read the answers so far.

    GET /v1/batches/{id}/output: return the answered lines in input order, also while the batch runs.
    """
    return await _lines_of(request, LineOutcome.DONE)


async def failures(request: Request) -> Response:
    """Read the lines that failed.

    GET /v1/batches/{id}/errors: return the failed lines in input order.
    """
    return await _lines_of(request, LineOutcome.FAILED)


async def _lines_of(request: Request, outcome: LineOutcome) -> Response:
    services, record = services_of(request), await own_batch(request)
    if not record.state.final:
        folder = services.file_store.work(record.batch.id)
        return StreamingResponse(so_far(record.batch.id, folder, outcome), media_type="application/jsonl")
    progress = record.progress
    file_id = progress.output_file if outcome is LineOutcome.DONE else progress.error_file
    if not file_id:
        return Response(b"", media_type="application/jsonl")
    path = services.file_store.path(file_id)
    if not await asyncio.to_thread(path.exists):
        raise errors.file_not_found()
    return FileResponse(path, media_type="application/jsonl")


async def own_batch(request: Request) -> BatchRecord:
    """Return the batch in the path, if the caller owns it. Raises UnknownBatch (404)."""
    return await services_of(request).batches.get(request.path_params["batch_id"], caller_of(request).tenant)


def batch_object(record: BatchRecord) -> dict[str, Any]:
    """Render OpenAI's batch object, followed by Penstock's own fields (paused, lane, lines_*)."""
    batch, progress, state = record.batch, record.progress, record.state
    ends = {f"{each}_at": _seconds(progress.ended_ms) if each is state else None for each in BatchState if each.final}
    schedule, next_ms = None, progress.next_ms
    if batch.cron:
        schedule = {"cron": batch.cron, "timezone": batch.timezone}
        next_ms = 0 if state.final else next_ms or Cron(batch.cron, batch.timezone).after(record.created_ms)
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
        "cancelling_at": _seconds(record.cancelling_ms),
        **ends,
        "request_counts": {"total": progress.total, "completed": progress.completed, "failed": progress.failed},
        "usage": usage_object(progress.usage),
        "metadata": dict(batch.metadata) or None,
        "paused": record.paused,
        "lane": progress.lane or None,
        "lane_reason": progress.lane_reason or None,
        "lines_distinct": progress.distinct,
        "lines_in_queue": progress.in_queue,
        "lines_retried": progress.retried,
        "lines_per_second": progress.per_second,
        "schedule": schedule,
        "next_run_at": _seconds(next_ms),
        "last_batch_id": progress.last_batch or None,
    }


def _fault(fault: LineFault) -> dict[str, Any]:
    return {"code": fault.code, "line": fault.line or None, "message": fault.message, "param": fault.param}


def _seconds(ms: int) -> int | None:
    return ms // 1000 if ms else None
