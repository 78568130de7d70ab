"""/v1/jobs: put work in the queue, look at it, wait for it, take its result, cancel it."""

from __future__ import annotations

import contextlib
import re
import time

from starlette.requests import Request
from starlette.responses import Response

from api import errors
from api.admission import Admitted, admit, caller_of, services_of
from api.errors import ApiError
from api.render import Facts, JobView, completion, fingerprint, job_object, to_json
from api.services import Services
from streaming.errors import UnknownJob
from streaming.journal import Record
from streaming.keys import partition_of
from streaming.messages import Delta, State

MOST_WAIT_S = 600.0
MOST_PER_PAGE = 100
CURSOR = re.compile(r"([0-9]{1,15})-(job_[0-9a-f]{32})")


def as_json(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON response."""
    return Response(to_json(value), status, headers, media_type="application/json")


async def create(request: Request) -> Response:
    """POST /v1/jobs: 202, Location and the job."""
    services = services_of(request)
    admitted = await admit(services_of(request), request.scope, request.receive, "job", waits=False)
    services.relay.close(admitted.inbox)
    return await accepted_response(services, admitted)


async def accepted_response(services: Services, admitted: Admitted) -> Response:
    """202 for a job nobody waits for here."""
    accepted = admitted.accepted
    record = await services.journal.record(accepted.id)
    headers = admitted.headers | {"Location": f"/v1/jobs/{accepted.id}"}
    # The put has just counted what waits before a new job.
    position = None if accepted.joined else accepted.waiting
    return as_json(job_object(await view_of(services, record, position=position)), 202, headers)


async def show(request: Request) -> Response:
    """GET /v1/jobs/{id}[?wait=seconds]."""
    services, record = services_of(request), await own_record(request)
    wait_s = _seconds(request.query_params.get("wait"))
    if wait_s and not record.state.final:
        record = await _wait(services, record, wait_s)
    return as_json(job_object(await view_of(services, record)), headers=job_headers(record))


async def result(request: Request) -> Response:
    """GET /v1/jobs/{id}/result: what the endpoint would have answered; 202 with the job while there is none."""
    services, record = services_of(request), await own_record(request)
    headers = job_headers(record)
    if record.terminal is None:
        return as_json(job_object(await view_of(services, record)), 202, headers | {"Retry-After": "1"})
    try:
        return as_json(completion(facts_of(services, record), record.terminal, record.terminal.rows), headers=headers)
    except ApiError as error:
        error.headers |= headers
        raise


async def cancel(request: Request) -> Response:
    """POST /v1/jobs/{id}/cancel: idempotent; answers with the job, which may need a step more to end."""
    services, record = services_of(request), await own_record(request)
    before = await services.queue.cancel(record.job.id)
    if before is State.RUNNING:
        record = await _wait(services, record, 1.0)
    else:
        record = await services.journal.record(record.job.id)
    return as_json(job_object(await view_of(services, record)), headers=job_headers(record))


async def listing(request: Request) -> Response:
    """GET /v1/jobs[?status=&cursor=&limit=]: the caller's jobs, newest first."""
    services, caller = services_of(request), caller_of(request)
    status = _status(request.query_params.get("status"))
    limit = _limit(request.query_params.get("limit"))
    before = _cursor(request.query_params.get("cursor"))
    found: list[Record] = []
    more = True
    while more and len(found) < limit:
        page = await services.journal.recent(caller.tenant, before, MOST_PER_PAGE)
        records = await services.journal.records([job_id for job_id, _ in page])
        more = len(page) == MOST_PER_PAGE
        for (job_id, created_ms), record in zip(page, records, strict=True):
            if len(found) == limit:
                more = True
                break
            before = (created_ms, job_id)
            if record is not None and status in (None, record.state):
                found.append(record)
    data = [job_object(await view_of(services, record, deep=False), with_result=False) for record in found]
    cursor = f"{before[0]}-{before[1]}" if more and before else None
    return as_json({"object": "list", "data": data, "has_more": more, "next_cursor": cursor})


async def own_record(request: Request) -> Record:
    """The job in the path, if it is the caller's. Raises ApiError (404, 410)."""
    services, caller = services_of(request), caller_of(request)
    job_id = request.path_params["job_id"]
    if partition_of(job_id) not in services.wire.partitions:
        raise errors.job_not_found()
    with contextlib.suppress(UnknownJob):
        record = await services.journal.record(job_id)
        if record.job.tenant == caller.tenant:
            return record
        raise errors.job_not_found()
    if await services.journal.was_known(caller.tenant, job_id):
        raise errors.result_expired(job_id)
    raise errors.job_not_found()


def facts_of(services: Services, record: Record) -> Facts:
    """What every rendering of this job repeats."""
    card = services.cards.get(record.job.model)
    return Facts.of(record.job, record.created_ms, fingerprint(card) if card else None)


async def view_of(services: Services, record: Record, *, deep: bool = True, position: int | None = None) -> JobView:
    """A job as its owner may see it; `deep` also looks at its place in the lane (unless it is known) and at the log."""
    rows: list[Delta] = []
    if record.state is not State.QUEUED:
        position = None
    elif deep and position is None:
        position = await services.journal.position(record)
    if deep and record.state is State.RUNNING:
        rows = await services.journal.deltas(record)
    return JobView(
        facts=facts_of(services, record),
        status=record.state,
        started_ms=record.started_ms,
        first_ms=record.first_ms,
        done_ms=record.done_ms,
        expires_ms=(record.done_ms + 1000 * record.keep_s) if record.done_ms else 0,
        position=position,
        eta_ms=services.eta_ms(record.job.model, record.job.priority, position) if position is not None else None,
        attempts=record.attempt,
        epoch=record.epoch,
        seq=record.terminal.seq if record.terminal else (rows[-1].seq if rows else 0),
        metadata=record.job.metadata,
        terminal=record.terminal,
    )


def job_headers(record: Record) -> dict[str, str]:
    return {"X-Job-Id": record.job.id}


async def _wait(services: Services, record: Record, seconds: float) -> Record:
    """Wait for a job's end, for at most `seconds`; its record then."""
    inbox = services.relay.open(record.job.id, whole=True)
    deadline = time.monotonic() + seconds
    try:
        # From here on its end is sent to this process; one that came before shows in the state.
        state = await services.queue.follow(record.job.id, services.relay.address)
        while not state.final and inbox.terminal is None and (left := deadline - time.monotonic()) > 0:
            await inbox.take(left)
    finally:
        services.relay.close(inbox)
    return await services.journal.record(record.job.id)


def _seconds(text: str | None) -> float:
    try:
        seconds = float(text or 0)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= MOST_WAIT_S:
        raise errors.invalid_request(f"wait must be a number of seconds from 0 to {MOST_WAIT_S:g}.", "wait")
    return seconds


def _status(text: str | None) -> State | None:
    if text is None or text in set(State):
        return State(text) if text else None
    raise errors.invalid_request(f"status must be one of {', '.join(State)}.", "status")


def _limit(text: str | None) -> int:
    if text is None:
        return 20
    if not text.isdecimal() or not 1 <= int(text) <= MOST_PER_PAGE:
        raise errors.invalid_request(f"limit must be a whole number from 1 to {MOST_PER_PAGE}.", "limit")
    return int(text)


def _cursor(text: str | None) -> tuple[int, str] | None:
    if text is None:
        return None
    match = CURSOR.fullmatch(text)
    if match is None:
        raise errors.invalid_request("cursor must be the next_cursor of an earlier page.", "cursor")
    return int(match[1]), match[2]
