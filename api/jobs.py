"""/v1/jobs: create jobs, list and show them, wait for them, return their result, cancel them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from typing import Any

from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response

from api.admission import Admitted, admit, caller_of, services_of
from api.auth.answers import is_key_ended
from api.openai import errors
from api.openai.errors import ApiError
from api.openai.fields import UNKNOWN, StrictBody
from api.openai.rendering import NOT_WAITING, Waiting, job_object, to_json
from api.openai.results import answer_in_slices, input_object
from api.openai.schemas import ignored_fields
from api.query import value_of
from api.services import Services
from api.stream.reply import Watched
from streaming.errors import StreamingError, UnknownJob
from streaming.ids import partition_of
from streaming.jobs.job import CancelledBy, Job, JobState
from streaming.jobs.reader import JobFilter, PageKey
from streaming.jobs.records import JobRecord
from streaming.jobs.waiting import QueuePosition
from streaming.order import Priority


def as_json(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Build a JSON response."""
    return Response(to_json(value), status, headers, media_type="application/json")


def fields_of(value: object, *names: str) -> dict[str, Any]:
    """Return these fields of an object, by name, as they are rendered."""
    return {name: getattr(value, name) for name in names}


def ignored_header(body: StrictBody) -> dict[str, str]:
    """Name the ignored fields of a body that makes no job; what a later job passes on is not ignored."""
    names = ignored_fields(body, UNKNOWN)
    return {"X-Ignored-Fields": ", ".join(names)} if names else {}


def as_page(data: Mapping[str, Any], *, has_more: bool = False, headers: dict[str, str] | None = None) -> Response:
    """Build the answer with OpenAI's list of these objects, by id."""
    ids: list[str | None] = [*data] or [None]
    ends = {"first_id": ids[0], "last_id": ids[-1]}
    return as_json({"object": "list", "data": [*data.values()], **ends, "has_more": has_more}, headers=headers)


async def create(request: Request) -> Response:
    """Queue a job, and wait for its end if asked to.

    POST /v1/jobs[?wait=seconds]: 202 with the job and its Location; 200 with its result, if it ends in that time.
    """
    services, wait_s = services_of(request), value_of(request.query_params, "wait")
    admitted = await admit(services, request.scope, request.receive, "job", waits=False)
    services.relay.close(admitted.buffer)
    record = None
    if wait_s:
        # The job is accepted, whatever becomes of the wait; CancelledError: drain_s is over.
        with contextlib.suppress(ApiError, StreamingError, asyncio.CancelledError):
            record = await wait_for_end(request, admitted.job, wait_s)
            if record.state.final:
                return as_json(await _with_result(request, record), headers=admitted.headers)
    return await accepted_response(services, admitted, record)


async def accepted_response(services: Services, admitted: Admitted, seen: JobRecord | None = None) -> Response:
    """Build the 202 for an accepted job from what the put returned, so that no failing read can deny the acceptance.

    For a job that existed already (same idempotency key) the record is read, if it can be. `seen`: the record, if it
    was read since.
    """
    job, accepted = admitted.job, admitted.accepted
    record = JobRecord(
        job=job,
        state=accepted.state,
        attempt=accepted.attempts,
        created_ms=accepted.created_ms,
        not_before_ms=job.not_before_ms or (accepted.created_ms + job.delay_ms if job.delay_ms else 0),
        epoch=accepted.epoch,
        endpoint=job.endpoint,
        keep_s=0,
        terminal=None,
    )
    position = None if accepted.joined or job.scheduled else accepted.position
    hold = services.waits.readiness.problem(job.model)
    shown = job_object(record, Waiting(position, admitted.wait, hold)) | {"last_event_id": None}  # it is not known
    if accepted.joined or seen is not None:
        with contextlib.suppress(StreamingError, asyncio.CancelledError):
            shown = await shown_job(services, seen or await services.job_reader.outline(accepted.id))
    return as_json(shown, 202, admitted.headers | {"Location": f"/v1/jobs/{accepted.id}"})


