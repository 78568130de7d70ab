"""Requests are read strictly, refused in one clear sentence, and turned into the job they ask for."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from api.openai.errors import ApiError
from api.openai.fields import UNKNOWN
from api.openai.responses.items import shown_turn
from api.openai.results import input_object
from api.openai.schemas import Kind, Request, clamp, ignored_fields, parse, to_job
from penstock.engine import Capabilities, ChatTurn, ModelCard, Sampling
from penstock.tools import Tool, ToolCall, Tools
from streaming.jobs.codec import decode_job, encode
from streaming.jobs.job import Chat, Job, Prompt, Text, Tokens
from streaming.order import Priority

MESSAGES = [{"role": "user", "content": "hi"}]
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "f", "description": "does f", "parameters": {"type": "object"}, "strict": True},
}
FLAT: dict[str, Any] = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
BASES: dict[Any, dict[str, Any]] = {
    "chat": {"messages": MESSAGES}, "completion": {"prompt": "x"}, "response": {"input": "x"}, "count": {"input": "x"},
    "job": {"messages": MESSAGES}, "embedding": {"input": "x"}, "rerank": {"query": "x", "documents": ["y"]},
    "tokenize": {"prompt": "x"}, "detokenize": {"tokens": [1]},
}  # fmt: skip
MODEL = {"model": "m"}
CANARY = "prompt-canary-5f1d"
IMAGE = {"type": "input_video", "image_url": "x"}
OUTPUT = {"type": "function_call_output", "call_id": "c"}


def said(*parts: Any) -> dict[str, Any]:
    """A message of a user in parts."""
    return {"role": "user", "content": [*parts]}


def chat(**fields: Any) -> Request:
    return parse("chat", json.dumps({"model": "m", "messages": MESSAGES} | fields).encode())


def text(**fields: Any) -> Request:
    return parse("completion", json.dumps({"model": "m", "prompt": "hi"} | fields).encode())


def job_of(request: Request, ceiling: Priority = Priority.INTERACTIVE) -> Job:
    return to_job(request, job_id="j1", tenant="t1", ceiling=ceiling, reply_to="r1", trace={"traceparent": "00-1"})


def refused(kind: Kind, body: dict[str, Any] | bytes) -> ApiError:
    with pytest.raises(ApiError) as raised:
        parse(kind, body if isinstance(body, bytes) else json.dumps(body).encode())
    assert (raised.value.status, raised.value.code) == (400, "invalid_request_error")
    assert raised.value.message.endswith(".")
    return raised.value


# --- what is accepted ----------------------------------------------------------------------------------------------


def test_a_full_chat_request_becomes_its_job() -> None:
    """Every field that is honoured arrives in the job, and the job survives the wire."""
    request = chat(
        max_completion_tokens=9, temperature=0, top_p=0.5, n=2, stop="END", seed=-7, logprobs=True, top_logprobs=3,
        presence_penalty=1, frequency_penalty=-1, response_format={"type": "json_object"}, stream=True,
        stream_options={"include_usage": True}, metadata={"a": "b"}, user="u",
        queue={"priority": "standard", "deadline_ms": 5000, "max_queue_ms": 100, "do_not_queue": True,
               "on_disconnect": "grace:30"},
    )  # fmt: skip
    job = job_of(request)
    assert job == Job(
        id="j1", model="m", tenant="t1", priority=Priority.STANDARD, prompt=Chat((ChatTurn("user", "hi"),)),
        sampling=Sampling(max_tokens=9, temperature=0, top_p=0.5, n=2, stop=("END",), seed=-7, logprobs=3,
                          presence_penalty=1, frequency_penalty=-1, json_schema={}),
        stream=True, reply_to="r1", deadline_ms=5000, max_queue_ms=100, trace={"traceparent": "00-1"},
        metadata={"a": "b"}, user="u", on_disconnect="grace:30",
    )  # fmt: skip
    assert decode_job(encode(job)) == job
    assert request.include_usage
    assert request.queue.do_not_queue
    assert ignored_fields(request) == []


def test_a_bare_request_leaves_everything_to_the_engine() -> None:
    """Defaults are the engine's; null means the same as leaving a field out."""
    fields = ("max_tokens", "max_completion_tokens", "temperature", "top_p", "n", "stop", "seed", "logprobs", "user",
              "top_logprobs", "response_format", "stream", "stream_options", "service_tier", "metadata", "queue",
              "presence_penalty", "frequency_penalty")  # fmt: skip
    assert chat().sampling == Sampling()
    assert job_of(chat(**dict.fromkeys(fields))) == job_of(chat())
    assert not chat().include_usage


