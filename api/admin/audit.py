"""GET /admin/audit: what admins did and who was refused, newest first. Needs an admin key."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from api.admission import services_of
from api.jobs import as_page
from api.query import value_of


async def listing(request: Request) -> Response:
    """List what admins did, and who was refused.

    GET /admin/audit[?limit=&after=&since=]: list entries of the audit log, of all API processes.
    """
    query = request.query_params
    limit, after = value_of(query, "limit") or 20, value_of(query, "audit_after") or ""
    since_ms = int(1000 * (value_of(query, "audit_since") or 0))
    found = await services_of(request).audit_log.recent(limit + 1, after, since_ms)
    shown = {entry["id"]: {"object": "audit.entry", **entry} for entry in found[:limit]}
    return as_page(shown, has_more=len(found) > limit)