async def show(request: Request) -> Response:
    """Show a job.

    GET /v1/jobs/{id}[?wait=seconds&include=input]: show the job, once it ended or after that time.
    """
    query = request.query_params
    with_input, wait_s = value_of(query, "include") == "input", value_of(query, "wait")
    record = await own_record(request)
    if wait_s and not record.state.final:
        record = await wait_for_end(request, record.job, wait_s)
    shown = await _with_result(request, record)
    if with_input:
        shown["input"] = input_object(record.job) if not record.fault else None
    return as_json(shown, headers=job_headers(record))


async def _with_result(request: Request, record: JobRecord) -> dict[str, Any]:
    """Render a job, with its result if it completed. Raises ClientDisconnect, UnknownJob, Unavailable."""
    services, result = services_of(request), None
    if record.completed:
        record = await services.job_reader.with_rows(record)
    if record.completed:
        result = await _result(request, record)
    return await shown_job(services, record, result)


async def _result(request: Request, record: JobRecord) -> dict[str, Any]:
    """Return the completion object. Raises ApiError if the job did not complete, ClientDisconnect."""
    services = services_of(request)
    assert record.terminal is not None
    facts, rows = services.facts(record.job, record.created_ms), record.terminal.rows
    work = answer_in_slices(facts, record.terminal, rows, record.drafts)
    with Watched(request.scope["state"]["connection"]) as client:
        return await services.store_client.turns.run(client.while_there(work), len(rows))


async def result(request: Request) -> Response:
    """Get a job's answer.

    GET /v1/jobs/{id}/result: the completion, or 202 with the job while it has not ended.
    """
    return await result_of(request, await own_record(request))


async def result_of(request: Request, record: JobRecord) -> Response:
    """Build the answer with the result of a job, or 202 with the job. Raises ApiError if it did not complete."""
    services = services_of(request)
    headers = job_headers(record)
    if record.terminal is None:
        return as_json(await shown_job(services, record), 202, headers | {"Retry-After": "1"})
    try:
        return as_json(await _result(request, await services.job_reader.with_rows(record)), headers=headers)
    except ApiError as error:
        error.headers |= headers
        raise


async def cancel(request: Request) -> Response:
    """Cancel a job.

    POST /v1/jobs/{id}/cancel: request cancellation and return the job, which may run one more engine step.

    Idempotent: `already_ended` says whether the job had ended before. The result of one that had completed is left out.
    """
    record, already_ended = await cancelled(request, await own_record(request))
    shown = await shown_job(services_of(request), record) | {"already_ended": already_ended}
    return as_json(shown, headers=job_headers(record))


async def cancelled(request: Request, record: JobRecord, by: CancelledBy = CancelledBy.OWNER) -> tuple[JobRecord, bool]:
    """Cancel a job; return its record, after one more engine step if it ran, and whether it had ended before."""
    services = services_of(request)
    before = await services.queue.cancel(record.job.id, by)
    if before is JobState.RUNNING:
        return await wait_for_end(request, record.job, 1.0), False
    return await services.job_reader.outline(record.job.id), before.final


async def listing(request: Request) -> Response:
    """List your jobs.

    GET /v1/jobs[?status=&model=&lane=&since=&until=&cursor=&limit=]: list the caller's jobs, newest first, with the
    first words of their prompts, without their results.

    A page reads a bounded number of jobs: filtered by status, it may be short or empty and still have `has_more`.
    """
    services, caller, query = services_of(request), caller_of(request), request.query_params
    limit = value_of(query, "limit") or 20
    page = await services.summaries.recent([caller.tenant], cursor_of(query), limit, filter_of(request))
    data = [listed_job(record) | {"preview": record.preview or None} for record in page.jobs]
    return as_job_page(data, page.behind)


def as_job_page(data: list[dict[str, Any]], behind: PageKey | None) -> Response:
    """Build the answer with a page of jobs. `behind`: where the next one begins."""
    cursor = f"{behind[0]}-{behind[1]}" if behind else None
    return as_json({"object": "list", "data": data, "has_more": behind is not None, "next_cursor": cursor})


