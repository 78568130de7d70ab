"""Conversations in both forms: a chat and the message that says the same are the same job, there and back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from api.anthropic.blocks import sent_messages
from api.openai.errors import ApiError
from api.openai.rendering import to_json
from api.openai.results import input_object
from api.openai.schemas import Kind, ignored_fields, parse, to_job
from penstock.engine import Capabilities, ModelCard
from streaming.jobs.job import Chat, Job
from streaming.order import Priority

CARDS = [
    None,
    *(
        ModelCard(name="m", engine="e", context=100, max_output=9, capabilities=Capabilities(**can), created=1)
        for can in ({}, {"reasoning": True, "reasoning_effort": True}, {"passes_fields": True})
    ),
]


def job(kind: Kind, body: dict[str, Any], card: ModelCard | None = None) -> Job:
    asked = parse(kind, to_json(body))
    return to_job(asked, tenant="t", ceiling=Priority.INTERACTIVE, card=card)


def of_chat(message: Job) -> Job:
    """The job of a message, without what only its dialect shows."""
    return replace(message, message=None, v=1)


text = st.text(max_size=12)
names = st.from_regex(r"[a-z]{1,6}", fullmatch=True)
arguments = st.dictionaries(names, st.one_of(text, st.integers(-9, 9), st.booleans(), st.none()), max_size=3)
calls = st.lists(st.tuples(names, arguments), min_size=1, max_size=3)


def called(made: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Calls as chats have them, whose arguments are written as briefly as can be."""
    written = [json.dumps(given, separators=(",", ":"), ensure_ascii=False) for _, given in made]
    return [
        {"id": f"call_{name}{at}", "function": {"name": name, "arguments": written[at]}}
        for at, (name, _) in enumerate(made)
    ]


said = st.one_of(
    st.builds(lambda words: {"role": "user", "content": words}, text),
    st.builds(lambda words: {"role": "system", "content": words}, text),
    st.builds(lambda words: {"role": "user", "content": [{"type": "text", "text": each} for each in words]},
              st.lists(text, min_size=1, max_size=3)),
    st.builds(lambda words, thought: {"role": "assistant", "content": words, "reasoning_content": thought}, text, text),
    st.builds(lambda words, made: {"role": "assistant", "content": words or None, "tool_calls": called(made)}, text,
              calls),
    st.builds(lambda name, words: {"role": "tool", "tool_call_id": f"call_{name}0", "content": words}, names, text),
)  # fmt: skip
conversations = st.lists(said, max_size=6).map(lambda turns: [*turns, {"role": "user", "content": "go"}])


@given(conversations, st.sampled_from(CARDS))
def test_a_conversation_is_the_same_job_in_both_forms(messages: list[dict[str, Any]], card: ModelCard | None) -> None:
    chat = {"model": "m", "messages": messages, "max_tokens": 9}
    open_card = CARDS[-1]
    full = job("chat", chat, open_card)
    assert isinstance(full.prompt, Chat)
    body = {"model": "m", "max_tokens": 9, **sent_messages(full.prompt.turns)}
    message = job("message", body, card)
    assert of_chat(message) == job("chat", chat, card)
    shown = input_object(job("message", body, open_card))
    assert job("message", {**shown, "stream": None}, card) == message


tools = st.lists(names, min_size=1, max_size=3, unique=True)
schemas = st.sampled_from([{"type": "object"}, {"type": "object", "properties": {"a": {"type": "string"}}}])
choices = st.sampled_from(["auto", "required", "none", "first"])


