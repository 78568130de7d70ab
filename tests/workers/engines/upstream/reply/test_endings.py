"""What the chunks and the end of a reply mean, and how far a server is believed."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from fake_upstream import ANSWER, FakeUpstream, Fault
from upstream_bench import HELLO, bench

from workers.engines.upstream import reply
from workers.engines.upstream.http import MAX_WORDS, error_of
from workers.engines.upstream.reply import MAX_COUNT, MAX_TOKEN_ID, End, by_error, by_finish, by_status

SECRET = "sk-operator-42"


@pytest.mark.parametrize(
    ("reason", "end"),
    [
        ("stop", "stop"), ("length", "length"), ("tool_calls", "stop"), ("function_call", "stop"),
        ("eos_token", "stop"), ("eos", "stop"), ("end_turn", "stop"), ("STOP", "stop"), ("repetition", "stop"),
        ("a word of tomorrow", "stop"), ("max_tokens", "length"), ("MAX_TOKENS", "length"), ("model_length", "length"),
        ("content_filter", "content_filter"), ("SAFETY", "content_filter"), ("refusal", "content_filter"),
        ("abort", End.BROKEN), ("error", End.BROKEN), ("cancelled", End.BROKEN), ("timeout", End.BROKEN),
        ("insufficient_system_resource", End.BROKEN), ("", None), ("null", None),
    ],
)  # fmt: skip
def test_a_finish_reason_completes_an_answer_unless_it_tells_an_interruption(reason: str, end: Any) -> None:
    outcome = by_finish(reason)
    assert outcome is not None if end else outcome is None
    if outcome is not None:
        assert (outcome.end if isinstance(end, End) else outcome.finish) == end


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
    told = [by_error({"error": {"code": code}}).told for code in ("job_cancelled", "draining", 503)]
    assert told == [True, False, False]


def test_words_of_a_server_are_bounded() -> None:
    assert len(by_status(400, b"", {"error": {"message": "x" * 10**6}}).failure.message) < 1000


def test_a_prompt_that_is_too_long_has_the_code_of_that() -> None:
    said = "request (3001 tokens) exceeds the available context size (2048 tokens), try increasing it"
    assert by_status(400, b"", {"error": {"message": said}}).failure.code == "context_length_exceeded"


@pytest.mark.parametrize("status", [402, 411, 418, 421, 426, 499])
def test_a_status_that_means_nothing_to_a_client_becomes_400(status: int) -> None:
    outcome = by_status(status, b"", {"error": "no"})
    assert outcome.end is End.KEY or outcome.failure.status == 400


CODES = [
    "\u00b2", "\u0664\u0660\u0664", "9" * 5000, "1e3", "-404", " 404", 10**40, -404, 99, 600, True, 404.0, None, [404],
]  # fmt: skip


@pytest.mark.parametrize("code", CODES, ids=lambda code: str(code)[:20])
def test_a_strange_code_is_no_status(code: Any) -> None:
    found = error_of({"error": {"message": "m", "code": code}})
    assert found == ("m", 0, None)
    assert by_error({"error": {"message": "m", "code": code}}).end is End.BROKEN


def test_no_key_and_no_control_character_is_passed_on() -> None:
    """Nor half a key, where the words are cut."""
    said = "\x1b[31m" + "y" * (MAX_WORDS - 10) + SECRET
    error = {"error": {"message": said, "param": "p" + SECRET + "q" * 5000}}
    for outcome in (by_status(400, b"", error), by_status(400, said.encode(), None), by_error({"error": said})):
        hidden = outcome.without(["", SECRET])
        failure = hidden.failure
        for text in (hidden.words, hidden.reason, failure.message, failure.param or ""):
            assert SECRET[:6] not in text and text.isprintable()
        assert len(failure.message) < MAX_WORDS + 100 and len(failure.param or "") <= 128


def test_a_servers_words_about_its_own_fault_are_for_no_client() -> None:
    outcome = by_status(500, b"", {"error": {"message": "trace of 10.1.2.3:9000"}})
    assert (outcome.failure.message, outcome.failure.status) == ("the upstream server failed: HTTP 500", 502)


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
