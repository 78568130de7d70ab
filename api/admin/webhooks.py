"""/admin/webhooks: lists, shows and resends webhook messages. Needs an admin key."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from api.admission import services_of
from api.jobs import as_json, fields_of
from api.query import value_of
from streaming.events import WebhookMessage, Webhooks

MAX_LISTED = 100


async def listing(request: Request) -> Response:
    """GET /admin/webhooks[?limit=]: list messages, newest first."""
    messages = await _webhooks(request).recent(value_of(request.query_params, "limit") or MAX_LISTED)
    return as_json({"object": "list", "data": [_object(message) for message in messages]})


async def show(request: Request) -> Response:
    """GET /admin/webhooks/{id}: show the message."""
    return as_json(_object(await _found(request)))


async def replay(request: Request) -> Response:
    """POST /admin/webhooks/{id}/replay: send the message again with the same webhook-id; 202."""
    message = await _found(request)
    await _webhooks(request).redeliver(message.id)
    return as_json(_object(await _found(request)), 202)


def _webhooks(request: Request) -> Webhooks:
    return Webhooks(services_of(request).store_client)


async def _found(request: Request) -> WebhookMessage:
    """Return the message in the path. Raises UnknownMessage (404)."""
    return await _webhooks(request).get(request.path_params["message_id"])


def _object(message: WebhookMessage) -> dict[str, Any]:
    return {
        **fields_of(message, "id", "endpoint", "event", "type", "subject", "tenant", "attempts"),
        "object": "webhook_message",
        "url": message.url.partition("?")[0] or None,  # its query may hold a secret
        "at": message.at_ms / 1000,
        "status": message.state,
        "last_attempt_at": message.tried_ms / 1000 or None,
        "next_attempt_at": message.due_ms / 1000 or None,
        "last_status_code": message.status or None,
        "last_error": message.problem or None,
    }
