"""GET /v1/models: lists the configured models, whether or not a worker serves them now."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from api.admission import services_of
from api.jobs import as_json
from api.services import Services


async def listing(request: Request) -> Response:
    """GET /v1/models: list every configured model."""
    services = services_of(request)
    await services.learn_cards()
    return as_json({"object": "list", "data": [_model(services, name) for name in services.models]})


async def show(request: Request) -> Response:
    """GET /v1/models/{model}: show one model; 404 if it is not configured."""
    services = services_of(request)
    name = request.path_params["model"]
    services.model(name)
    await services.learn_cards()
    return as_json(_model(services, name))


def _model(services: Services, name: str) -> dict[str, Any]:
    """Render OpenAI's model object, with context length and capabilities once a worker has loaded the model."""
    card = services.cards.get(name)
    known = {"context_length": card.context, "capabilities": msgspec.to_builtins(card.capabilities)} if card else {}
    created = card.created if card else 0
    return {"id": name, "object": "model", "created": created, "owned_by": "penstock"} | known
