"""Errors and headers as clients of Anthropic's API expect them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from api.openai.errors import RATE_HEADERS, ApiError
from api.openai.rendering import error_body, to_json

PATHS = "/v1/messages"
SHARED_PATHS = "/v1/models"
"""Of either API: the header tells whose form a client expects."""
VERSION_HEADER = b"anthropic-version"
REQUEST_ID = "request-id"
RATES = {name: "anthropic-ratelimit-{3}-{2}".format(*name.split("-")) for name in RATE_HEADERS}
"""By the names that OpenAI has for them."""

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def is_asked(path: str, headers: Mapping[bytes, bytes]) -> bool:
    """Whether a client expects an answer in this API's form. `headers`: by name in lower case."""
    return path.startswith(PATHS) or (VERSION_HEADER in headers and path.startswith(SHARED_PATHS))


def body_of(error: ApiError, count: Callable[[str], object], scope: Mapping[str, Any]) -> bytes:
    """The body of an error answer, which `count` counts, in the form of the API that the client speaks. `scope`: of the
    request."""
    body = error_body(error, count)
    if is_asked(scope["path"], scope["state"]["headers"]):
        return to_json(error_object(error, scope["state"]["request_id"]))
    return body


def error_object(error: ApiError, request_id: str | None = None) -> dict[str, Any]:
    """The JSON body of an error, and the data of an error event: its type, and beside it what errors have here."""
    told = error.body["error"] | {"type": error_kind(error.status)}
    return {"type": "error", "error": told, "request_id": request_id}


def error_kind(status: int) -> str:
    """The type of an error with this status."""
    return _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")


def error_event(error: ApiError, request_id: str) -> bytes:
    """The last event of a stream that failed after its 200. It is not in the log, so it has no id."""
    return b"event: error\ndata: %b\n\n" % to_json(error_object(error, request_id))


def own_headers(headers: Iterable[tuple[bytes, bytes]], request_id: str) -> list[tuple[bytes, bytes]]:
    """What answers have in this API beside these headers: the id of the request, and what is left of rates."""
    found = [(REQUEST_ID.encode(), request_id.encode())]
    for name, value in headers:
        if own := RATES.get(name.decode("latin-1")):
            found.append((own.encode(), _moment(value) if own.endswith("reset") else value))
    return found


def _moment(seconds: bytes) -> bytes:
    """The time in so many seconds, written as `1.5s`."""
    return datetime.fromtimestamp(time.time() + float(seconds[:-1]), UTC).isoformat(timespec="seconds").encode()
