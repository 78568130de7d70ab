"""Tools through the engine `upstream`: what each kind of server is sent, and what becomes of its calls."""

from __future__ import annotations

from typing import Any

import pytest
from fake_upstream import FakeUpstream, Fault
from upstream_bench import HELLO, asked_of, bench

from penstock.engine import ChatTurn
from penstock.tools import Call, Tool, ToolCall, Tools, read_answer

KINDS = ("vllm", "sglang", "llama-server", "trtllm", "ollama", "openai", "other")
WEATHER, TIME = Tool("get_weather", "", {"type": "object", "properties": {}}), Tool("get_time")
BOTH = Tools(offered=(WEATHER, TIME))
NAMED = [
    {"index": at, "id": f"x{at + 1}", "type": "function", "function": {"name": tool.name, "arguments": ""}}
    for at, tool in enumerate((WEATHER, TIME))
]
DELTAS: list[dict[str, Any]] = [
    {"content": "So "},
    {"tool_calls": NAMED[:1]},
    *({"tool_calls": [{"index": 0, "function": {"arguments": part}}]} for part in ('{"ci', 'ty": ', '"Bern"', "}")),
    {"tool_calls": NAMED[1:]},
]
CALLS = [Call("get_weather", '{"city": "Bern"}'), Call("get_time", "{}")]


def fake(kind: str, *faults: Fault) -> FakeUpstream:
    found = FakeUpstream(kind, faults)
    found.deltas, found.template = DELTAS, "{{ tools }}"
    return found


@pytest.mark.parametrize("kind", KINDS)
async def test_calls_come_through(kind: str) -> None:
    """The server's own ids do not: ours are made from the job."""
    upstream = fake(kind)
    answer = await asked_of(upstream, tools=BOTH)
    assert (answer.failure, answer.finish) == (None, "stop")
    assert read_answer((answer.text,))[:2] == ("So ", CALLS)
    assert answer.tokens >= len(DELTAS)
    (sent,) = upstream.sent
    assert sent.path.endswith("/chat/completions") and sent.body["tools"] == [WEATHER.shown, TIME.shown]
    assert sent.body["tool_choice"] == "auto"


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_server_lost_in_a_call_is_replayed_and_never_spliced(kind: str, sampling: dict[str, Any]) -> None:
    """At temperature 0 what was shown is checked, and only what is new comes out. Nobody can continue a sampled call,
    so the job starts from its first token."""
    upstream = fake(kind, Fault(after=4, cut=True))
    answer = await asked_of(upstream, tools=BOTH, **sampling)
    assert read_answer((answer.text,))[:2] == ("So ", CALLS) and answer.restarts == int(not sampling)
    first, second = (sent.body for sent in upstream.sent)
    assert first == second or not sampling


class Changing(FakeUpstream):
    """Calls another function from the second request on."""

    def _fault(self, body: dict[str, Any]) -> Fault:
        if len(self.sent) == 2:
            self.deltas = [DELTAS[0], DELTAS[-1]]
        return super()._fault(body)


async def test_a_replay_that_calls_another_function_is_not_joined() -> None:
    """The names of functions are compared too, and the job begins again."""
    upstream = Changing("vllm", [Fault(after=4, cut=True)])
    upstream.deltas = DELTAS
    answer = await asked_of(upstream, tools=BOTH, temperature=0)
    assert read_answer((answer.text,))[:2] == ("So ", [Call("get_time", "{}")]) and answer.restarts == 1


@pytest.mark.parametrize("kind", KINDS)
async def test_a_choice_is_sent_as_the_server_keeps_it(kind: str) -> None:
    """A llama-server does not keep a named choice, so it is offered that function alone, which it must call."""
    upstream = fake(kind)
    async with bench(upstream) as desk:
        await desk.ask(HELLO, tools=Tools(offered=BOTH.offered, choice="required", named="get_time", parallel=False))
        await desk.ask(HELLO, tools=Tools(offered=BOTH.offered, choice="required"))
        assert desk.card is not None and desk.card.capabilities.tools
        assert desk.card.capabilities.forced_tools == (kind != "ollama")
    named, required = [sent.body for sent in upstream.sent]
    if kind == "llama-server":
        assert (named["tools"], named["tool_choice"]) == ([TIME.shown], "required")
        assert required["parallel_tool_calls"] is True
    else:
        assert named["tools"] == [WEATHER.shown, TIME.shown]
        assert named["tool_choice"] == {"type": "function", "function": {"name": "get_time"}}
        assert "parallel_tool_calls" not in required
    assert named["parallel_tool_calls"] is False and required["tool_choice"] == "required"


@pytest.mark.parametrize("kind", KINDS)
async def test_a_schema_goes_beside_tools_where_the_server_does_both(kind: str) -> None:
    """Elsewhere the API refuses it, by the model card."""
    upstream = fake(kind)
    async with bench(upstream) as desk:
        assert desk.card is not None and desk.card.capabilities.tools_with_schema == (kind == "openai")
        await desk.ask(HELLO, tools=BOTH, json_schema={"type": "object"})
    (sent,) = upstream.sent
    assert len(sent.body["tools"]) == 2
    if kind == "openai":
        assert sent.body["response_format"]["json_schema"]["schema"] == {"type": "object"}


async def test_history_with_calls_is_passed_on() -> None:
    called = ChatTurn("assistant", "", (ToolCall("c1", "get_time", "{}"),))
    upstream = fake("openai")
    async with bench(upstream) as desk:
        await desk.ask((*HELLO, called, ChatTurn("tool", "noon", call_id="c1")), tools=BOTH)
    calls = [{"id": "c1", "type": "function", "function": {"name": "get_time", "arguments": "{}"}}]
    assert upstream.sent[0].body["messages"][1:] == [
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "noon", "tool_call_id": "c1"},
    ]


async def test_a_template_without_tools_is_told_on_the_card() -> None:
    upstream = fake("llama-server")
    upstream.template = "{{ messages }}"
    async with bench(upstream) as desk:
        assert not desk.card.capabilities.tools and not desk.card.capabilities.forced_tools
