"""/admin/keys: lists the configured keys, of which only hashes are known, never the keys. Needs an admin key."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from api.admission import services_of
from api.auth.keys import Caller
from api.jobs import as_json


async def listing(request: Request) -> Response:
    """GET /admin/keys: list the keys by name; a server without keys has none."""
    callers = sorted(services_of(request).keyring.callers, key=lambda caller: caller.name)
    return as_json({"object": "list", "data": [_key(caller) for caller in callers]})


def _key(caller: Caller) -> dict[str, Any]:
    return {
        "object": "key",
        "name": caller.name,
        "tenant": caller.tenant,
        "highest_lane": caller.ceiling.value,
        "admin": caller.admin,
        "batch_tokens": caller.batch_tokens,
        "quotas": msgspec.structs.asdict(caller.quotas),
    }
