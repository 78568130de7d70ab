"""/admin/tenants: what each tenant keeps, and may keep. Needs a key with `admin = true`."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from api.admission import services_of
from api.jobs import as_json
from api.openai import errors
from api.services import Services
from streaming.settings import TENANT_NAME

KEPT = ("jobs", "job_bytes", "result_bytes", "files", "file_bytes")


async def listing(request: Request) -> Response:
    """GET /admin/tenants: those that keys, or the door without keys, let in, by name."""
    services = services_of(request)
    tenants = sorted(services.keyring.tenants)
    return as_json({"object": "list", "data": [await _tenant(services, tenant) for tenant in tenants]})


async def show(request: Request) -> Response:
    """GET /admin/tenants/{tenant}: any that a key names, or whose key is gone and that still keeps something."""
    services, tenant = services_of(request), request.path_params["tenant"]
    if not TENANT_NAME.fullmatch(tenant):
        raise errors.invalid_request("tenant is not the name of one.", "tenant")
    found = await _tenant(services, tenant)
    if tenant not in services.keyring.tenants and not any(found[name] for name in KEPT):
        raise errors.tenant_not_found()
    return as_json(found)


async def _tenant(services: Services, tenant: str) -> dict[str, Any]:
    """Raises Unavailable."""
    usage = await services.kept.usage(tenant)
    limits = services.keyring.quotas_of(tenant).over(services.quota_settings)
    return {
        "object": "tenant",
        "tenant": tenant,
        "jobs": usage.jobs,
        "waiting": usage.waiting,
        "running": usage.running,
        "job_bytes": usage.job_bytes,
        "result_bytes": usage.result_bytes,
        "files": usage.files,
        "file_bytes": usage.file_bytes,
        "limits": {name: getattr(limits, name) for name in limits.__struct_fields__},
    }
