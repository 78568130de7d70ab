"""The pure decisions of the engine `upstream`: breaker, stream ends, rate limits, budget, events, ladder."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from penstock.engine import ChatTurn, Request, Sampling
from workers.engines.upstream import bodies, kinds, ladder
from workers.engines.upstream.breaker import MAX_OPEN_S, MIN_OPEN_S, Breaker
from workers.engines.upstream.budget import START, InFlightBudget
from workers.engines.upstream.endings import End, by_error, by_finish, by_status
from workers.engines.upstream.ladder import Rung
from workers.engines.upstream.limits import KeyPool, UpstreamKey, reset_s, retry_after_s
from workers.engines.upstream.settings import url_problem
from workers.engines.upstream.sse import MAX_LINE_BYTES, EventSplitter, LineTooLongError

# --- breaker ---------------------------------------------------------------------------------------------------------


def test_a_breaker_opens_at_once_when_nothing_answers() -> None:
    breaker = Breaker()
    breaker.fail("refused", 0.0, down=True)
    assert not breaker.closed and breaker.reason == "refused"


def test_a_breaker_opens_after_three_failures_in_a_row() -> None:
    """A success between them begins the count anew."""
    breaker = Breaker()
    for fails in (True, True, False, True, True):
        breaker.fail("500", 0.0) if fails else breaker.succeed()
    assert breaker.closed
    breaker.fail("500", 0.0)
    assert not breaker.closed


def test_a_half_open_breaker_lets_one_probe_pass_and_opens_longer_each_time() -> None:
    """Only a completed answer brings the first delay back, so a server that answers probes alone is left alone."""
    breaker, now, delays = Breaker(), 0.0, []
    breaker.fail("down", now, down=True)
    for _ in range(7):
        opened = now
        while not breaker.may_probe(now):
            now += 0.05
        delays.append(now - opened)
        assert not breaker.may_probe(now), "one probe at a time"
        breaker.half_open()
        assert breaker.closed
        breaker.fail("500", now)
        assert not breaker.closed, "the first failure after a probe is enough"
    assert delays[0] == pytest.approx(MIN_OPEN_S, abs=0.1) and delays[1] == pytest.approx(2 * MIN_OPEN_S, abs=0.1)
    assert delays[-1] == pytest.approx(MAX_OPEN_S, abs=0.1)
    breaker.succeed()
    breaker.fail("down", now, down=True)
    assert breaker.may_probe(now + MIN_OPEN_S)


def test_a_probe_that_fails_doubles_the_delay() -> None:
    breaker = Breaker()
    breaker.fail("down", 0.0, down=True)
    assert breaker.may_probe(MIN_OPEN_S)
    breaker.fail("still down", MIN_OPEN_S, down=True)
    assert not breaker.may_probe(MIN_OPEN_S * 2.9) and breaker.may_probe(MIN_OPEN_S * 3)


# --- ends ------------------------------------------------------------------------------------------------------------


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


# --- rate limits -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after": "2"}, 2.0),
        ({"retry-after-ms": "150", "retry-after": "2"}, 0.15),
        ({"retry-after": "Thu, 01 Jan 1970 00:00:10 GMT"}, 10.0),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "-5"}, 0.0),
        ({}, None),
    ],
)
def test_retry_after(headers: dict[str, str], seconds: float | None) -> None:
    assert retry_after_s(headers, 0.0) == seconds


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("12ms", 0.012), ("6m0s", 360.0), ("1h2m3.5s", 3600.0), ("1.5", 1.5), ("1970-01-01T00:00:07Z", 7.0), ("x", None)],
)
def test_reset_times(value: str, seconds: float | None) -> None:
    """Both families' forms; nothing is longer than an hour."""
    assert reset_s(value, 0.0) == seconds


def limit_headers(family: str, limit: int, remaining: int) -> dict[str, str]:
    if family == "openai":
        return {"x-ratelimit-limit-requests": str(limit), "x-ratelimit-remaining-requests": str(remaining)}
    return {
        "anthropic-ratelimit-requests-limit": str(limit),
        "anthropic-ratelimit-requests-remaining": str(remaining),
    }