@pytest.mark.parametrize(
    ("messages", "turns"),
    [
        ([{"role": "developer", "content": "be brief"}], [("system", "be brief")]),
        ([said({"type": "text", "text": "a"}, {"type": "text", "text": "b"})], [("user", "ab")]),
        ([{"role": "assistant"}, {"role": "tool", "content": "4", "tool_call_id": "c"}],
         [("assistant", ""), ("tool", "4", (), "c")]),
        ([{"role": "system", "content": ""}], [("system", "")]),
    ],
)  # fmt: skip
def test_messages_become_plain_turns(messages: list[Any], turns: list[tuple[Any, ...]]) -> None:
    """Text parts are joined, developer is system, an assistant may have said nothing."""
    assert job_of(chat(messages=messages)).prompt == Chat(tuple(ChatTurn(*turn) for turn in turns))


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", Text(("a",))),
        (["a", "b"], Text(("a", "b"))),
        ([1, 2], Tokens(((1, 2),))),
        ([[1], [2]], Tokens(((1,), (2,)))),
    ],
)
def test_a_prompt_has_four_forms(prompt: Any, expected: Prompt) -> None:
    """A text, texts, token ids, lists of token ids."""
    assert job_of(text(prompt=prompt)).prompt == expected


@pytest.mark.parametrize(
    ("request_", "field", "value"),
    [
        (text(logprobs=0), "logprobs", 0), (text(), "logprobs", None), (text(n=3, best_of=3), "n", 3),
        (chat(stop=["", "END"]), "stop", ("END",)), (chat(stop=""), "stop", ()), (chat(priority=0), "n", 1),
    ],
)  # fmt: skip
def test_fields_become_the_sampling(request_: Request, field: str, value: Any) -> None:
    """Empty stop strings would match everywhere; other servers' default priority asks for nothing."""
    assert getattr(request_.sampling, field) == value and request_.lane is Priority.INTERACTIVE


# --- lanes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tier", "queue", "lane"),
    [
        (None, {}, Priority.INTERACTIVE), ("auto", {}, Priority.INTERACTIVE), ("default", {}, Priority.STANDARD),
        ("flex", {}, Priority.BATCH), ("scale", {}, Priority.INTERACTIVE), ("priority", {}, Priority.INTERACTIVE),
        ("fast", {"priority": "batch"}, Priority.BATCH), ("flex", {"priority": "interactive"}, Priority.INTERACTIVE),
        ("flex", {"deadline_ms": 1}, Priority.BATCH),
    ],
)  # fmt: skip
def test_the_tier_names_a_lane_and_the_queue_object_wins(tier: Any, queue: dict[str, Any], lane: Priority) -> None:
    """OpenAI's tiers map to lanes; our own option is the more exact word."""
    assert job_of(chat(service_tier=tier, queue=queue)).priority is lane


@given(st.sampled_from(Priority), st.sampled_from(Priority))
def test_nobody_gets_above_the_ceiling(wanted: Priority, ceiling: Priority) -> None:
    """The lane is the one asked for, or the ceiling if that is lower."""
    lane = clamp(wanted, ceiling)
    assert lane.rank == max(wanted.rank, ceiling.rank)
    assert job_of(chat(queue={"priority": wanted}), ceiling).priority is lane


# --- jobs ------------------------------------------------------------------------------------------------------------


def test_a_job_is_the_body_of_its_endpoint() -> None:
    """Chat by default; in the standard lane and going on without a reader unless it says otherwise."""
    body = {"model": "m", "messages": MESSAGES}
    job = job_of(parse("job", json.dumps(body).encode()))
    assert job.prompt == Chat((ChatTurn("user", "hi"),))
    assert (job.priority, job.on_disconnect) == (Priority.STANDARD, "continue")
    assert job_of(parse("job", json.dumps(body | {"endpoint": "/v1/chat/completions"}).encode())) == job
    urgent = body | {"queue": {"priority": "interactive", "on_disconnect": "cancel"}}
    job = job_of(parse("job", json.dumps(urgent).encode()))
    assert (job.priority, job.on_disconnect) == (Priority.INTERACTIVE, "cancel")


# --- what is refused -------------------------------------------------------------------------------------------------

