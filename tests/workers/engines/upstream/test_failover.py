"""The sixteen failover scenarios, and more, for each kind of server: what a reader gets is the whole answer, once."""

from __future__ import annotations

import asyncio
import json

import pytest
from fake_upstream import ANSWER, FakeUpstream, Fault
from flow import until
from upstream_bench import HELLO, asked_of, bench

from penstock.tools import Tool, Tools
from workers.engines.upstream.http import MAX_LINE_BYTES

pytestmark = pytest.mark.slow

TOKENS = 70
WHOLE = "".join(ANSWER[:TOKENS])
CUT = Fault(after=5, cut=True)
REFUSED = Fault(status=400, only_continued=True)
NESTED = json.dumps({"error": {"message": "gone", "code": 500}}).encode()
FLAT = json.dumps({"object": "error", "message": "gone", "code": 500}).encode()

SCENARIOS: dict[str, list[Fault]] = {
    "S01 429 with Retry-After": [Fault(status=429, headers=(("Retry-After", "0.2"),))],
    "S02 429 without": [Fault(status=429)],
    "S03 500": [Fault(status=500)],
    "S04 503": [Fault(status=503), Fault(status=503)],
    "S05 reset before the head": [Fault(reset=True)],
    "S06 silence": [Fault(silent_s=30)],
    "S07 a slow first token": [Fault(slow_s=30)],
    "S08 cut after 40 tokens": [Fault(after=40, cut=True)],
    "S09 the end after 60 tokens": [Fault(after=60, end=True)],
    "S10 a stall": [Fault(after=10, stall_s=30)],
    "S11 a malformed chunk": [Fault(after=10, data=b'data: {"choices": [{"index"\n\n')],
    "S12 no DONE": [Fault(no_done=True)],
    "S13 DONE alone": [Fault(after=10, done=True)],
    "S14 a refused continuation": [Fault(after=10, cut=True), REFUSED, REFUSED],
    "S15 an error inside the stream": [Fault(after=10, data=b"data: " + NESTED + b"\n\ndata: [DONE]\n\n")],
    "S16 a flapping server": [CUT, Fault(reset=True), CUT, Fault(status=502), Fault(after=5, end=True)],
    "a flat error": [Fault(after=10, data=b"data: " + FLAT + b"\n\n")],
    "an error of TGI": [Fault(after=10, data=b'data: {"error": "gone", "error_type": "generation"}\n\n')],
    "busy inside the stream": [Fault(data=b'data: {"error": {"message": "full", "code": 503}}\n\n')],
    "aborted": [Fault(after=10, finish="abort")],
    "values of wrong types": [Fault(after=10, data=b'data: {"choices": [{"text": 5, "delta": {"content": []}}]}\n\n')],
    "nulls": [Fault(after=10, data=b'data: {"choices": [null], "usage": null}\n\n')],
    "no object": [Fault(after=10, data=b"data: [1, 2]\n\n")],
}  # fmt: skip

