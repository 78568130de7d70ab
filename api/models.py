"""GET /v1/models: what may be asked for, whether or not a worker is awake for it."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from api.admission import services_of
from api.jobs import as_json
from api.services import Services


async def listing(request: Request) -> Response:
    """Every configured model."""
    services = services_of(request)
    return as_json({"object": "list", "data": [_model(services, name) for name in services.models]})


async def show(request: Request) -> Response:
    """One model. 404 if it is not configured."""
    services = services_of(request)
    name = request.path_params["model"]
    services.model(name)
    return as_json(_model(services, name))


def _model(services: Services, name: str) -> dict[str, Any]:
    """OpenAI's model object, and what is known of it beyond that."""
    card = services.cards.get(name)
    known = {"context_length": card.context, "capabilities": msgspec.to_builtins(card.capabilities)} if card else {}
    created = card.created if card else 0
    return {"id": name, "object": "model", "created": created, "owned_by": "penstock"} | known