SCHEMA_FORM = {"type": "json_schema"}
GUIDED = "guided_json guided_regex guided_choice guided_grammar structured_outputs structural_tag json_schema regex"
REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    *(("chat", fields, param) for fields, param in (
        ({"model": None}, "model"), ({"messages": []}, "messages"), ({"messages": MESSAGES * 1025}, "messages"),
        ({"messages": [5]}, "messages[0]"), ({"messages": [{"content": "a"}]}, "messages[0].role"),
        ({"messages": [*MESSAGES, {"role": "user"}]}, "messages[1].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [said({"type": "text", "text": "a"}, {"type": "video_url"})]}, "messages[0].content[1].type"),
        ({"messages": [said({"type": "text"})]}, "messages[0].content[0].text"),
        ({"messages": [MESSAGES[0] | {"tool_calls": [CALL]}]}, "messages[0].tool_calls"),
        ({"messages": [*MESSAGES, {"role": "assistant", "tool_calls": [CALL | {"type": "custom"}]}]},
         "messages[1].tool_calls[0].type"),
        ({"messages": [*MESSAGES, {"role": "function", "content": "x"}]}, "messages[1]"),
        ({"tools": [TOOL | {"function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [TOOL | {"function": {"name": "f", "parameters": {"type": "string"}}}]},
         "tools[0].function.parameters"),
        ({"tools": [TOOL], "tool_choice": "always"}, "tool_choice"), ({"tools": [TOOL], "logprobs": True}, "logprobs"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [5]}}, "tool_choice"),
        *(({"max_tokens": value}, "max_tokens") for value in (0, True, 8.5, "8", [8.0])),
        ({"queue": {"deadline_ms": 8.5}}, "queue.deadline_ms"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
        ({"temperature": "0.5"}, "temperature"), ({"temperature": 2.1}, "temperature"),
        ({"stop": ["a"] * 5}, "stop"), ({"stop": ["a", 5, 6]}, "stop[1]"), ({"stop": {}}, "stop"),
        ({"stop": "a" * 257}, "stop"), ({"top_logprobs": 2}, "top_logprobs"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"metadata": {"a": "b" * 513}}, "metadata.a"), ({"metadata": {"a" * 65: "b"}}, "metadata"),
        ({"metadata": {str(number): 1 for number in range(17)}}, "metadata"),
        ({"queue": {"prioritty": "batch"}}, "queue.prioritty"),
        ({"queue": {"b": 1, "deadline_ms": 0}}, "queue.deadline_ms"),
        ({"queue": {"on_disconnect": "grace:3601"}}, "queue.on_disconnect"),
        ({"functions": [{"name": "f"}]}, "functions"), ({"function_call": {"name": "f"}}, "function_call"),
        ({"webhook": "https://example.org"}, "webhook"), ({"reasoning_effort": "max"}, "reasoning_effort"),
        ({"echo": True}, "echo"), ({"max_tokens": 9, "min_tokens": 5}, "min_tokens"), ({"min_tokens": 5}, "min_tokens"),
        ({"ignore_eos": True, "response_format": {"type": "json_object"}}, "ignore_eos"),
        ({"ignore_eos": True, "tools": [TOOL]}, "ignore_eos"),
        ({"max_tokens": 5, "min_tokens": 5, "response_format": {"type": "json_object"}}, "min_tokens"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": SCHEMA_FORM}, "response_format.json_schema"),
        ({"response_format": {"type": "text", "grammar": "root ::= x"}}, "response_format.grammar"),
        ({"response_format": {"type": "text", "json_schema": {"schema": {}}}}, "response_format.json_schema"),
        ({"response_format": SCHEMA_FORM | {"json_schema": {"schema": {"enum": ["x" * 2**19]}}}},
         "response_format.json_schema.schema"),
    )),
    *(("completion", fields, param) for fields, param in (
        ({"prompt": ""}, "prompt"), ({"prompt": []}, "prompt"), ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": ["a", 1]}, "prompt[1]"), ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": [[1], [-1]]}, "prompt[1][0]"),
        ({"prompt": [2**31]}, "prompt[0]"), ({"prompt": 5}, "prompt"), ({"suffix": "end"}, "suffix"),
        ({"n": 3, "best_of": 4}, "best_of"), ({"logprobs": 6}, "logprobs"), ({"tools": [TOOL]}, "tools"),
        ({"reasoning_effort": "low"}, "reasoning_effort"), ({"echo": True, "prompt": [[1], [2]]}, "echo"),
        ({"max_tokens": 0}, "max_tokens"), ({"echo": True, "max_tokens": -1}, "max_tokens"),
        ({"echo": True, "response_format": {"type": "json_object"}}, "echo"),
        ({"echo": True, "prompt": "a" * 600_000, "n": 2}, "echo"),
    )),
    # A kind of tool that cannot be named: it may be a function, misspelt.
    *((of, {"tools": [tool | {"type": kind}]}, "tools[0].type")
      for of, tool in (("chat", TOOL), ("response", FLAT)) for kind in ("Function", "web search", "x" * 65, None, 5)),
    # Constraints of other servers: an answer that was not held to them would be taken for one that was.
    *((kind, {name: {"type": "object"}}, name) for kind in ("chat", "completion", "job", "response")
      for name in GUIDED.split()),
    *((kind, {name: 1}, name) for kind in ("chat", "job", "embedding", "response")
      for name in ("priority", "deadline_ms", "do_not_queue", "on_disconnect")),
    *((kind, {name: value}, name) for kind in ("chat", "response") for name, value in (
        ("top_k", -2), ("repetition_penalty", 2.1), ("logit_bias", {"a": 1}), ("logit_bias", {"2147483648": 1}),
        ("logit_bias", {"01": 1}), ("logit_bias", {"\u0663": 1}), ("logit_bias", [5]),
        ("logit_bias", {str(number): 1 for number in range(1025)}),
    )),
    *(("chat", {"logit_bias": {"6": bias}}, "logit_bias.6") for bias in (100.5, "1", None, True)),
    *(("job", {"endpoint": endpoint}, "endpoint") for endpoint in ("/tokenize", None, 5, ["/v1/completions"])),
    ("embedding", {"input": []}, "input"), ("embedding", {"input": ["a", ""]}, "input[1]"),
    ("rerank", {"documents": [5]}, "documents[0]"), ("rerank", {"documents": [{"text": ""}]}, "documents[0].text"),
    ("tokenize", {"messages": MESSAGES}, "messages"), ("tokenize", {"return_token_strs": True}, "return_token_strs"),
    ("detokenize", {"tokens": "a"}, "tokens"),
    *(("response", fields, param) for fields, param in (
        ({"tool_choice": "required"}, "tool_choice"), ({"truncation": "some"}, "truncation"),
        ({"conversation": {"name": "c"}}, "conversation.id"), ({"conversation": ""}, "conversation"),
        ({"max_tokens": 5}, "max_tokens"), ({"messages": []}, "messages"), ({"n": 2}, "n"),
        ({"response_format": {"type": "text"}}, "response_format"), ({"include": [5]}, "include[0]"),
        ({"top_logprobs": 2}, "top_logprobs"), ({"background": True, "store": False}, "store"),
        ({"reasoning": {"effort": "most"}}, "reasoning.effort"),
        ({"text": {"format": SCHEMA_FORM | {"name": "x"}}}, "text.format.schema"),
        ({"input": [said(IMAGE)]}, "input[0].content[0].type"),
        ({"input": [said({"type": "input_text"})]}, "input[0].content[0].text"),
        ({"input": [OUTPUT]}, "input[0].output"), ({"input": [OUTPUT | {"output": {}}]}, "input[0].output"),
        ({"input": [{"type": "computer"}]}, "input[0].type"), ({"input": []}, "input"),
    )),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "fields", "param"), REFUSED)