NEVER_BROKEN = ("S01", "S02", "S03", "S04", "S05", "S06", "S07", "S12", "busy")
"""Scenarios in which nothing was shown when the fault came."""
KINDS = ("vllm", "sglang", "llama-server", "trtllm", "ollama", "openai", "other")
CONTINUES = ("vllm", "sglang", "llama-server", "ollama")
"""Kinds that continue a sampled chat."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scenario", SCENARIOS)
async def test_a_reader_gets_the_whole_answer_once(scenario: str, kind: str) -> None:
    """Of a sampled chat: continued where the server can, and begun again where it cannot."""
    fake = FakeUpstream(kind, SCENARIOS[scenario])
    answer = await asked_of(fake, max_tokens=TOKENS)
    assert answer.failure is None and (answer.text, answer.finish) == (WHOLE, "length")
    assert answer.tokens == TOKENS
    assert answer.prompt_tokens == 3
    shown = not scenario.startswith(NEVER_BROKEN)
    refused = scenario.startswith("S14") and kind in CONTINUES
    assert bool(answer.restarts) == (shown and (kind not in CONTINUES or refused))
    assert not fake.faults or fake.faults[0].only_continued


FINISH = b'data: {"choices": [{"index": 0, "delta": {}, "text": "", "finish_reason": "length"}]}\n\n'
PATIENT = {"first_token_s": 60, "between_tokens_s": 60}
LAST_WORDS = {
    "a huge count": FINISH + b'data: {"choices": [], "usage": {"prompt_tokens": 1%s}}\n\n' % (b"0" * 30),
    "a negative count": FINISH + b'data: {"choices": [], "usage": {"completion_tokens": -1}}\n\n',
    "a count of a wrong type": FINISH + b'data: {"choices": [], "usage": {"completion_tokens": true}}\n\n',
    "usage of a wrong type": FINISH + b'data: {"choices": [], "usage": "many"}\n\n',
    "half a chunk": FINISH + b'data: {"choices": [], "usage": {"comp\n\n',
    "a count in the chunk that finishes": FINISH[:-3] + b', "usage": {"prompt_tokens": 1e300}}\n\n',
    "a line without an end": FINISH + b"data: " + b"x" * (MAX_LINE_BYTES + 9),
    "an error": FINISH + b"data: " + NESTED + b"\n\n",
}  # fmt: skip
"""What servers say at the end of an answer that is complete."""


@pytest.mark.parametrize(
    ("kind", "burst"), [("vllm", False), ("vllm", True), ("llama-server", False), ("openai", True)]
)
@pytest.mark.parametrize("last", LAST_WORDS)
async def test_a_finished_answer_counts_whatever_follows(last: str, kind: str, burst: bool) -> None:
    """It is not computed again, and its tokens are counted as of a server that gives no counts."""
    fake = FakeUpstream(kind, [Fault(after=TOKENS, data=LAST_WORDS[last])])
    fake.burst = burst
    async with bench(fake, **PATIENT) as desk:
        answer = await desk.ask(HELLO, max_tokens=TOKENS)
        counted = desk.engine.stats().miscounted
    assert answer.failure is None and (answer.text, answer.finish) == (WHOLE, "length")
    assert answer.tokens == TOKENS and answer.prompt_tokens in (0, 3)
    assert len(fake.sent) == 1
    assert counted == int("error" not in last and "without an end" not in last)


async def test_calls_that_end_malformed_are_no_finished_answer() -> None:
    """The chunk that brings the finish reason also brings more of a call that another one has followed."""
    calls: list[object] = [{"index": n, "function": {"name": "f", "arguments": "{"}} for n in (0, 1)]
    calls.append({"index": 0, "function": {"arguments": "}"}})
    bad = {"choices": [{"index": 0, "delta": {"tool_calls": calls}, "finish_reason": "tool_calls"}]}
    fake = FakeUpstream("vllm", [Fault(data=b"data: " + json.dumps(bad).encode() + b"\n\n")])
    async with bench(fake, **PATIENT) as desk:
        await desk.ask(HELLO, max_tokens=5, tools=Tools(offered=(Tool("f"),)))
        assert len(fake.sent) == 2 and desk.engine.stats().miscounted == 0


@pytest.mark.parametrize("kind", KINDS)
async def test_a_replay_shows_nothing_twice(kind: str) -> None:
    """At temperature 0 no server needs to begin again."""
    async with bench(FakeUpstream(kind, [Fault(after=33, cut=True)])) as desk:
        answer = await desk.ask(HELLO, max_tokens=TOKENS, temperature=0)
    assert (answer.text, answer.tokens, answer.restarts) == (WHOLE, TOKENS, 0)


WAYS = {
    ("llama-server", "chat"): "token ids", ("llama-server", "text"): "token ids",
    ("vllm", "chat"): "token ids", ("vllm", "text"): "token ids",
    ("sglang", "chat"): "prefill", ("sglang", "text"): "token ids",
    ("trtllm", "text"): "text", ("other", "text"): "text",
    ("ollama", "chat"): "prefill", ("ollama", "text"): "text",
}  # fmt: skip
"""By kind and request, how an answer is continued; docs/upstream.md says the same."""


@pytest.mark.parametrize(("kind", "form"), WAYS)
async def test_each_kind_is_continued_by_its_best_way(kind: str, form: str) -> None:
    fake = FakeUpstream(kind, [Fault(after=20, cut=True)])
    answer = await asked_of(fake, HELLO if form == "chat" else "Say:", max_tokens=TOKENS)
    first, second = fake.sent
    assert (answer.text, answer.tokens, answer.restarts) == (WHOLE, TOKENS, 0)
    assert second.body["max_tokens"] == TOKENS - 20
    way = WAYS[kind, form]
    prompt = second.body.get("prompt")
    if way == "token ids":
        assert isinstance(prompt, list) and prompt[-20:] == list(range(1000, 1020))
    elif way == "text":
        assert prompt == "Say:" + "".join(ANSWER[:20])
    else:
        assert second.body["messages"][-1] == {"role": "assistant", "content": "".join(ANSWER[:20])}
        assert len(second.body["messages"]) == len(first.body["messages"]) + 1


@pytest.mark.parametrize("first", CONTINUES)
@pytest.mark.parametrize("second", CONTINUES)
async def test_a_mixed_pool_continues_at_another_kind(first: str, second: str) -> None:
    """The server that began dies for good; one of another kind goes on in its own way, and nothing shows it."""
    dying, other = FakeUpstream(first, step_s=0.01), FakeUpstream(second)
    async with bench(dying, other) as desk:
        asking = asyncio.create_task(desk.ask(HELLO, max_tokens=TOKENS))
        await until(lambda: any(piece.n for step in desk.steps for piece in step))
        await dying.stop()
        answer = await asking
    assert (answer.text, answer.tokens, answer.finish) == (WHOLE, TOKENS, "length")
    assert (answer.restarts, answer.returns, answer.prompt_tokens) == (0, 0, 3)
    assert [sent.continues for sent in other.sent] == [True]