async def own_record(request: Request) -> JobRecord:
    """Return the job in the path, if the caller owns it, without a long result's deltas. Raises ApiError (404, 410)."""
    services, caller = services_of(request), caller_of(request)
    job_id = request.path_params["job_id"]
    if partition_of(job_id) not in services.store_client.partitions:
        raise errors.job_not_found()
    with contextlib.suppress(UnknownJob):
        record = await services.job_reader.outline(job_id, caller.tenant)
        if record.job.tenant == caller.tenant:
            request.scope["state"]["job"] = job_id
            return record
        raise errors.job_not_found()
    if await services.job_reader.was_known(caller.tenant, job_id):
        raise errors.result_expired(job_id)
    raise errors.job_not_found()


async def waiting_of(services: Services, record: JobRecord, position: QueuePosition | None = None) -> Waiting:
    """Return where a job stands in the queue; it is looked up unless `position` gives it."""
    if record.state is not JobState.QUEUED or record.held:
        return NOT_WAITING
    position = position or await services.job_reader.position(record)
    wait = services.waits.wait_of(record.job, position.in_lane)
    return Waiting(position, wait, services.waits.readiness.problem(record.job.model))


async def shown_job(services: Services, record: JobRecord, result: dict[str, Any] | None = None) -> dict[str, Any]:
    """Render a job as its owner may see it, with its position in the queue."""
    return job_object(record, await waiting_of(services, record), result)


def listed_job(record: JobRecord) -> dict[str, Any]:
    """Render a job as a list shows it: only from the fields that a list reads."""
    return job_object(record) | {"attempt_log": None}


def job_headers(record: JobRecord) -> dict[str, str]:
    return {"X-Job-Id": record.job.id}


async def wait_for_end(request: Request, job: Job, seconds: float) -> JobRecord:
    """Wait up to `seconds` for a job's end, and return its record, without a long result's deltas.

    Raises ClientDisconnect as soon as the client disconnects, ApiError (503) if this process ends first.
    """
    services = services_of(request)
    buffer = services.relay.open(job.id, rowless=True)
    deadline = time.monotonic() + seconds
    try:
        with Watched(request.scope["state"]["connection"], buffer.hang_up) as client:
            # From here on the worker sends the job's end to this process; an earlier end shows in the state.
            state = await services.queue.add_address(job.id, services.relay.address)
            while not (state.final or buffer.terminal or buffer.hung_up) and time.monotonic() < deadline:
                await buffer.take(deadline - time.monotonic())
    except asyncio.CancelledError as error:  # drain_s is over, or the caller's key has ended
        raise (errors.key_ended() if is_key_ended(error) else errors.wait_cut_off(job, repeatable=True)) from None
    finally:
        services.relay.close(buffer)
    client.check()
    return await services.job_reader.outline(job.id)


def filter_of(request: Request) -> JobFilter:
    """Parse the filters of a list of jobs. Raises ApiError (400)."""
    query, model = request.query_params, request.query_params.get("model", "")
    meant = services_of(request).meant(caller_of(request).tenant, model)
    state, lane = value_of(query, "status"), value_of(query, "lane")
    return JobFilter(
        state=JobState(state) if state else None,
        model=model if meant is None else meant.full_model,
        lane=Priority(lane) if lane else None,
        since_ms=_moment_ms(query, "since"),
        until_ms=_moment_ms(query, "until"),
    )


def _moment_ms(query: QueryParams, name: str) -> int | None:
    seconds = value_of(query, name)
    return None if seconds is None else round(1000 * seconds)


def cursor_of(query: QueryParams) -> PageKey | None:
    """Parse the key behind which a page of jobs begins. Raises ApiError (400)."""
    cursor = value_of(query, "cursor")
    if cursor is None:
        return None
    created_ms, _, job_id = cursor.partition("-")
    return int(created_ms), job_id
