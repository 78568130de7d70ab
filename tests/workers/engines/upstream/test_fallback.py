"""Fallback to other models: which requests, when, and how the answer says so."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from fake_upstream import ANSWER, FakeUpstream, Fault, serving
from flow import until
from msgspec.structs import replace
from upstream_bench import HELLO, Bench, bench, rest

from penstock.config import ConfigError
from penstock.engine import Capabilities, ChatTurn, ModelCard, Request, Sampling
from penstock.tools import Call, Tool, ToolCall, Tools, read_answer
from workers.engines.upstream import server
from workers.engines.upstream.endpoints import checked_models
from workers.engines.upstream.generation import UpstreamGeneration
from workers.engines.upstream.pool import suits
from workers.engines.upstream.settings import UpstreamSettings

pytestmark = pytest.mark.slow

TOKENS = 30
WHOLE = "".join(ANSWER[:TOKENS])
ALL = Capabilities(
    logprobs=5, json_schema=True, penalties=True, token_prompts=True, tools=True, forced_tools=True, top_k=True,
    min_p=True, repetition_penalty=True, logit_bias=True, ignore_eos=True,
)  # fmt: skip
CARD = ModelCard(name="b", engine="upstream", context=1000, max_output=500, capabilities=ALL, created=1)
TOOLS = Tools(offered=(Tool("get_time"),))
CALLS: list[dict[str, Any]] = [
    {"tool_calls": [{"index": 0, "id": "x", "type": "function", "function": {"name": "get_time", "arguments": "{}"}}]}
]


# --- rules -----------------------------------------------------------------------------------------------------------

CHAT = Request("r", HELLO, Sampling(max_tokens=10))


CALLED = (*HELLO, ChatTurn("assistant", "", (ToolCall("c", "get_time", "{}"),)), ChatTurn("tool", "9", call_id="c"))
NEEDS: dict[str, tuple[Request, dict[str, Any]]] = {
    "tools": (replace(CHAT, tools=TOOLS), {"tools": False}),
    "calls in the conversation": (replace(CHAT, prompt=CALLED), {"tools": False}),
    "a forced call": (replace(CHAT, tools=Tools(offered=TOOLS.offered, choice="required")), {"forced_tools": False}),
    "JSON": (replace(CHAT, sampling=Sampling(json_schema={})), {"json_schema": False}),
    "logprobs": (replace(CHAT, sampling=Sampling(logprobs=3)), {"logprobs": 2}),
    "penalties": (replace(CHAT, sampling=Sampling(presence_penalty=1)), {"penalties": False}),
    "top_k": (replace(CHAT, sampling=Sampling(top_k=5)), {"top_k": False}),
    "min_p": (replace(CHAT, sampling=Sampling(min_p=0.1)), {"min_p": False}),
    "no end": (replace(CHAT, sampling=Sampling(ignore_eos=True)), {"ignore_eos": False}),
    "repetition": (replace(CHAT, sampling=Sampling(repetition_penalty=1.1)), {"repetition_penalty": False}),
    "raw prompts": (replace(CHAT, prompt="a"), {"text_prompts": False}),
    "conversations": (CHAT, {"chat": False}),
}


@pytest.mark.parametrize("need", NEEDS)
def test_a_fallback_that_lacks_what_a_request_needs_is_not_used(need: str) -> None:
    request, lacking = NEEDS[need]
    assert suits(CARD, request)
    assert not suits(replace(CARD, capabilities=replace(ALL, **lacking)), request)


def test_token_ids_are_of_one_model_alone_and_sizes_are_kept() -> None:
    assert not suits(CARD, replace(CHAT, prompt=[1, 2]))
    assert not suits(CARD, replace(CHAT, sampling=Sampling(logit_bias={5: 1.0})))
    assert not suits(CARD, replace(CHAT, sampling=Sampling(max_tokens=501)))
    assert not suits(CARD, replace(CHAT, prompt="abcd" * 991)) and suits(CARD, replace(CHAT, prompt="abcd" * 900))


@pytest.mark.parametrize("what", ["away", "has broken it", "has a limit", "not seen yet"])
def test_a_fallback_that_cannot_be_used_is_passed_by(what: str) -> None:
    """By the next one; without one the request waits, or goes to its own servers once more."""
    some = UpstreamSettings(urls=("http://gpu-1:8000/v1",))
    engine = Bench(replace(some, fallback=("b", "c")), {"b": some, "c": some}).engine
    own, other, third = engine._pools
    for pool in engine._pools:
        pool.card, pool.endpoints[0].facts = CARD, server.of("vllm")
    generation, now = UpstreamGeneration(CHAT, 0.0), time.monotonic()
    own.endpoints[0].breaker.fail("gone", now, "down")
    if what == "away":
        other.endpoints[0].breaker.fail("gone", now, "down")
    elif what == "has a limit":
        other.endpoints[0].held_until = now + some.fallback_after_s + 60
    generation.counts.by_model["b"] = 2 * (what == "has broken it")
    other.card = None if what == "not seen yet" else CARD
    assert engine._choose(generation)[0] is third
    third.endpoints[0].breaker.fail("gone", now, "down")
    assert engine._choose(generation)[0] is None
    own.endpoints[0].breaker.succeed()
    generation.counts.by_model["m"] = 3
    assert engine._choose(generation)[0] is own


# --- the engine ------------------------------------------------------------------------------------------------------


async def ready(desk: Bench) -> Bench:
    await until(lambda: all(pool.ready for pool in desk.engine._pools))
    return desk


async def test_a_server_that_is_away_is_stood_in_for() -> None:
    """Once it is back, it gets the next request."""
    own, other = FakeUpstream("vllm"), FakeUpstream("other")
    async with bench(own, fallbacks={"b": other}) as desk:
        await ready(desk)
        await own.stop()
        first = await desk.ask(HELLO, max_tokens=TOKENS)
        await own.start()
        await until(lambda: desk.engine._own.ready)
        second = await desk.ask(HELLO, max_tokens=TOKENS)
    assert (first.text, first.tokens, first.finish, first.served_by) == (WHOLE, TOKENS, "length", ["b"])
    assert (first.pieces[0].served_by, first.prompt_tokens, first.restarts) == ("b", 3, 0)
    assert (second.text, second.served_by) == (WHOLE, [])


@pytest.mark.parametrize("fault", [Fault(reset=True), Fault(status=500), Fault(cut=True), Fault(data=b"data: no\n\n")])
async def test_a_request_that_is_broken_twice_before_its_first_token_falls_back(fault: Fault) -> None:
    own, other = FakeUpstream("vllm", [fault] * 5), FakeUpstream("vllm")
    async with bench(own, fallbacks={"b": other}) as desk:
        answer = await (await ready(desk)).ask(HELLO, max_tokens=TOKENS)
    assert (answer.text, answer.served_by, len(other.sent)) == (WHOLE, ["b"], 1)
    resent = len(own.sent) - 2  # a reset of an idle connection counts as none; a probe may leave a second one
    assert resent in ((1, 2) if fault.reset else (0,))


async def test_a_rate_limit_that_holds_for_long_leads_to_a_fallback() -> None:
    """Two requests are refused, and the key rests; the third is not sent there."""
    own = FakeUpstream("openai", [Fault(status=429, headers=(("Retry-After", "60"),))] * 2)
    async with bench(own, fallbacks={"b": FakeUpstream("vllm")}, fallback_after_s=0.3) as desk:
        await ready(desk)
        answers = [await desk.ask(HELLO, max_tokens=TOKENS) for _ in range(3)]
        assert desk.engine.stats().accepts
    assert [(answer.text, answer.served_by) for answer in answers] == [(WHOLE, ["b"])] * 3 and len(own.sent) == 2


async def test_a_refused_request_falls_back_to_nobody() -> None:
    other = FakeUpstream("vllm")
    async with bench(FakeUpstream("vllm", [Fault(status=422)]), fallbacks={"b": other}) as desk:
        answer = await (await ready(desk)).ask(HELLO, max_tokens=TOKENS)
    assert answer.failure is not None and answer.failure.status == 422 and not other.sent


@pytest.mark.parametrize("began", ["own", "fallback"])
async def test_an_answer_waits_for_the_model_that_began_it(began: str) -> None:
    """The other model is there all the time, and never goes on with it."""
    own, other = FakeUpstream("vllm", step_s=0.05), FakeUpstream("vllm", step_s=0.05)
    async with bench(own, fallbacks={"b": other}) as desk:
        await ready(desk)
        beginner, bystander = (own, other) if began == "own" else (other, own)
        if began == "fallback":
            await own.stop()
        asking = asyncio.create_task(desk.ask(HELLO, max_tokens=TOKENS))
        await until(lambda: sum(piece.n for step in desk.steps for piece in step) > 3)
        if began == "fallback":
            await own.start()
            await until(lambda: desk.engine._own.ready)
        seen = len(bystander.sent)
        await beginner.stop()
        await until(lambda: bool(desk.engine._held))
        assert desk.engine.stats().accepts, "new requests find the other model"
        await beginner.start()
        answer = await asking
    assert (answer.text, answer.tokens, answer.restarts, answer.returns) == (WHOLE, TOKENS, 0, 0)
    assert answer.served_by == ([] if began == "own" else ["b"]) and len(bystander.sent) == seen


async def test_a_lost_workers_answer_goes_on_with_the_model_that_began_it() -> None:
    own, other = FakeUpstream("vllm"), FakeUpstream("vllm")
    past = [(text, (1000 + number,), 1) for number, text in enumerate(ANSWER[:10])]
    async with bench(own, fallbacks={"b": other}) as desk:
        await ready(desk)
        request = Request("r", HELLO, Sampling(max_tokens=TOKENS), past, served_by="b")
        text = "".join([piece.text for piece in await rest(desk.begin(request))])
        assert not desk.engine.restart_reason(request)
        assert "no fallback any more" in desk.engine.restart_reason(replace(request, served_by="gone"))
    assert text == "".join(ANSWER[10:TOKENS]) and not own.sent and other.sent[0].continues


async def test_a_request_that_no_fallback_can_do_waits_for_its_own_model() -> None:
    """And others do not; it is cancelled at once."""
    own, other = FakeUpstream("vllm"), FakeUpstream("llama-server")
    own.deltas = CALLS
    async with bench(own, fallbacks={"b": other}) as desk:
        await ready(desk)
        await own.stop()
        plain = await desk.ask(HELLO, max_tokens=TOKENS)
        asking = asyncio.create_task(desk.ask(HELLO, tools=TOOLS))
        await until(lambda: bool(desk.engine._held))
        assert (await desk.ask(HELLO, max_tokens=3)).served_by == ["b"]
        queue = desk.begin(Request("held", HELLO, Sampling(), tools=TOOLS))
        await until(lambda: "held" in desk.engine._held)
        desk.engine.cancel("held")
        assert (await asyncio.wait_for(queue.get(), 30)).finish == "cancelled" and "held" not in desk.engine._held
        await own.start()
        called = await asking
    assert plain.served_by == ["b"] and called.served_by == []
    assert read_answer((called.text,))[1] == [Call("get_time", "{}")]


async def test_all_models_away_give_the_request_back() -> None:
    own, other = FakeUpstream("vllm"), FakeUpstream("vllm")
    async with bench(own, fallbacks={"b": other}) as desk:
        await ready(desk)
        await own.stop()
        await other.stop()
        asking = asyncio.create_task(desk.ask(HELLO, max_tokens=TOKENS))
        await until(lambda: not desk.engine.stats().accepts)
        await other.start()
        answer = await asking
    assert (answer.text, answer.served_by) == (WHOLE, ["b"]) and answer.returns > 0


async def test_a_worker_starts_with_a_fallback_alone() -> None:
    """Its card has its own name, and what the fallback can do."""
    other = FakeUpstream("llama-server")
    async with serving(other):
        settings = UpstreamSettings(urls=("http://127.0.0.1:9/v1",), fallback=("b",), fallback_after_s=0.1)
        desk = Bench(settings, {"b": UpstreamSettings(urls=(other.url,))})
        await desk.start()
        answer = await desk.ask(HELLO, max_tokens=TOKENS)
        await desk.engine.stop()
    assert desk.card is not None and (desk.card.name, desk.card.context) == ("m", 2048)
    assert (answer.text, answer.served_by) == (WHOLE, ["b"])


async def test_a_fallback_gets_half_of_its_servers_budget() -> None:
    own, other = FakeUpstream("llama-server"), FakeUpstream("llama-server", step_s=0.005)
    own.slots = other.slots = 8
    async with bench(own, fallbacks={"b": other}) as desk:
        await ready(desk)
        desk.engine.share(1)
        await own.stop()
        await asyncio.gather(*(desk.ask(HELLO, max_tokens=10) for _ in range(16)))
    assert other.most_running == 4


# --- settings --------------------------------------------------------------------------------------------------------

URLS = ("http://h/v1",)


@pytest.mark.parametrize(
    ("fallbacks", "problem"),
    [
        ({"a": ("gone",)}, "no model with engine upstream"),
        ({"a": ("a",)}, "is the model itself"),
        ({"a": ("b", "b"), "b": ()}, "named twice"),
    ],
)
def test_fallbacks_that_cannot_be_are_refused(fallbacks: dict[str, tuple[str, ...]], problem: str) -> None:
    models = {name: UpstreamSettings(urls=URLS, fallback=others) for name, others in fallbacks.items()}
    with pytest.raises(ConfigError, match=problem) as caught:
        list(checked_models("a", models["a"], models.get))
    assert caught.value.key == "models.a.options.fallback"


def test_fallbacks_of_fallbacks_are_not_followed() -> None:
    models = {name: UpstreamSettings(urls=URLS, fallback=(other,)) for name, other in ("ab", "bc", "ca")}
    assert [model.name for model in checked_models("a", models["a"], models.get)] == ["a", "b"]