@pytest.mark.parametrize("family", ["openai", "anthropic"])
def test_a_key_is_paced_by_its_limit(family: str) -> None:
    """A server of 60 requests a minute, which counts a sliding minute: after the first minute it refuses none."""
    key, sent, now, refused_late = UpstreamKey("K", "secret"), list[float](), 0.0, 0
    while now < 600:
        wait = key.wait_s(10, now)
        now += wait if wait > 0 else 0.01
        if wait > 0:
            continue
        key.reserve(10, now)
        used = sum(1 for at in sent if at > now - 60)
        if used >= 60:
            refused_late += now > 60
            key.block(1.0, now)
            key.note(limit_headers(family, 60, 0), now, 0.0)
        else:
            sent.append(now)
            key.note(limit_headers(family, 60, 60 - used - 1), now, 0.0)
    assert refused_late == 0
    assert len(sent) > 0.9 * 600, "and the limit is used"


def test_tokens_are_reserved_and_given_back() -> None:
    key = UpstreamKey("K", "s")
    key.note({"x-ratelimit-limit-tokens": "1000", "x-ratelimit-remaining-tokens": "1000"}, 0.0, 0.0)
    key.reserve(900, 0.0)
    assert key.wait_s(500, 0.0) == pytest.approx(400 * 60 / 1000)
    key.refund(900, 100, 0.0)
    assert key.wait_s(500, 0.0) == 0


def test_workers_share_the_limits_of_a_key() -> None:
    key = UpstreamKey("K", "s")
    key.workers = 3
    key.note(limit_headers("openai", 60, 60), 0.0, 0.0)
    for _ in range(20):
        assert key.wait_s(1, 0.0) == 0
        key.reserve(1, 0.0)
    assert key.wait_s(1, 0.0) == pytest.approx(3.0)


@pytest.mark.parametrize("limit", ["-1", "0", "nan", "many"])
def test_limits_that_are_none_are_ignored(limit: str) -> None:
    key = UpstreamKey("K", "s")
    key.note({"x-ratelimit-limit-requests": limit, "x-ratelimit-remaining-requests": "0"}, 0.0, 0.0)
    key.reserve(5, 0.0)
    assert key.wait_s(5, 0.0) == 0 and key.requests.limit == math.inf


def test_keys_are_pooled() -> None:
    """The one that is blocked waits, and the other works; a key's secret is in no repr."""
    first, second = UpstreamKey("A", "sk-one"), UpstreamKey("B", "sk-two")
    pool = KeyPool([first, second])
    first.block(10, 0.0)
    assert pool.choose(1, 0.0) == (second, 0.0)
    second.block(5, 0.0)
    assert pool.choose(1, 0.0) == (second, 5.0)
    assert "sk-" not in repr([first, second])


# --- budget ----------------------------------------------------------------------------------------------------------


def test_a_budget_grows_by_one_a_window_and_halves_when_the_server_is_busy() -> None:
    budget = InFlightBudget(100)
    assert budget.limit == START
    for _ in range(START):
        budget.note_success()
    assert budget.limit == START + 1
    budget.note_busy(10.0)
    assert budget.limit == (START + 1) // 2
    budget.note_busy(10.5)
    assert budget.limit == (START + 1) // 2, "one cut for what was sent before it"


def test_a_budget_follows_the_servers_slots_and_the_cap() -> None:
    assert InFlightBudget(100, slots=4).limit == 4
    assert InFlightBudget(3, slots=40).limit == 3


def test_waiting_requests_and_a_full_cache_hold_a_budget_back() -> None:
    budget = InFlightBudget(100, slots=40)
    budget.note_gauges(0, 0.9, 0.0)
    assert not budget.has_room(5) and budget.has_room(0) and budget.limit == 40
    budget.note_gauges(3, 0.1, 10.0)
    assert budget.limit == 36 and not budget.has_room(5)
    budget.note_gauges(0, 0.1, 20.0)
    assert budget.has_room(5) and not budget.has_room(36)


def test_workers_share_a_budget() -> None:
    budget = InFlightBudget(100, slots=40)
    budget.share(3)
    assert budget.limit == 13
    budget.share(100)
    assert budget.limit == 1


# --- events ----------------------------------------------------------------------------------------------------------


def test_events_are_the_same_however_they_are_cut() -> None:
    stream = b': ping\r\ndata: {"a": 1}\r\n\r\nevent: x\nid: 3\ndata:{"b":2}\n\n\ndata: [DONE]\n\n'
    for size in range(1, len(stream)):
        splitter = EventSplitter()
        found = [each for at in range(0, len(stream), size) for each in splitter.feed(stream[at : at + size])]
        assert found == [b'{"a": 1}', b'{"b":2}', b"[DONE]"]


