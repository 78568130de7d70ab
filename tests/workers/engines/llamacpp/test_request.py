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


@pytest.mark.parametrize(("past", "finish"), [("one two", "stop"), ("one", ""), ("a b c", "length")])
def test_what_earlier_attempts_generated_may_have_ended_it(past: str, finish: str) -> None:
    """A stop string or all its tokens are in the log already: it ends for that reason, with nothing generated."""
    sampling = Sampling(stop=("two",), max_tokens=3)
    words = tuple((word, (), 1) for word in past.split())
    generation = Generation(Request("r", "Hi", sampling, words), ["Hi"], 512)
    assert generation.done == bool(finish)
    assert generation.last().finish == finish


def test_a_request_that_was_cancelled_says_nothing_more() -> None:
    """Not even what was held back because a stop string may begin with it."""
    generation = begun(stop=("two",))
    chunk = {"choices": [{"text": "t", "finish_reason": None}], "__verbose": {"tokens_predicted": 1, "tokens": [5]}}
    assert generation.take(chunk).text == ""
    generation.cancelled = True
    last = generation.last()
    assert (last.text, last.ids, last.n, last.finish) == ("", (), 0, "cancelled")