def test_a_wrong_field_is_named_with_what_was_expected(kind: Kind, fields: dict[str, Any], param: str) -> None:
    """The param is the path; the message says what the field must be, or what to send instead."""
    error = refused(kind, {"model": "m"} | BASES[kind] | fields)
    assert error.param == param and error.message.startswith(param)
    assert error.message.rstrip(".") != f"{param} is not supported here"


@pytest.mark.parametrize(("kind", "base"), [("chat", {"messages": MESSAGES}), ("chat", MODEL), ("completion", MODEL)])
def test_what_is_missing_is_required(kind: Kind, base: dict[str, Any]) -> None:
    assert refused(kind, base).message.endswith(" is required.")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "not valid JSON"),
        (b'{"model": }', "line 1 column 11"),
        (b'{"n": NaN}', "n must be a finite number"),
        (b'{"messages": [{"unread": {"a": [0, -1e400]}}]}', "messages[0].unread.a[1] must be a finite number"),
        (b'{"unread": ' + b"1" * 400 + b".5}", "unread must be a finite number"),
        (b'{"unread": [1, {"a": 18446744073709551616}]}', "unread[1].a must be a finite number, of at most 64 bits"),
        (b'{"messages": [{"tool_calls": [{"x": -9223372036854775809}]}]}', "messages[0].tool_calls[0].x must be"),
        (b'{"unread": ' + b"1" * 5000 + b"}", "out of range"),
        (b'{"model": "\xff"}', "byte 12 is 0xff"),
        (b'{"model": "\\ud800"}', "not valid JSON"),
        (b"[" * 8_000, "more than 128 levels"),
        (b"[]", "must be a JSON object"),
    ],
)
def test_a_body_that_is_no_json_object_is_refused(body: bytes, words: str) -> None:
    """With the place where reading stopped."""
    assert words in refused("chat", body).message


def test_the_deepest_json_that_is_allowed_passes() -> None:
    """128 levels, where the next one is refused."""
    fields = b'{"model": "m", "messages": [{"role": "user", "content": "hi"}], "x": '
    assert parse("chat", fields + b"[" * 127 + b"]" * 127 + b"}")
    assert "levels" in refused("chat", fields + b"[" * 128 + b"]" * 128 + b"}").message


