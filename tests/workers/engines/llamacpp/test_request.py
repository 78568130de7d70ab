"""What llama.cpp's chunks mean to the one request they belong to."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.engine import Request, Sampling
from workers.engines.llamacpp.request import Generation


def begun(**sampling: Any) -> Generation:
    """A request that a slot has."""
    return Generation(Request("r", "Hi", Sampling(**sampling)), ["Hi"], 512)


@pytest.mark.parametrize(
    ("error", "code", "status"),
    [
        ({"code": 400, "message": "no such field"}, "invalid_request_error", 400),
        ({"code": 500, "message": "out of blocks"}, "engine_error", 500),
        ({"message": "out of blocks"}, "engine_error", 500),
        (
            {"code": 400, "type": "exceed_context_size_error", "n_prompt_tokens": 600, "message": "too long"},
            "context_length_exceeded",
            400,
        ),
    ],
)
def test_whose_mistake_an_error_is(error: dict[str, Any], code: str, status: int) -> None:
    """Its requester's where llama.cpp says so, else ours; it ends the request without a word more."""
    generation = begun()
    assert generation.take({"error": error}).text == ""
    assert generation.done
    last = generation.last()
    assert last.failure is not None and (last.failure.code, last.failure.status) == (code, status)
    assert (last.finish, last.n) == ("", 0)
