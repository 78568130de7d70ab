"""ASGI messages of an answer, and the constant bytes of a token stream."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Message

PING = b": ping\n"
"""An SSE comment. It ends with one newline only: a blank line would dispatch an event, on which some clients crash."""

STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


def stream_url(job_id: str) -> dict[str, str]:
    """Return the header of a streamed answer that says where anybody with its caller's key can read and resume it."""
    return {"Stream-Url": f"/v1/jobs/{job_id}/stream"}


def served_by_header(models: Iterable[str]) -> dict[str, str]:
    """Return the header of an answer that names the models that gave its choices, in their order."""
    return {"X-Served-By": ", ".join(dict.fromkeys(models))}


def start_message(status: int, headers: dict[str, str]) -> Message:
    return {"type": "http.response.start", "status": status, "headers": Headers(headers).raw}


def body_message(data: bytes, *, more: bool) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}