def test_a_forced_call_leaves_no_text_for_a_schema() -> None:
    """Where the model may choose, the engine has to hold its text to it."""
    for choice, schema in (("required", None), (None, {}), ("auto", {}), ("none", {})):
        asked = chat(tools=[TOOL], tool_choice=choice, response_format={"type": "json_object"})
        assert job_of(asked).sampling.json_schema == schema


# --- what is not honoured --------------------------------------------------------------------------------------------


NEUTRAL: list[tuple[str, Any]] = [
    ("tools", []), ("tools", None), ("tool_choice", "none"), ("tool_choice", "auto"), ("functions", []),
    ("parallel_tool_calls", False), ("logit_bias", {}), ("modalities", ["text"]), ("reasoning_effort", "none"),
    ("suffix", ""), ("echo", False), ("best_of", 1), ("webhook", None), ("guided_json", None),
]  # fmt: skip
NOT_HONOURED: list[tuple[str, Any]] = [
    ("modalities", ["text", "audio"]), ("audio", {"voice": "a", "format": "wav"}), ("web_search_options", {}),
    ("moderation", {}), ("store", True), ("verbosity", "low"), ("prompt_cache_key", "a"),
    ("prediction", {"type": "content", "content": "x"}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), NEUTRAL + NOT_HONOURED)
def test_what_nobody_honours_changes_nothing_and_is_named(name: str, value: Any) -> None:
    """Unless its value asks for nothing, which is honoured."""
    request = chat(**{name: value})
    assert job_of(request) == job_of(chat())
    assert ignored_fields(request) == ([name] if (name, value) in NOT_HONOURED else [])


HOSTED = ("web_search", "web_search_preview_2025_03_11", "file_search", "code_interpreter", "computer_use_preview",
          "image_generation", "mcp", "local_shell", "custom", "apply_patch")  # fmt: skip


@pytest.mark.parametrize("kind", HOSTED)
def test_a_tool_that_does_not_run_here_is_named_and_dropped(kind: str) -> None:
    """It is refused where tool_choice needs it."""
    hosted = {"type": kind, "name": "x", "server_label": "y", "container": {"type": "auto"}}
    for of, tool, base in (("chat", TOOL, {"messages": MESSAGES}), ("response", FLAT, {"input": "hi"})):

        def body(*tools: Any, of: Any = of, base: Any = base, **more: Any) -> Any:
            return parse(of, json.dumps({"model": "m", "tools": tools, **base, **more}).encode())

        alone, beside = body(hosted), body(hosted, tool)
        assert alone.tools_asked is None and beside.tools_asked == body(tool).tools_asked
        assert ignored_fields(alone) == ignored_fields(beside) == [f"tools[].{kind}"]
        for choice in ({"type": kind}, "required"):
            error = refused(of, {"model": "m", "tools": [hosted], "tool_choice": choice, **base})  # type: ignore[arg-type]
            assert (error.param or "").startswith("tool_choice") and error.status == 400
    chosen = {"type": "allowed_tools", "mode": "required", "tools": [{"type": kind}, {"type": "function", "name": "f"}]}
    asked = {"model": "m", "input": "hi", "tools": [hosted, FLAT], "tool_choice": chosen}
    tools = parse("response", json.dumps(asked).encode()).tools_asked
    assert tools is not None and [tool.name for tool in tools.offered] == ["f"]


def test_the_result_of_a_function_by_its_older_role_has_its_name() -> None:
    named = chat(messages=[*MESSAGES, {"role": "function", "content": "x", "name": "f"}])
    assert ignored_fields(named) == [] and named.prompt_asked.turns[-1].call_id == "f"  # type: ignore[union-attr]


def test_what_a_response_cannot_have_is_named() -> None:
    kinds = ("web_search_call", "computer_call_output", "mcp_list_tools", "local_shell_call_output", "compaction")
    items = [{"type": kind, "id": "x", "call_id": "c", "output": {"type": "computer_screenshot"}} for kind in kinds]
    said = {"role": "user", "content": "hi"}
    fields = {
        "input": [*items, said], "truncation": "auto", "text": {"verbosity": "low"}, "context_management": [],
        "reasoning": {"summary": "auto", "generate_summary": "concise"}, "moderation": {},
        "include": ["web_search_call.action.sources", "reasoning.encrypted_content"],
    }  # fmt: skip
    request = parse("response", json.dumps({"model": "m", **fields}).encode())
    plain = parse("response", json.dumps({"model": "m", "input": [said]}).encode())
    assert request.prompt_asked == plain.prompt_asked
    assert {f"input[].{kind}" for kind in kinds} <= {*ignored_fields(request)}
    few = parse("response", json.dumps({"model": "m", **fields, "input": [items[0], said]}).encode())
    assert set(ignored_fields(few)) == {
        "context_management", "moderation", "truncation", "include[].web_search_call.action.sources",
        "include[].reasoning.encrypted_content", "input[].web_search_call", "text.verbosity", "reasoning.summary",
        "reasoning.generate_summary",
    }  # fmt: skip


