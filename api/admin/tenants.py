"""/admin/tenants: what each tenant stores, and its quotas. Needs an admin key."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from api.admission import services_of
from api.jobs import as_json
from api.openai import errors
from api.services import Services
from streaming.ids import TENANT_NAME

USAGE_FIELDS = ("jobs", "job_bytes", "result_bytes", "files", "file_bytes")


async def listing(request: Request) -> Response:
    """List the storage usage of tenants.

    GET /admin/tenants: list the tenants of all keys (without keys, the local one), by name.
    """
    services = services_of(request)
    tenants = sorted(services.keyring.tenants)
    return as_json({"object": "list", "data": [await _tenant(services, tenant) for tenant in tenants]})


async def show(request: Request) -> Response:
    """Show the storage usage of a tenant.

    GET /admin/tenants/{tenant}: show a tenant that has a key, or that had one and still stores something.
    """
    services, tenant = services_of(request), request.path_params["tenant"]
    if not TENANT_NAME.fullmatch(tenant):
        raise errors.invalid_request("tenant is not a valid tenant name.", "tenant")
    found = await _tenant(services, tenant)
    if tenant not in services.keyring.tenants and not any(found[name] for name in USAGE_FIELDS):
        raise errors.tenant_not_found()
    return as_json(found)


async def _tenant(services: Services, tenant: str) -> dict[str, Any]:
    """Render what a tenant stores, its quotas and its limits. Raises Unavailable."""
    usage = await services.quota_usage.usage(tenant)
    quotas = services.keyring.quotas_of(tenant).over(services.general_quotas)
    used = msgspec.structs.asdict(usage)
    return {"object": "tenant", "tenant": tenant, **used, "quotas": msgspec.structs.asdict(quotas)} | {
        "limits": msgspec.to_builtins(services.limits.of_tenant(tenant)) or {}
    }
