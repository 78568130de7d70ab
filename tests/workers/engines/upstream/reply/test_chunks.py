"""Numbers of a server are bounded before they go into the log and onto bills."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from fake_upstream import ANSWER, FakeUpstream, Fault
from upstream_bench import HELLO, bench

from workers.engines.upstream import reply
from workers.engines.upstream.reply import MAX_COUNT, MAX_TOKEN_ID

NO_ID = (-1, 2**31, 2**63, 2**64, 10**30, True, 1.5)
NO_COUNT = (-1, MAX_COUNT + 1, 10**18, 10**30)


def with_ids(number: Any) -> list[dict[str, Any]]:
    return [
        {"choices": [{"text": "x", "token_ids": [1, number]}]},
        {"choices": [{"text": "x", "prompt_token_ids": [number]}]},
        {"choices": [{"text": "x"}], "prompt_token_ids": [number]},
        {"choices": [{"text": "x"}], "__verbose": {"tokens": [number], "tokens_predicted": 1}},
    ]


def with_counts(number: Any) -> list[dict[str, Any]]:
    return [
        {"choices": [], "usage": {"prompt_tokens": number}},
        {"choices": [], "usage": {"completion_tokens": number}},
        {"choices": [], "usage": {"prompt_tokens": 1, "prompt_tokens_details": {"cached_tokens": number}}},
        {"choices": [], "prompt_progress": {"total": number}},
        {"choices": [], "prompt_progress": {"cache": number}},
        {"choices": [{"text": "x"}], "__verbose": {"tokens_predicted": number}},
    ]


OUT_OF_BOUNDS = [chunk for number in NO_ID for chunk in with_ids(number)]
OUT_OF_BOUNDS += [chunk for number in NO_COUNT for chunk in with_counts(number)]


@pytest.mark.parametrize("chunk", OUT_OF_BOUNDS, ids=str)
def test_a_number_that_cannot_be_true_makes_a_chunk_malformed(chunk: dict[str, Any]) -> None:
    with pytest.raises((msgspec.DecodeError, ValueError)):
        reply.decode(json.dumps(chunk).encode())


@pytest.mark.parametrize("number", ["-Infinity", "NaN", "-1e999"])
def test_a_log_probability_without_a_number_is_a_small_one(number: str) -> None:
    row = f'{{"token": "a", "logprob": {number}, "top_logprobs": [{{"token": "b", "logprob": {number}}}]}}'
    chunk = reply.decode(reply.mended(f'{{"choices": [{{"logprobs": {{"content": [{row}]}}}}]}}'.encode()))
    assert chunk.choices
    (found,) = reply.logprobs_of(chunk.choices[0].logprobs, 1)
    assert found.logprob == -9999.0 and found.top == (("b", -9999.0),)


def test_numbers_within_the_bounds_are_taken() -> None:
    for chunk in (*with_ids(0), *with_ids(MAX_TOKEN_ID), *with_counts(0), *with_counts(MAX_COUNT)):
        reply.decode(json.dumps(chunk).encode())


@pytest.mark.parametrize("number", [f'"usage": {{"prompt_tokens": {10**30}}}', f'"prompt_token_ids": [{10**30}]'])
async def test_an_absurd_number_breaks_its_own_reply_alone(number: str) -> None:
    """The answer is continued where it broke, without a gap, and others go on."""
    chunk = '{"choices": [{"text": "?", "delta": {"content": "?"}}], ' + number + "}"
    async with bench(FakeUpstream("vllm", [Fault(after=10, data=f"data: {chunk}\n\n".encode())])) as desk:
        answer = await desk.ask(HELLO, max_tokens=30)
        other = await desk.ask(HELLO, max_tokens=30)
    for each in (answer, other):
        assert each.failure is None and (each.text, each.tokens) == ("".join(ANSWER[:30]), 30)
        assert each.prompt_tokens == 3