REFUSAL = {"type": "refusal", "refusal": "No."}
SAID_NO = (
    {"content": [REFUSAL]}, {"content": None, "refusal": "No."}, {"refusal": "No."},
    {"content": [{"type": "text", "text": "N"}, {"type": "refusal", "refusal": "o."}]},
    {"content": "No.", "refusal": None, "annotations": [], "audio": None, "function_call": None, "tool_calls": None},
    {"content": "No.", "reasoning_content": "why", "audio": {"id": "audio_1"}, "name": "a"},
)  # fmt: skip


@pytest.mark.parametrize("message", SAID_NO)
@pytest.mark.parametrize("kind", ["chat", "job", "tokenize"])
def test_a_refusal_is_what_the_assistant_said(kind: Any, message: dict[str, Any]) -> None:
    body = {"model": "m", "messages": [*MESSAGES, {"role": "assistant", **message}]}
    turn = parse(kind, json.dumps(body).encode()).prompt_asked.turns[-1]  # type: ignore[union-attr]
    assert (turn.role, turn.content) == ("assistant", "No.")
    if message.get("refusal") or message.get("content") == [REFUSAL]:
        assert turn.shown == {"role": "assistant", "content": None, **message}, "so a model's server gets it"


@pytest.mark.parametrize("message", [{"content": [REFUSAL]}, {"content": None, "refusal": "No."}])
@pytest.mark.parametrize("kind", ["response", "count"])
def test_a_refusal_is_an_item_of_the_input(kind: Any, message: dict[str, Any]) -> None:
    body = {"model": "m", "input": [{"type": "message", "role": "assistant", **message}]}
    turn = parse(kind, json.dumps(body).encode()).prompt_asked.turns[-1]  # type: ignore[union-attr]
    assert turn.content == "No." and turn.shown == {"role": "assistant", "content": None, "refusal": "No."}
    assert shown_turn("msg_1", turn)["content"] == [REFUSAL]


def test_a_call_by_its_older_name_is_a_call() -> None:
    call = {"name": "f", "arguments": "{}"}
    history = [
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "f", "content": "4"},
    ]
    called, told = chat(messages=[*MESSAGES, *history]).prompt_asked.turns[-2:]  # type: ignore[union-attr]
    assert called.calls[0].name == "f" and told.role == "tool" and told.call_id == called.calls[0].id


WHOLE: dict[str, tuple[Any, dict[str, Any]]] = {
    "chat": ("chat", {"messages": MESSAGES, "max_tokens": 8, "logprobs": True, "top_logprobs": 3,
                      "queue": {"deadline_ms": 1000, "max_queue_ms": 900}}),
    "a schema": ("job", {"messages": MESSAGES, "response_format": {"type": "json_schema",
        "json_schema": {"name": "s", "schema": {"type": "integer", "minimum": 2}}}}),
}  # fmt: skip


def with_floats(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: with_floats(each) for name, each in value.items()}
    if isinstance(value, list):
        return [with_floats(each) for each in value]
    return float(value) if type(value) is int else value


@pytest.mark.parametrize("what", WHOLE)
def test_whole_floats_are_integers(what: str) -> None:
    """As in JSON, which has one type of number."""
    kind, fields = WHOLE[what]
    asked = {"model": "m"} | fields
    assert parse(kind, json.dumps(with_floats(asked)).encode()) == parse(kind, json.dumps(asked).encode())


@pytest.mark.parametrize("number", ["1e3", "1E+3", "1000.0", "1000"])
def test_a_number_may_have_each_form_of_json(number: str) -> None:
    body = f'{{"model": "m", "max_tokens": {number}, "seed": 1e15, "messages": {json.dumps(MESSAGES)}}}'
    sampling = parse("chat", body.encode()).sampling
    assert (sampling.max_tokens, sampling.seed) == (1000, 10**15)


def test_a_completion_may_repeat_its_prompt() -> None:
    """And the request that is shown of its job says so."""
    request = parse("completion", json.dumps({"model": "m", "prompt": ["a", "b"], "n": 2, "echo": True}).encode())
    job = job_of(request)
    assert job.echo and ignored_fields(request) == [] and input_object(job)["echo"] is True
    assert decode_job(encode(job)) == job
    plain = job_of(parse("completion", json.dumps({"model": "m", "prompt": "a", "echo": False}).encode()))
    assert not plain.echo and "echo" not in input_object(plain)