def test_a_line_without_an_end_is_refused() -> None:
    splitter = EventSplitter()
    with pytest.raises(LineTooLongError):
        for _ in range(100):
            splitter.feed(b"x" * (MAX_LINE_BYTES // 50))


# --- ladder and bodies -----------------------------------------------------------------------------------------------

CHAT = [ChatTurn("user", "hi")]
KNOWN = ((" a", (1,), 1), (" b", (2,), 1))


def way(kind: str, prompt: Any = CHAT, rows: Any = KNOWN, tried: Any = (), **sampling: Any) -> Rung:
    return ladder.choose(kinds.of(kind), Request("r", prompt, Sampling(**sampling)), rows, tried).rung


def test_nothing_is_continued_before_anything_was_shown() -> None:
    assert way("vllm", rows=(), json_schema={}) is Rung.FRESH


@pytest.mark.parametrize("kind", kinds.KINDS)
@pytest.mark.parametrize("case", ["json", "reasoning"])
def test_json_and_reasoning_are_never_spliced(kind: str, case: str) -> None:
    """They are replayed where that may give the same, and begun again otherwise."""
    rows = KNOWN if case == "json" else (("", (), 3), *KNOWN)
    schema = {"json_schema": {}} if case == "json" else {}
    for prompt in (CHAT, "text", [1, 2]):
        assert way(kind, prompt, rows, temperature=0, **schema) is Rung.REPLAY
        assert way(kind, prompt, rows, seed=4, **schema) is Rung.REPLAY
        assert way(kind, prompt, rows, **schema) is Rung.RESTART
        assert way(kind, prompt, rows, {Rung.REPLAY}, temperature=0, **schema) is Rung.RESTART


@pytest.mark.parametrize("penalty", ["presence_penalty", "frequency_penalty"])
def test_penalties_continue_only_where_they_span(penalty: str) -> None:
    assert way("llama-server", **{penalty: 0.5}) is Rung.IDS
    assert way("vllm", **{penalty: 0.5}) is Rung.RESTART
    assert way("vllm", **{penalty: 0.5}, temperature=0) is Rung.REPLAY
    assert way("vllm", **{penalty: 0.0}) is Rung.IDS


def test_ids_are_continued_only_if_all_are_known() -> None:
    """llama-server takes texts between them."""
    gap = (*KNOWN, (" c", (), 1))
    assert way("vllm", rows=gap) is Rung.PREFILL and way("vllm", "text", gap) is Rung.TEXT
    assert way("llama-server", rows=gap) is Rung.IDS
    prompt = bodies.continued("p", Rung.IDS, (*KNOWN, ("😀", (9,), 3), (" d", (4,), 1)))
    assert prompt == ["p", 1, 2, "😀", 4]
    assert bodies.continued("p", Rung.IDS, (("😀", (9,), 3), (" d", (4,), 1))) == ["p😀", 4]


@pytest.mark.parametrize("kind", kinds.KINDS)
def test_a_strict_server_gets_standard_fields_alone(kind: str) -> None:
    facts = kinds.of(kind, model="m")
    standard = {
        "model", "stream", "messages", "prompt", "temperature", "top_p", "seed", "presence_penalty", "stream_options",
        "frequency_penalty", "max_tokens", "max_completion_tokens", "logprobs", "top_logprobs", "response_format",
    }  # fmt: skip
    sampling = Sampling(max_tokens=5, temperature=1, top_p=0.5, seed=-1, presence_penalty=1, json_schema={}, logprobs=2)
    path, body = bodies.build(facts, Request("r", CHAT, sampling), Rung.FRESH, (), None, limit=5)
    assert path == ("/completions" if kind == "llama-server" else "/chat/completions")
    assert not facts.strict or set(body) <= standard
    assert "stop" not in body and body.get("seed", 0) >= 0


def test_the_priority_has_the_servers_sign() -> None:
    request = Request("r", CHAT, Sampling(), priority=0.8)
    sent = {
        kind: bodies.build(kinds.of(kind), request, Rung.FRESH, (), None, send_priority=True)[1].get("priority")
        for kind in ("vllm", "sglang", "trtllm")
    }
    assert sent == {"vllm": 20, "sglang": 80, "trtllm": None}


@pytest.mark.parametrize(
    "url",
    ["", "gpu-1:8000", "ftp://gpu-1", "http://", "http://u:p@h/v1", "http://h/v1?x=1", "http://h:0/v1", "http://h:x/"],
)
def test_addresses_that_cannot_be_used_are_refused(url: str) -> None:
    assert url_problem(url) and "p@" not in url_problem(url)
