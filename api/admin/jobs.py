"""/admin/jobs: lists, shows and cancels jobs of every tenant, never with their request or answer. Needs an admin key.

Requests and answers are for keys of the job's own tenant, at /v1/jobs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from api.admission import caller_of, services_of
from api.auth import audit
from api.jobs import as_job_page, as_json, cancelled, cursor_of, filter_of, listed_job, shown_job
from api.openai import errors
from api.openai.rendering import finish_reasons
from api.query import value_of
from api.services import Services
from api.timing import timing_object
from streaming.errors import UnknownJob
from streaming.ids import TENANT_NAME, partition_of
from streaming.jobs.job import CancelledBy
from streaming.jobs.records import JobRecord

MAX_TENANTS = 20
"""Tenants whose jobs one list may hold: each is read separately."""
ALL = "*"


async def listing(request: Request) -> Response:
    """List the jobs of one tenant or of all.

    GET /admin/jobs[?tenant=&status=&model=&lane=&since=&until=&search=&cursor=&limit=]: list jobs, newest first.

    It shows the first words of a prompt only of jobs of the key's own tenant. A page reads a bounded number of jobs: it
    may be short or empty and still have `has_more`.
    """
    services, query, own = services_of(request), request.query_params, caller_of(request).tenant
    tenants = _tenants(services, query.get("tenant") or own)
    search, limit = value_of(query, "search") or "", value_of(query, "limit") or 50

    def passes(record: JobRecord) -> bool:
        """Whether its id begins so, or a value of its metadata or the first words of its prompt contain the search."""
        words = record.preview.lower() if record.job.tenant == own else ""
        in_metadata = any(search in value for value in record.job.metadata.values())
        return record.job.id.startswith(search) or search.lower() in words or in_metadata

    page = await services.summaries.recent(tenants, cursor_of(query), limit, filter_of(request), passes)
    data = [
        {"tenant": record.job.tenant, **listed_job(record)}
        | {"preview": (record.preview or None) if record.job.tenant == own else None}
        for record in page.jobs
    ]
    return as_job_page(data, page.behind)


async def show(request: Request) -> Response:
    """Show any job, without its request and answer.

    GET /admin/jobs/{id}: show a job with its timing. 404 for an unknown one, 410 after its retention.
    """
    services, record = services_of(request), await _record(request)
    return as_json(await _shown(services, record, caller_of(request).tenant))


async def cancel(request: Request) -> Response:
    """Cancel any job.

    POST /admin/jobs/{id}/cancel: request cancellation and return the job. Idempotent.
    """
    record = await _record(request)
    audit.detail(request.scope, job=record.job.id, of_tenant=record.job.tenant)
    record, already_ended = await cancelled(request, record, CancelledBy.ADMIN)
    shown = await _shown(services_of(request), record, caller_of(request).tenant)
    return as_json(shown | {"already_ended": already_ended})


async def _shown(services: Services, record: JobRecord, own: str) -> dict[str, Any]:
    delivered = record.delivered or services.deliveries.of(record.job.id)
    return {
        "tenant": record.job.tenant,
        **await shown_job(services, record),
        "finish_reasons": finish_reasons(record),
        "readable": record.job.tenant == own and not record.fault,
        "timing": timing_object(record, delivered),
    }


async def _record(request: Request) -> JobRecord:
    """Return the job in the path, whoever owns it. Raises ApiError (404, 410)."""
    services, job_id = services_of(request), request.path_params["job_id"]
    if partition_of(job_id) in services.store_client.partitions:
        with contextlib.suppress(UnknownJob):
            record = await services.job_reader.outline(job_id)
            request.scope["state"]["job"] = job_id
            return await services.job_reader.record(job_id, rows=False) if record.rowless else record
        for tenant in services.keyring.tenants:
            if await services.job_reader.was_known(tenant, job_id):
                raise errors.result_expired(job_id)
    raise errors.job_not_found()


def _tenants(services: Services, named: str) -> Sequence[str]:
    """The tenants whose jobs to list: one, or with "*" those of all keys. Raises ApiError (400)."""
    if named != ALL:
        if not TENANT_NAME.fullmatch(named):
            raise errors.invalid_request("tenant is not a valid tenant name.", "tenant")
        return (named,)
    tenants = sorted(services.keyring.tenants)
    if len(tenants) > MAX_TENANTS:
        raise errors.invalid_request(
            f"There are {len(tenants)} tenants; a list may hold the jobs of {MAX_TENANTS}. Name one.", "tenant"
        )
    return tenants