def test_tools_become_the_job_s() -> None:
    """The function, the choice and the calls of the conversation, as they were sent."""
    request = chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "f"}}, parallel_tool_calls=False)
    tools = Tools(offered=(Tool("f", "does f", {"type": "object"}, strict=True),), choice="required", named="f",
                  parallel=False)  # fmt: skip
    job = job_of(request)
    assert job.tools == tools and ignored_fields(request) == []
    turns = job_of(chat(messages=[{"role": "assistant", "tool_calls": [CALL]}])).prompt
    assert turns == Chat((ChatTurn("assistant", "", (ToolCall("c1", "f", "{}"),)),))
    assert job_of(chat(tools=[TOOL], tool_choice="none")).tools is None


@pytest.mark.parametrize("kind", ["chat", "completion", "job", "response"])
def test_further_sampling_becomes_the_job_s(kind: Kind) -> None:
    """In every form of request; what turns a field off is one value, whatever the client calls it."""
    asked = {"top_k": 40, "min_p": 0.05, "repetition_penalty": 1.1, "logit_bias": {"50256": -100, "7": 2.5}}
    base = {"completion": {"prompt": "a"}, "response": {"input": "a"}}.get(kind, {"messages": MESSAGES})
    request = parse(kind, json.dumps({"model": "m"} | base | asked).encode())
    sampling = job_of(request).sampling
    assert (sampling.top_k, sampling.min_p, sampling.repetition_penalty) == (40, 0.05, 1.1)
    assert sampling.logit_bias == {50256: -100.0, 7: 2.5} and ignored_fields(request) == []
    off = parse(kind, json.dumps({"model": "m", "top_k": -1} | base).encode())
    assert job_of(off).sampling.top_k == 0
    assert asked.items() <= input_object(job_of(request)).items()


@pytest.mark.parametrize("asked", [{"ignore_eos": True}, {"min_tokens": 9}, {"ignore_eos": True, "min_tokens": 9}])
@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens"])
def test_a_text_may_have_to_go_on_to_its_limit(asked: dict[str, Any], limit: str) -> None:
    """Load generators ask for it by both names, and send neutral values to others."""
    base = {"model": "m", "messages": MESSAGES, limit: 9}
    request = parse("chat", json.dumps(base | asked).encode())
    assert job_of(request).sampling.ignore_eos and ignored_fields(request) == []
    assert input_object(job_of(request))["ignore_eos"] is True
    neutral = parse("chat", json.dumps(base | {"ignore_eos": False, "min_tokens": 0}).encode())
    assert not job_of(neutral).sampling.ignore_eos and "ignore_eos" not in input_object(job_of(neutral))


CARD = ModelCard(name="m", engine="sim", context=8, max_output=8, capabilities=Capabilities(), created=1)
TAKES = replace(CARD, capabilities=Capabilities(passes_fields=True), withheld=("*",), takes=("chat_template_kwargs",))


def test_an_engine_gets_the_further_fields_that_it_takes() -> None:
    """The others are named as ignored, also those of messages; an engine that takes none gets none."""
    asked = {"model": "m", "chat_template_kwargs": {"a": 1}, "verbosity": "low"}
    request = parse("chat", json.dumps(asked | {"messages": [MESSAGES[0] | {"odd": 1}]}).encode())
    job = to_job(request, tenant="t", ceiling=Priority.INTERACTIVE, card=TAKES)
    assert job.passed == {"chat_template_kwargs": {"a": 1}}
    assert {*ignored_fields(request, TAKES)} == {"verbosity", "messages[].odd"}
    assert "chat_template_kwargs" in ignored_fields(request, CARD)


THINKS = replace(CARD, capabilities=Capabilities(reasoning=True, reasoning_effort=True))


@pytest.mark.parametrize(
    ("effort", "card", "reasoning"),
    [
        (None, None, ""), (None, CARD, ""), (None, THINKS, "default"), ("none", CARD, ""), ("none", None, ""),
        ("none", THINKS, "none"), ("high", None, "high"), ("minimal", CARD, "minimal"), ("low", THINKS, "low"),
    ],
)  # fmt: skip
def test_the_effort_becomes_the_job_s_reasoning(effort: str | None, card: ModelCard | None, reasoning: str) -> None:
    """A model that reasons by itself is marked so; `none` asks only such a model for something."""
    for kind, body in (
        ("chat", {"messages": MESSAGES, "reasoning_effort": effort}),
        ("response", {"input": "a", "reasoning": {"effort": effort}}),
    ):
        request = parse(kind, json.dumps({"model": "m"} | body).encode())  # type: ignore[arg-type]
        job = to_job(request, job_id="j", tenant="t", ceiling=Priority.INTERACTIVE, reply_to="", trace={}, card=card)
        assert (job.reasoning, job.parted) == (reasoning, bool(reasoning)) and ignored_fields(request) == []
    assert not to_job(text(), tenant="t", ceiling=Priority.BATCH, card=card).reasoning


