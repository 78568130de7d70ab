"""/admin/dlq and /admin/webhooks: dead letters and webhook messages, to look at and send again. Needs an admin key."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from api.admission import services_of
from api.auth import audit
from api.jobs import as_json, fields_of, shown_job
from api.openai import errors
from api.query import value_of
from streaming.errors import LaneFull, MalformedJob, UnknownJob
from streaming.events import WebhookMessage
from streaming.jobs.dead_letters import DeadLetter

MAX_LISTED = 100


async def listing(request: Request) -> Response:
    """List dead letters.

    GET /admin/dlq[?limit=]: list dead letters, newest first.
    """
    letters = await services_of(request).dead_letters.recent(value_of(request.query_params, "limit") or MAX_LISTED)
    return as_json({"object": "list", "data": [_object(letter) for letter in letters]})


async def show(request: Request) -> Response:
    """Show a dead letter.

    GET /admin/dlq/{id}: show the letter, and its job without the prompt while that is retained.
    """
    services = services_of(request)
    letter = await _found(request)
    job: dict[str, Any] | None = None
    if letter.job:
        try:
            job = await shown_job(services, await services.job_reader.outline(letter.job))
        except UnknownJob:
            job = None  # its retention is over; the letter still has the reason
    return as_json(_object(letter) | {"job": job})


async def replay(request: Request) -> Response:
    """Replay a dead letter's job.

    POST /admin/dlq/{id}/replay: queue the job again as a new one and remove the letter; 202 with the new job.
    """
    services, letter = services_of(request), await _found(request)
    if not letter.job:
        raise errors.invalid_request("This letter is not a job: there is nothing to replay. Drop it.")
    try:
        accepted = await services.dead_letters.replay(letter.id)
    except UnknownJob:
        raise errors.result_expired(letter.job) from None
    except MalformedJob as error:
        raise errors.nothing_to_replay(letter.job, str(error)) from None
    except LaneFull as error:
        raise errors.queue_full(error.waiting, error.own, 5) from None
    audit.detail(request.scope, job=accepted.id)
    record = await services.job_reader.outline(accepted.id)
    headers = {"Location": f"/v1/jobs/{accepted.id}", "X-Job-Id": accepted.id}
    return as_json(await shown_job(services, record), 202, headers)


async def drop(request: Request) -> Response:
    """Drop a dead letter.

    DELETE /admin/dlq/{id}: remove the letter.
    """
    letter = await _found(request)
    await services_of(request).dead_letters.drop(letter.id)
    return as_json({"id": letter.id, "object": "dead_letter", "deleted": True})


async def _found(request: Request) -> DeadLetter:
    """Return the letter in the path. Raises ApiError (404)."""
    try:
        return await services_of(request).dead_letters.get(request.path_params["letter_id"])
    except UnknownJob:
        raise errors.dead_letter_not_found() from None


def _object(letter: DeadLetter) -> dict[str, Any]:
    return {
        "id": letter.id,
        "object": "dead_letter",
        "reason": letter.reason,
        "at": letter.at_ms / 1000,
        "job_id": letter.job or None,
        "lane": letter.lane or None,
        "entry": letter.entry or None,
    }


# --- webhook messages -------------------------------------------------------------------------------------------------


async def list_messages(request: Request) -> Response:
    """List webhook messages.

    GET /admin/webhooks[?limit=]: list messages, newest first.
    """
    messages = await services_of(request).webhooks.recent(value_of(request.query_params, "limit") or MAX_LISTED)
    return as_json({"object": "list", "data": [_message_object(message) for message in messages]})


async def show_message(request: Request) -> Response:
    """Show a webhook message.

    GET /admin/webhooks/{id}: show the message.
    """
    return as_json(_message_object(await _message(request)))


async def resend(request: Request) -> Response:
    """Send a webhook message once more.

    POST /admin/webhooks/{id}/replay: send the message again with the same webhook-id; 202.
    """
    message = await _message(request)
    await services_of(request).webhooks.redeliver(message.id)
    return as_json(_message_object(await _message(request)), 202)


async def _message(request: Request) -> WebhookMessage:
    """Return the message in the path. Raises UnknownMessage (404)."""
    return await services_of(request).webhooks.get(request.path_params["message_id"])


def _message_object(message: WebhookMessage) -> dict[str, Any]:
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
