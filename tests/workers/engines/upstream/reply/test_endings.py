"""What the end of a reply means."""

from __future__ import annotations

import json
from typing import Any

import pytest

from workers.engines.upstream.reply.endings import End, by_error, by_finish, by_status


@pytest.mark.parametrize(
    ("reason", "end"),
    [
        ("stop", End.DONE), ("length", End.DONE), ("tool_calls", End.DONE), ("eos_token", End.DONE),
        ("content_filter", End.FAILED),
        ("abort", End.BROKEN), ("error", End.BROKEN), ("repetition", End.BROKEN), ("", End.BROKEN),
    ],
)  # fmt: skip
def test_only_good_finish_reasons_complete(reason: str, end: End) -> None:
    assert by_finish(reason).end is end


STATUSES = {
    400: End.FAILED, 401: End.KEY, 403: End.FAILED, 404: End.FAILED, 408: End.BROKEN, 413: End.FAILED, 422: End.FAILED,
    429: End.BUSY, 500: End.BROKEN, 502: End.BROKEN, 503: End.BUSY, 504: End.BROKEN, 529: End.BUSY,
}  # fmt: skip
BODIES: dict[str, Any] = {
    "nested": {"error": {"message": "no such thing", "type": "invalid"}},
    "flat": {"object": "error", "message": "no such thing", "code": 400},
    "TGI": {"error": "no such thing", "error_type": "validation"},
    "FastAPI": {"detail": "no such thing"},
    "text": None,
}


@pytest.mark.parametrize("status", STATUSES)
@pytest.mark.parametrize("body", BODIES)
def test_a_status_says_whose_fault_it_is_in_the_servers_words(status: int, body: str) -> None:
    decoded = BODIES[body]
    outcome = by_status(status, b"no such thing" if decoded is None else json.dumps(decoded).encode(), decoded)
    assert outcome.end is STATUSES[status] and outcome.words == "no such thing"
    assert outcome.reason == f"HTTP {status}", "logs do not repeat a server, who may repeat a prompt"
    if outcome.end is End.FAILED:
        assert outcome.failure.status == status and "no such thing" in outcome.failure.message


def test_an_error_inside_a_stream_is_read_like_a_status() -> None:
    """SGLang refuses with 200 and an error inside."""
    assert by_error({"error": {"message": "full", "code": 503}}).end is End.BUSY
    assert by_error({"error": {"message": "too long", "code": 400}}).end is End.FAILED
    assert by_error({"error": {"message": "gone", "type": "server_error"}}).end is End.BROKEN
    assert by_error({"error": {"message": "x", "code": "rate_limit_exceeded"}}).end is End.BROKEN


def test_words_of_a_server_are_bounded() -> None:
    assert len(by_status(400, b"", {"error": {"message": "x" * 10**6}}).failure.message) < 1000


def test_a_prompt_that_is_too_long_has_the_code_of_that() -> None:
    said = "request (3001 tokens) exceeds the available context size (2048 tokens), try increasing it"
    assert by_status(400, b"", {"error": {"message": said}}).failure.code == "context_length_exceeded"
