"""Error answers: writes each error that the API process tells to a client, and counts it in `penstock_errors_total`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.responses import Response

from api.openai.errors import ApiError
from api.openai.rendering import to_json
from api.services import Services


def counted(error: ApiError, count: Callable[[str], object]) -> dict[str, Any]:
    """Return an error's body, and count its code: once for each time that it is told to a client. The error in a job's
    record counts when /result tells it, not when the job is shown.

    Args:
        error: What to tell.
        count: `Metrics.count_error`.
    """
    count(error.code)
    return error.body


def error_body(error: ApiError, count: Callable[[str], object]) -> bytes:
    """Return the body of an error's answer."""
    return to_json(counted(error, count))


def error_event(error: ApiError, count: Callable[[str], object]) -> bytes:
    """Return the last event of a stream that failed after its 200; the connection closes after it, without [DONE]."""
    return b"data: " + error_body(error, count) + b"\n\n"


def error_response(services: Services, error: ApiError) -> Response:
    """Return the JSON answer."""
    body = error_body(error, services.metrics.count_error)
    return Response(body, error.status, error.headers, media_type="application/json")