def test_the_forms_of_an_input_are_equal() -> None:
    """A text, a message, and a message in parts; behind instructions, or behind an item that says the same."""
    parts, first = [{"type": "input_text", "text": text} for text in ("hel", "lo")], {"content": "Be brief."}
    forms: tuple[dict[str, Any], ...] = (
        {"input": "hello", "instructions": "Be brief."},
        {"input": [{"role": "system", **first}, {"role": "user", "content": "hello"}]},
        {"input": [{"role": "developer", **first}, said(*parts) | {"type": "message"}]},
    )
    for form in forms:
        asked = parse("response", json.dumps({"model": "m"} | form).encode()).prompt_asked
        assert asked == Chat((ChatTurn("system", "Be brief."), ChatTurn("user", "hello")))


def test_unknown_fields_are_ignored_and_named() -> None:
    """At the top, in messages and in parts; names durability_error for a header stay out of it."""
    part = {"type": "text", "text": "hi", "cache_control": {}}
    request = chat(
        messages=[{"role": "user", "name": "Ann", "content": [part]}],
        store=True, top_a=40, stream_options={"include_obfuscation": False}, lane="x", LANE="x", sampling=1,
        **{"a\r\nSet-Cookie: b": 1, "é": 1, "": 1, "x" * 81: 1},
    )  # fmt: skip
    assert ignored_fields(request) == [
        "store", "top_a", "lane", "LANE", "sampling", "stream_options.include_obfuscation", "messages[].name",
        "messages[].content[].cache_control",
    ]  # fmt: skip
    assert job_of(request) == job_of(chat())
    assert len(ignored_fields(chat(**{f"x{number}": 1 for number in range(100)}))) == 20


# --- whatever comes ------------------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.just(CANARY),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "text", "role", "content"]), inner)
    ),
    max_leaves=8,
)
FIELDS = [
    "model", "messages", "prompt", "max_tokens", "temperature", "n", "stop", "seed", "logprobs", "top_logprobs",
    "tools", "response_format", "stream", "stream_options", "metadata", "user", "service_tier", "queue", "endpoint",
    "best_of",
]  # fmt: skip


@given(st.sampled_from(["chat", "completion", "job"]), st.dictionaries(st.sampled_from(FIELDS), JSON), st.booleans())
def test_any_body_is_a_job_or_a_400_that_repeats_nothing(kind: Kind, fields: dict[str, Any], bare: bool) -> None:
    """No body ends in another exception; an accepted one can be put on the wire, a refusal never quotes a value."""
    base = {} if bare else {"model": "m", "messages": MESSAGES, "prompt": "a"}
    try:
        request = parse(kind, json.dumps(base | fields).encode())
    except ApiError as error:
        assert error.status == 400
        assert CANARY not in json.dumps(error.body)
    else:
        job = job_of(request)
        assert decode_job(encode(job)) == job


@given(st.binary(max_size=64))
def test_any_bytes_are_a_request_or_a_400(body: bytes) -> None:
    """Not even bytes that are no text."""
    with pytest.raises(ApiError) as raised:
        parse("chat", body)
    assert raised.value.status == 400


def test_the_largest_numbers_are_kept_as_they_are() -> None:
    """A job can hold them, also beside a whole float where an integer is wanted, and a float of any size."""
    sent = {"a": 2**64 - 1, "b": [-(2**63)], "c": 1e300}
    request = chat(n=1.0, further=sent)
    assert request.sampling.n == 1 and request.further == {"further": sent}
    job = to_job(request, tenant="t", ceiling=Priority.BATCH, card=UNKNOWN)
    assert decode_job(encode(job)).passed == {"further": sent}


OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
TEXTS = {"endpoint": "/v1/completions"}
TURNS = {"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hä\n?"}]}


@pytest.mark.parametrize(
    "body",
    [
        TURNS,
        TEXTS | {"prompt": "one"},
        TEXTS | {"prompt": ["one", "two"], "n": 2, "stop": ["x", "y"], "logprobs": 3},
        TEXTS | {"prompt": [[1, 2], [3]], "max_tokens": 4, "seed": 7, "user": "u"},
        TURNS | {"temperature": 0.5, "top_p": 0.9, "logprobs": True, "top_logprobs": 2, "stop": "."},
        TURNS | {"presence_penalty": 1.0, "frequency_penalty": -1.0, "response_format": {"type": "json_object"}},
        TURNS | {"queue": {"priority": "batch", "deadline_ms": 5000, "max_queue_ms": 100}},
        TURNS | {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": OBJECT}}},
    ],
)
def test_the_request_of_a_job_asks_for_the_same_when_it_is_posted_again(body: dict[str, Any]) -> None:
    job = job_of(parse("job", json.dumps(MODEL | body).encode()))
    assert job_of(parse("job", json.dumps(input_object(job)).encode())) == job