@given(tools, schemas, st.booleans(), choices, st.booleans())
def test_tools_are_the_same_in_both_forms(
    offered: list[str], schema: dict[str, Any], strict: bool, choice: str, parallel: bool
) -> None:
    messages = [{"role": "user", "content": "go"}]
    named = {"type": "function", "function": {"name": offered[0]}} if choice == "first" else choice
    functions = [{"name": name, "description": "d", "parameters": schema, "strict": strict} for name in offered]
    chat = {"tools": [{"type": "function", "function": each} for each in functions], "tool_choice": named}
    chat |= {"parallel_tool_calls": parallel}
    kinds = {"auto": "auto", "required": "any", "none": "none", "first": "tool"}
    given_choice = {"type": kinds[choice], "disable_parallel_tool_use": not parallel}
    given_choice |= {"name": offered[0]} if choice == "first" else {}
    custom = [{"name": name, "description": "d", "input_schema": schema, "strict": strict} for name in offered]
    base = {"model": "m", "messages": messages, "max_tokens": 9}
    message = job("message", base | {"tools": custom, "tool_choice": given_choice})
    assert of_chat(message) == job("chat", base | chat)
    assert job("message", {**input_object(message), "stream": None}) == message


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize(
    ("chat", "message"),
    [
        ({"stop": ["a", "b"]}, {"stop_sequences": ["a", "b"]}),
        ({"temperature": 0.5, "top_p": 0.9, "top_k": 4}, {"temperature": 0.5, "top_p": 0.9, "top_k": 4}),
        ({"user": "u", "metadata": {"user_id": "u"}}, {"metadata": {"user_id": "u"}}),
        ({}, {"thinking": {"type": "adaptive"}, "cache_control": {"type": "ephemeral"}}),
        ({"service_tier": "default"}, {"service_tier": "standard_only"}),
        ({"queue": {"priority": "batch", "deadline_ms": 9}}, {"queue": {"priority": "batch", "deadline_ms": 9}}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}},
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}},
            {"output_format": {"type": "json_schema", "schema": {"type": "object"}}},
        ),
    ],
)
def test_options_are_the_same_in_both_forms(
    chat: dict[str, Any], message: dict[str, Any], card: ModelCard | None
) -> None:
    base = {"model": "m", "messages": [{"role": "user", "content": "go"}], "max_tokens": 9}
    asked = replace(job("chat", base | chat, card), passed={})
    found = job("message", base | message, card)
    assert replace(of_chat(found), passed={}, metadata=asked.metadata) == asked
    assert found.passed == ({"user": "u"} if card is CARDS[-1] and "user" in chat else {})


def test_the_input_has_what_was_asked_for() -> None:
    """Empty stop sequences ask for nothing; thinking that is not to be displayed is not."""
    base = {"model": "m", "messages": [{"role": "user", "content": "go"}], "max_tokens": 9}
    options = {"stop_sequences": ["", "a"], "output_config": {"effort": "low"}}
    for display, shows in (("summarized", True), ("omitted", False)):
        made = job("message", base | options | {"thinking": {"type": "adaptive", "display": display}}, CARDS[2])
        shown = input_object(made)
        assert (shown["stop_sequences"], shown["output_config"]["effort"]) == (["a"], "low")
        assert made.message is not None and made.message.thinking is shows


def test_effort_is_a_hint() -> None:
    """A model that can be told how much to think is told it; any other one gets the request as if it had none."""
    base = {"model": "m", "messages": [{"role": "user", "content": "go"}], "max_tokens": 9}
    able = CARDS[2]
    for effort, told in (("low", "low"), ("high", "high"), ("max", "xhigh")):
        asked = base | {"output_config": {"effort": effort}, "thinking": {"type": "adaptive"}}
        assert (
            job("message", asked, able).reasoning
            == told
            == job("chat", base | {"reasoning_effort": told}, able).reasoning
        )
        assert job("message", asked, CARDS[1]).reasoning == ""
    assert job("message", base | {"thinking": {"type": "disabled"}}, able).reasoning == "none"
    able = replace(able, capabilities=Capabilities(reasoning_effort=True))
    for options, told in (({"type": "enabled"}, "default"), ({"type": "adaptive", "display": "omitted"}, "")):
        assert job("message", base | {"thinking": options}, able).reasoning == told
    thinking = replace(able, capabilities=Capabilities(reasoning=True))
    assert job("message", base | {"thinking": {"type": "disabled"}}, thinking).reasoning == "default"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}]},
         "messages[0]"),
        ({"max_tokens": None}, "max_tokens"),
        ({"temperature": 1.5}, "temperature"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool"}, "tools": [{"name": "f", "input_schema": {}}]}, "tool_choice.name"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"stop": ["a"]}, "stop"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"priority": "batch"}, "priority"),
        ({"n": 2}, "n"),
    ],
)  # fmt: skip
def test_what_a_message_cannot_ask_for_is_refused(fields: dict[str, Any], param: str) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "go"}], "max_tokens": 9} | fields
    with pytest.raises(ApiError) as error:
        job("message", body)
    assert (error.value.status, error.value.param) == (400, param)


def test_what_has_no_effect_is_named() -> None:
    blocks = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]
    seen = [{"type": "server_tool_use", "id": "a"}, {"type": "redacted_thinking", "data": "x"}]
    body = {
        "model": "m",
        "max_tokens": 9,
        "messages": [{"role": "assistant", "content": seen}, {"role": "user", "content": blocks}],
        "tools": [{"type": "web_search_20250305", "name": "web_search"}],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "mcp_servers": [{}],
    }
    named = ["mcp_servers", "messages[].content[].server_tool_use", "messages[].content[].redacted_thinking"]
    expected = {*named, "tools[].web_search_20250305", "thinking.budget_tokens"}
    for card in (None, CARDS[-1]):  # no server of a model gets fields of this API
        assert expected <= {*ignored_fields(parse("message", json.dumps(body).encode()), card)}
        assert job("message", body, card).passed == {}
