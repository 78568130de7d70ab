"""/v1/usage and /admin/usage: what a tenant, or all of them, have used, by day (UTC), key and model."""

from __future__ import annotations

import csv
import io
from collections import Counter, defaultdict
from contextlib import aclosing
from datetime import UTC, date, datetime, timedelta
from typing import Any

from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response

from api.admission import caller_of, services_of
from api.jobs import as_json
from api.openai.errors import invalid_request, refuse_if
from api.query import value_of
from streaming.ids import TENANT_NAME
from streaming.jobs.usage import USAGE_KEPT_DAYS, Used

DEFAULT_DAYS = 30
MAX_ROWS = 5_000
"""Of an answer: the process serves nobody else while it encodes one."""
FREE = (0.0, 0.0)
AMOUNTS = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens", "total_tokens")


async def own(request: Request) -> Response:
    """See what your tenant has used, by day, key and model.

    GET /v1/usage[?from=&to=&by=&format=]: what the caller's tenant has used.
    """
    return await _report(request, caller_of(request).tenant)


async def every(request: Request) -> Response:
    """See what one tenant or all have used.

    GET /admin/usage[?tenant=...]: what one tenant or all have used.
    """
    tenant: str | None = value_of(request.query_params, "usage_tenant")
    refuse_if(tenant is not None and not TENANT_NAME.fullmatch(tenant), "tenant", "must be a tenant's name")
    return await _report(request, tenant)


async def _report(request: Request, tenant: str | None) -> Response:
    """Answer with one row for each group of counts, as JSON or CSV. Raises ApiError (400), Unavailable."""
    query = request.query_params
    first, last = _days(query)
    by = tuple(dict.fromkeys((value_of(query, "by") or "day").split(",")))
    days = [first + timedelta(each) for each in range((last - first).days + 1)]
    groups: dict[tuple[str, ...], Counter[str]] = defaultdict(Counter)
    services = services_of(request)
    prices = {name: model.prices for name, model in services.models.items() if any(model.prices)}
    amounts = (*AMOUNTS, "cost") if prices else AMOUNTS
    async with services.usage_turn, aclosing(services.usage.read(days, tenant)) as counts:
        async for used in counts:
            groups[tuple([getattr(used, name) for name in by])].update(_amounts(used, prices.get(used.model, FREE)))
            most = f"would give more than {MAX_ROWS:,} rows. Ask for fewer columns or days"
            refuse_if(len(groups) > MAX_ROWS, "by", most)
    rows: list[dict[str, Any]] = [
        dict(zip(by, group, strict=True)) | {name: sums[name] for name in amounts}
        for group, sums in sorted(groups.items())
    ]
    asked = value_of(query, "usage_format") or ("csv" if "text/csv" in request.headers.get("accept", "") else "json")
    if asked == "csv":
        text = io.StringIO()
        writer = csv.DictWriter(text, (*by, *amounts))
        writer.writeheader()
        writer.writerows(rows)
        return Response(text.getvalue(), media_type="text/csv")
    total = {name: sum([row[name] for row in rows]) for name in amounts}
    return as_json({"object": "usage", "from": f"{first}", "to": f"{last}", "by": by, "data": rows, "total": total})


def _amounts(used: Used, prices: tuple[float, float]) -> dict[str, float]:
    """What counts toward a row, in the order of AMOUNTS, and what it costs."""
    counts = used.requests, used.prompt, used.cached, used.completion, used.prompt + used.completion
    cost = (used.prompt * prices[0] + used.completion * prices[1]) / 1e6
    return dict(zip(AMOUNTS, counts, strict=True)) | {"cost": cost}


def _days(query: QueryParams) -> tuple[date, date]:
    """The first and the last day that are asked for. Raises ApiError (400)."""
    given: dict[str, date | None] = {}
    for name in ("from", "to"):
        text = value_of(query, name)
        try:
            given[name] = date.fromisoformat(text) if text else None
        except ValueError:
            raise invalid_request(f"{name} is no day of the calendar.", name) from None
    last = given["to"] or max(given["from"] or date.min, datetime.now(UTC).date())
    first = given["from"] or last - timedelta(min(DEFAULT_DAYS - 1, last.toordinal() - 1))
    most = f"must be at most {USAGE_KEPT_DAYS - 1} days before `to`, and not after it: no more days are kept"
    refuse_if(not 0 <= (last - first).days < USAGE_KEPT_DAYS, "from", most)
    return first, last
