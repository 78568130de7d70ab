"""Requests are read strictly, refused in one clear sentence, and turned into the job they ask for."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from api.openai.errors import ApiError
from api.openai.fields import QueueOptions
from api.openai.generation import UNKNOWN
from api.openai.responses.items import shown_turn
from api.openai.results import input_object
from api.openai.schemas import MODELS, ChatJobRequest, Kind, Request, clamp, ignored_fields, parse, to_job
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
BASES: dict[Any, dict[str, Any]] = {
    "chat": {"messages": MESSAGES}, "completion": {"prompt": "x"}, "response": {"input": "x"}, "count": {"input": "x"},
    "job": {"messages": MESSAGES}, "embedding": {"input": "x"}, "rerank": {"query": "x", "documents": ["y"]},
    "tokenize": {"prompt": "x"}, "detokenize": {"tokens": [1]},
}  # fmt: skip
CANARY = "prompt-canary-5f1d"


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
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
            [("user", "ab")],
        ),
        ([{"role": "assistant", "content": None}], [("assistant", "")]),
        (
            [{"role": "assistant"}, {"role": "tool", "content": "4", "tool_call_id": "c"}],
            [("assistant", ""), ("tool", "4", (), "c")],
        ),
        ([{"role": "system", "content": ""}], [("system", "")]),
    ],
)
def test_messages_become_plain_turns(messages: list[Any], turns: list[tuple[Any, ...]]) -> None:
    """Text parts are joined, developer is system, an assistant may have said nothing."""
    assert job_of(chat(messages=messages)).prompt == Chat(tuple(ChatTurn(*turn) for turn in turns))


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", Text(("a",))),
        (["a", "b"], Text(("a", "b"))),
        ([1, 2], Tokens(((1, 2),))),
        ([[1], [2, 3]], Tokens(((1,), (2, 3)))),
    ],
)
def test_a_prompt_has_four_forms(prompt: Any, expected: Prompt) -> None:
    """A text, texts, token ids, lists of token ids."""
    assert job_of(text(prompt=prompt)).prompt == expected


def test_completion_logprobs_are_a_number() -> None:
    """0 asks for the chosen token alone."""
    assert text(logprobs=0).sampling.logprobs == 0
    assert text().sampling.logprobs is None


def test_empty_stop_strings_ask_for_nothing() -> None:
    """They would match everywhere."""
    assert chat(stop=["", "END"]).sampling.stop == ("END",)
    assert chat(stop="").sampling.stop == ()


# --- lanes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "lane"),
    [
        ({}, Priority.INTERACTIVE),
        ({"service_tier": "auto"}, Priority.INTERACTIVE),
        ({"service_tier": "default"}, Priority.STANDARD),
        ({"service_tier": "flex"}, Priority.BATCH),
        ({"service_tier": "scale"}, Priority.INTERACTIVE),
        ({"service_tier": "priority"}, Priority.INTERACTIVE),
        ({"service_tier": "fast"}, Priority.INTERACTIVE),
        ({"service_tier": "fast", "queue": {"priority": "batch"}}, Priority.BATCH),
        ({"service_tier": "flex", "queue": {"priority": "interactive"}}, Priority.INTERACTIVE),
        ({"service_tier": "flex", "queue": {"deadline_ms": 1}}, Priority.BATCH),
    ],
)
def test_the_tier_names_a_lane_and_the_queue_object_wins(fields: dict[str, Any], lane: Priority) -> None:
    """OpenAI's tiers map to lanes; our own option is the more exact word."""
    assert job_of(chat(**fields)).priority is lane


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
    assert (job.prompt, job.priority, job.on_disconnect) == (
        Chat((ChatTurn("user", "hi"),)),
        Priority.STANDARD,
        "continue",
    )
    assert job_of(parse("job", json.dumps(body | {"endpoint": "/v1/chat/completions"}).encode())) == job
    urgent = body | {"queue": {"priority": "interactive", "on_disconnect": "cancel"}}
    job = job_of(parse("job", json.dumps(urgent).encode()))
    assert (job.priority, job.on_disconnect) == (Priority.INTERACTIVE, "cancel")


def test_a_job_may_stand_for_a_completion() -> None:
    """The endpoint field chooses the kind."""
    request = parse("job", b'{"model": "m", "prompt": "a", "endpoint": "/v1/completions"}')
    assert job_of(request).prompt == Text(("a",))
    assert ignored_fields(request) == []


@pytest.mark.parametrize("endpoint", ["/tokenize", None, 5, ["/v1/completions"]])
def test_another_endpoint_is_refused(endpoint: Any) -> None:
    """Those that a job may have are named."""
    assert refused("job", {"model": "m", "messages": MESSAGES, "endpoint": endpoint}).param == "endpoint"


# --- what is refused -------------------------------------------------------------------------------------------------

WRONG_CHATS: list[tuple[dict[str, Any], str, str]] = [
    ({"model": None}, "model", "must be a string"),
    ({"messages": []}, "messages", "must not be empty"),
    ({"messages": MESSAGES * 1025}, "messages", "may have at most 1024 entries"),
    ({"messages": [5]}, "messages[0]", "must be an object"),
    ({"messages": [{"content": "a"}]}, "messages[0].role", "is required"),
    ({"messages": [{"role": "bot", "content": "a"}]}, "messages[0].role", "must be 'system', 'developer', 'user'"),
    ({"messages": [*MESSAGES, {"role": "user"}]}, "messages[1].content", "is required"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "is required"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "must be a string or a list of text parts"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}]},
     "messages[0].content[1].type", "describe the image in a part of type 'text'"),
    ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages[0].content[0].type",
     "is 'input_audio', but audio is not supported here: send its transcript in a part of type 'text'"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "messages[0].content[0].text",
     "must be a string"),
    ({"messages": [{"role": "user", "content": "a", "tool_calls": [CALL]}]}, "messages[0].tool_calls", "'assistant'"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text", "is required"),
    ({"tools": [TOOL | {"function": {"name": "a b"}}]}, "tools[0].function.name", "pattern"),
    ({"tools": [TOOL | {"function": {"name": "f", "parameters": {"type": "string"}}}]}, "tools[0].function.parameters",
     "'object'"),
    ({"tools": [TOOL], "tool_choice": "always"}, "tool_choice", "'none', 'auto' or 'required'"),
    ({"max_tokens": 0}, "max_tokens", "must be at least 1"),
    ({"max_tokens": True}, "max_tokens", "must be a whole number"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens", "must not differ from max_tokens"),
    ({"temperature": "0.5"}, "temperature", "must be a number"),
    ({"temperature": 2.1}, "temperature", "must be at most 2"),
    ({"stop": ["a"] * 5}, "stop", "may have at most 4 entries"),
    ({"stop": ["a", 5]}, "stop[1]", "must be a string"),
    ({"stop": {}}, "stop", "must be a string or a list of strings"),
    ({"stop": "a" * 257}, "stop", "may have at most 256 characters"),
    ({"top_logprobs": 2}, "top_logprobs", "needs logprobs: true"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "must be 'text', 'json_object' or 'json_schema'"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "is required"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema",
     "is required"),
    ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage", "must be true or false"),
    ({"metadata": {"a": "b" * 513}}, "metadata.a", "may have at most 512 characters"),
    ({"metadata": {"a" * 65: "b"}}, "metadata", "a key may have at most 64 characters"),
    ({"metadata": {str(number): "" for number in range(17)}}, "metadata", "may have at most 16 entries"),
    ({"queue": {"prioritty": "batch"}}, "queue.prioritty", "is no known field (did you mean 'priority'?)"),
    ({"queue": {"on_disconnect": "grace"}}, "queue.on_disconnect", "must be 'cancel', 'continue' or 'grace:<seconds>'"),
    ({"queue": {"on_disconnect": "grace:3601"}}, "queue.on_disconnect", "0 to 3600 seconds"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "words"), WRONG_CHATS)
def test_a_wrong_field_is_named_with_what_was_expected(fields: dict[str, Any], param: str, words: str) -> None:
    """The param is the path, the message says what the field must be."""
    error = refused("chat", {"model": "m", "messages": MESSAGES} | fields)
    assert error.param == param
    assert error.message.startswith(param)
    assert words in error.message


@pytest.mark.parametrize(
    ("prompt", "param", "words"),
    [
        ("", "prompt", "must not be empty"),
        ([], "prompt", "not empty"),
        ([[]], "prompt[0]", "must not be empty"),
        (["a", ""], "prompt[1]", "must not be empty"),
        (["a", 1], "prompt[1]", "must be a string"),
        ([1, "a"], "prompt[1]", "must be a whole number"),
        ([[1], [-1]], "prompt[1][0]", "must be at least 0"),
        ([2**31], "prompt[0]", "must be less than"),
        (5, "prompt", "must be a string"),
    ],
)
def test_a_wrong_prompt_is_refused_in_the_form_it_was_given(prompt: Any, param: str, words: str) -> None:
    """The error speaks of the form the sender chose."""
    error = refused("completion", {"model": "m", "prompt": prompt})
    assert error.param == param
    assert words in error.message


def test_what_is_missing_is_required() -> None:
    """Model and messages or prompt; completions take at most five alternatives."""
    assert refused("chat", {"messages": MESSAGES}).message == "model is required."
    assert refused("chat", {"model": "m"}).message == "messages is required."
    assert refused("completion", {"model": "m"}).message == "prompt is required."
    assert refused("completion", {"model": "m", "prompt": "a", "logprobs": 6}).param == "logprobs"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "line 1 column 0"),
        (b'{"model": }', "line 1 column 11"),
        (b'{"model": "m"\n "n": 1}', "line 2 column 2"),
        (b'{"n": NaN}', "n must be a finite number"),
        (b'{"unread": 1e999}', "unread must be a finite number"),
        (b'{"messages": [{"unread": {"a": [0, -1e400]}}]}', "messages[0].unread.a[1] must be a finite number"),
        (b'{"unread": ' + b"1" * 400 + b".5}", "unread must be a finite number"),
        (b'{"unread": [1, {"a": 18446744073709551616}]}', "unread[1].a must be a finite number, of at most 64 bits"),
        (b'{"messages": [{"tool_calls": [{"x": -9223372036854775809}]}]}', "messages[0].tool_calls[0].x must be"),
        (b'{"tools": [{"parameters": {"maximum": 18446744073709551616}}]}', "tools[0].parameters.maximum must be"),
        (b"\xff", "not valid JSON"),
        (b'{"model": "\xff"}', "not valid JSON"),
        (b'{"model": "\\ud800"}', "not valid JSON"),
        (b"[" * 8_000, "recursion limit"),
        (b"[]", "must be a JSON object"),
        (b'"hi"', "must be a JSON object"),
        (b'{"a":' * 129 + b"1" + b"}" * 129, "more than 128 levels"),
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


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ('{"enum": ["' + "x" * 2**19 + '"]}', "at most 524288 bytes"),
    ],
)
def test_a_schema_is_bounded(schema: str, words: str) -> None:
    """What the wire or an engine could not take is refused at the door."""
    wrapped = '{"type": "json_schema", "json_schema": {"schema": %s}}' % schema  # noqa: UP031
    body = '{"model": "m", "messages": [{"role": "user", "content": "hi"}], "response_format": %s}' % wrapped  # noqa: UP031
    error = refused("chat", body.encode())
    assert error.param == "response_format.json_schema.schema"
    assert words in error.message


def test_a_schema_may_be_as_large_as_the_bound() -> None:
    """In MessagePack, which takes twelve bytes for what is around the text."""
    schema = {"enum": ["x" * (2**19 - 12)]}
    assert len(msgspec.msgpack.encode(schema)) == 2**19
    wrapped = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}
    assert chat(response_format=wrapped).sampling.json_schema == schema


def large_schema(properties: int, characters: int, values: int, levels: int) -> dict[str, Any]:
    """A strict schema with so many properties, characters of names and values, values of enums, and levels."""
    size = characters // (properties + values)
    names = [f"{number:0{size}d}" for number in range(properties)]
    schema: dict[str, Any] = {"type": "string", "enum": [f"v{number:0{size - 1}d}" for number in range(values)]}
    for level in range(levels, 0, -1):
        rest = {each: {"type": "string", "description": "A name."} for each in names[levels:]} if level == 1 else {}
        fields = {names[level - 1]: schema} | rest
        schema = {"type": "object", "properties": fields, "required": [*fields], "additionalProperties": False}
    return schema


def test_the_largest_schema_that_openai_takes_is_taken() -> None:
    """5,000 properties, 120,000 characters of names and values, 1,000 values of enums, 10 levels: as output format and
    as a tool's arguments, chat and response."""
    schema = large_schema(5000, 120_000, 1000, 10)
    wrapped = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}
    assert chat(response_format=wrapped).sampling.json_schema == schema
    function = {"type": "function", "function": {"name": "f", "strict": True, "parameters": schema}}
    tools = chat(tools=[function]).tools_asked
    assert tools is not None and tools.offered[0].parameters == schema
    form = {"format": {"type": "json_schema", "name": "x", "strict": True, "schema": schema}}
    body = {"model": "m", "input": "hi", "text": form}
    assert parse("response", json.dumps(body).encode()).sampling.json_schema == schema


def test_a_forced_call_leaves_no_text_for_a_schema() -> None:
    """Where the model may choose, the engine has to hold its text to it."""
    for choice, schema in (("required", None), (None, {}), ("auto", {}), ("none", {})):
        asked = chat(tools=[TOOL], tool_choice=choice, response_format={"type": "json_object"})
        assert job_of(asked).sampling.json_schema == schema


def test_what_excludes_tools_is_refused_with_what_to_do_instead() -> None:
    error = refused("chat", {"model": "m", "messages": MESSAGES, "tools": [TOOL], "logprobs": True})
    assert error.param == "logprobs" and "Leave one of them out" in error.message


WRONG_TASKS: list[tuple[Kind, dict[str, Any], str, str]] = [
    ("embedding", {"input": ""}, "input", "must not be empty"),
    ("embedding", {"input": []}, "input", "not empty"),
    ("embedding", {"input": ["a", ""]}, "input[1]", "must not be empty"),
    ("embedding", {"input": ["a"] * 2049}, "input", "at most 2048 entries"),
    ("embedding", {"input": {"text": "a"}}, "input", "must be a string, or a list"),
    ("embedding", {"encoding_format": "hex"}, "encoding_format", "'float' or 'base64'"),
    ("embedding", {"dimensions": 0}, "dimensions", "at least 1"),
    ("embedding", {"priority": "batch"}, "priority", "queue.priority"),
    ("rerank", {"query": ""}, "query", "must not be empty"),
    ("rerank", {"documents": []}, "documents", "not be empty"),
    ("rerank", {"documents": [5]}, "documents[0]", "must be"),
    ("rerank", {"documents": [{"text": ""}]}, "documents[0].text", "must not be empty"),
    ("rerank", {"top_n": -1}, "top_n", "at least 0"),
    ("tokenize", {"messages": MESSAGES}, "messages", "together with prompt"),
    ("tokenize", {"return_token_strs": True}, "return_token_strs", "use /detokenize"),
    ("tokenize", {"prompt": ["a"]}, "prompt", "must be a string"),
    ("detokenize", {"tokens": None}, "tokens", "must be a list"),
    ("detokenize", {"tokens": [-1]}, "tokens[0]", "at least 0"),
    ("detokenize", {"tokens": "a"}, "tokens", "must be a list"),
]


@pytest.mark.parametrize(("kind", "fields", "param", "words"), WRONG_TASKS)
def test_what_is_no_task_is_refused_by_name(kind: Kind, fields: dict[str, Any], param: str, words: str) -> None:
    error = refused(kind, {"model": "m"} | BASES[kind] | fields)
    assert error.param == param and words in error.message


def test_what_is_to_be_tokenized_is_required() -> None:
    with pytest.raises(ApiError, match="prompt is required, or messages"):
        job_of(parse("tokenize", b'{"model": "m"}'))


# --- what is not honoured --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [("completion", "tools", [TOOL]), ("completion", "tool_choice", "required"),
     ("completion", "reasoning_effort", "low"), ("chat", "reasoning_effort", "max"), ("chat", "echo", True)],
)  # fmt: skip
def test_fields_of_the_other_endpoint_are_refused(kind: Kind, name: str, value: Any) -> None:
    assert refused(kind, {"model": "m", **BASES[kind], name: value}).param == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("functions", [{}]),
        ("function_call", {"name": "f"}), ("suffix", "end"), ("best_of", 4), ("webhook", "https://example.org"),
    ],
)  # fmt: skip
def test_known_fields_nobody_honours_are_refused(name: str, value: Any) -> None:
    """An answer must not pass for one that used them."""
    for kind, body in (
        ("chat", {"messages": MESSAGES}),
        ("completion", {"prompt": "a"}),
        ("job", {"messages": MESSAGES}),
    ):
        error = refused(kind, {"model": "m", name: value} | body)  # type: ignore[arg-type]
        assert error.param == name and error.message.rstrip(".") != f"{name} is not supported here"


@pytest.mark.parametrize(("name", "instead"), [("functions", "Use tools"), ("function_call", "Use tool_choice")])
def test_an_older_name_is_refused_with_the_newer_one(name: str, instead: str) -> None:
    assert instead in refused("chat", {"model": "m", "messages": MESSAGES, name: [{"name": "f"}]}).message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", []), ("tools", None), ("tool_choice", "none"), ("tool_choice", "auto"), ("functions", []),
        ("parallel_tool_calls", False),
        ("logit_bias", {}), ("modalities", ["text"]), ("reasoning_effort", "none"), ("suffix", ""),
        ("echo", False), ("best_of", 1), ("webhook", None),
    ],
)  # fmt: skip
def test_their_neutral_values_pass(name: str, value: Any) -> None:
    """Asking for nothing is honoured, and not reported as ignored."""
    request = chat(**{name: value})
    assert job_of(request) == job_of(chat())
    assert ignored_fields(request) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("modalities", ["text", "audio"]), ("audio", {"voice": "a", "format": "wav"}), ("web_search_options", {}),
        ("moderation", {}), ("store", True), ("verbosity", "low"), ("prompt_cache_key", "a"),
        ("prediction", {"type": "content", "content": "x"}),
    ],
)  # fmt: skip
def test_what_nobody_honours_is_named_and_changes_nothing(name: str, value: Any) -> None:
    request = chat(**{name: value})
    assert job_of(request) == job_of(chat()) and ignored_fields(request) == [name]


HOSTED = ("web_search", "web_search_preview_2025_03_11", "file_search", "code_interpreter", "computer_use_preview",
          "image_generation", "mcp", "local_shell", "custom", "apply_patch")  # fmt: skip


@pytest.mark.parametrize("kind", HOSTED)
def test_a_tool_that_does_not_run_here_is_named_and_dropped(kind: str) -> None:
    """It is refused where tool_choice needs it."""
    hosted = {"type": kind, "name": "x", "server_label": "y", "container": {"type": "auto"}}
    flat = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
    for of, tool, base in (("chat", TOOL, {"messages": MESSAGES}), ("response", flat, {"input": "hi"})):

        def body(*tools: Any, of: Any = of, base: Any = base, **more: Any) -> Any:
            return parse(of, json.dumps({"model": "m", "tools": tools, **base, **more}).encode())

        alone, beside = body(hosted), body(hosted, tool)
        assert alone.tools_asked is None and beside.tools_asked == body(tool).tools_asked
        assert ignored_fields(alone) == ignored_fields(beside) == [f"tools[].{kind}"]
        for choice in ({"type": kind}, "required"):
            error = refused(of, {"model": "m", "tools": [hosted], "tool_choice": choice, **base})  # type: ignore[arg-type]
            assert (error.param or "").startswith("tool_choice") and error.status == 400
    chosen = {"type": "allowed_tools", "mode": "required", "tools": [{"type": kind}, {"type": "function", "name": "f"}]}
    asked = {"model": "m", "input": "hi", "tools": [hosted, flat], "tool_choice": chosen}
    tools = parse("response", json.dumps(asked).encode()).tools_asked
    assert tools is not None and [tool.name for tool in tools.offered] == ["f"]


@pytest.mark.parametrize("kind", ["", "Function", "web search", "x" * 65, "Größe", None, 5])
def test_a_kind_of_tool_that_cannot_be_named_is_refused(kind: Any) -> None:
    """It may be a function, misspelt."""
    function = {"name": "f", "parameters": {"type": "object"}}
    chats, flat = {"type": kind, "function": function}, {"type": kind, **function}
    bodies: tuple[Any, ...] = (
        ("chat", {"messages": MESSAGES, "tools": [chats]}),
        ("response", {"input": "x", "tools": [flat]}),
    )
    for of, fields in bodies:
        error = refused(of, {"model": "m", **fields})
        assert error.param == "tools[0].type" and "must be 'function', or another kind" in error.message


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_a_choice_of_an_unknown_function_beside_hosted_tools_is_refused(mode: str) -> None:
    allowed = {"mode": mode, "tools": [{"type": "function", "function": {"name": "f"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    fields = {"model": "m", "messages": MESSAGES, "tools": [{"type": "web_search"}], "tool_choice": choice}
    assert refused("chat", fields).param == "tool_choice"


def test_the_text_that_a_part_does_not_have_is_named() -> None:
    parts = [{"type": "refusal", "text": "lost?"}, {"type": "text", "text": "a", "refusal": "x"}]
    asked = chat(messages=[{"role": "assistant", "content": parts}])
    assert {f"messages[].content[].{name}" for name in ("text", "refusal")} == {*ignored_fields(asked)}
    kept = [{"type": "refusal", "refusal": "No."}, {"type": "text", "text": "a", "refusal": None}]
    assert ignored_fields(chat(messages=[{"role": "assistant", "content": kept}])) == []


def test_the_result_of_a_function_by_its_older_role_needs_its_name() -> None:
    said = {"role": "function", "content": "x"}
    error = refused("chat", {"model": "m", "messages": [*MESSAGES, said]})
    assert error.param == f"messages[{len(MESSAGES)}]" and "needs the `name`" in error.message
    named = chat(messages=[*MESSAGES, said | {"name": "f"}])
    assert ignored_fields(named) == [] and named.prompt_asked.turns[-1].call_id == "f"  # type: ignore[union-attr]
    assert ignored_fields(chat(messages=[{"role": "user", "content": "x", "name": "f"}])) == ["messages[].name"]


@pytest.mark.parametrize("item", [
    {"type": "function_call_output", "call_id": "c", "output": None},
    {"type": "function_call_output", "call_id": "c", "output": {}},
    {"role": "user", "content": 5},
])  # fmt: skip
def test_a_text_or_a_list_is_said_to_be_either(item: dict[str, Any]) -> None:
    assert "must be a string or a list" in refused("response", {"model": "m", "input": [item]}).message


def test_what_a_response_cannot_have_is_named() -> None:
    items = [
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "q"}},
        {"type": "file_search_call", "id": "fs_1", "queries": [], "results": None},
        {"type": "computer_call_output", "call_id": "c", "output": {"type": "computer_screenshot"}},
        {"type": "code_interpreter_call", "id": "ci_1"}, {"type": "image_generation_call", "id": "ig_1"},
        {"type": "mcp_list_tools", "id": "mcpl_1"}, {"type": "mcp_approval_request", "id": "mcpr_1"},
        {"type": "shell_call", "call_id": "d"}, {"type": "local_shell_call_output", "id": "e"},
        {"type": "compaction", "encrypted_content": "x"},
    ]  # fmt: skip
    said = {"role": "user", "content": "hi"}
    fields = {
        "input": [*items, said], "truncation": "auto", "text": {"verbosity": "low"}, "context_management": [],
        "reasoning": {"summary": "auto", "generate_summary": "concise"}, "moderation": {},
        "include": ["web_search_call.action.sources", "reasoning.encrypted_content"],
    }  # fmt: skip
    request = parse("response", json.dumps({"model": "m", **fields}).encode())
    plain = parse("response", json.dumps({"model": "m", "input": [said]}).encode())
    assert request.prompt_asked == plain.prompt_asked
    named = ignored_fields(request)
    assert {f"input[].{item['type']}" for item in items} <= {*named}
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


WRONG: tuple[Any, ...] = (
    5, -1, 2.5, 2**70, "x", "", True, [], [5], [None], ["x"], [[]], [{}], {}, {"x": 5}, {"type": "x"}, {"type": 5},
    [{"type": 5}], {"id": 5}, {"type": "function"}, [{"type": "function"}], [{"role": "x"}],
    {"format": {"type": 5}},
)  # fmt: skip
RAW = re.compile(
    r"Input|should|valid |validation|pydantic|instance|Value error|Field required|literal|union|tag|None\b"
)
"""Words of a validator, which no sentence of ours has."""


@pytest.mark.parametrize("kind", BASES)
def test_no_message_is_a_validators(kind: Any) -> None:
    """Each field of a body, and each of what is in it, with values of every wrong type."""
    fields = {
        *(ChatJobRequest if kind == "job" else MODELS[kind]).model_fields,
        "messages",
        "tools",
        "queue",
        "metadata",
    }
    inner = {
        "messages": "role content tool_calls tool_call_id function_call name refusal",
        "tools": "type function name",
        "input": "type role content id call_id output",
        "queue": " ".join(QueueOptions.model_fields),
        "text": "format verbosity",
        "reasoning": "effort summary",
        "response_format": "type json_schema",
    }
    seen = set[str]()
    for name in fields:
        bodies = [{name: value} for value in WRONG]
        for part in inner.get(name, "").split():
            for value in WRONG:
                item = {"role": "user", "content": "x", part: value} if name in ("messages", "input") else {part: value}
                bodies.append({name: [item] if name in ("messages", "tools", "input") else item})
        for body in bodies:
            try:
                parse(kind, json.dumps({"model": "m", **BASES[kind], **body}).encode())
            except ApiError as error:
                words = f"{error.param}: {error.message}"
                seen.add(words)
                assert error.status == 400 and RAW.search(error.message) is None, words
                assert error.param is None or error.param.split(".")[0].split("[")[0] in error.message, words
    assert len(seen) > 20


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
    "lists of ids": ("completion", {"prompt": [[1, 2], [3]]}),
    "response": ("response", {"input": "x", "max_output_tokens": 20, "top_logprobs": 0}),
    "rerank": ("rerank", {"query": "a", "documents": ["b"], "top_n": 1}),
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


@pytest.mark.parametrize(
    "number", ["8.5", "true", '"8"', "1e999", "-1e400", "1e-1", '"NaN"', "NaN", "Infinity", "[8.0]"]
)
@pytest.mark.parametrize("field", ["max_tokens", "queue.deadline_ms", "top_logprobs"])
def test_what_is_no_integer_is_refused_by_the_name_of_its_field(field: str, number: str) -> None:
    *above, name = field.split(".")
    inner = f'"{name}": {number}'
    body = f'{{"model": "m", "logprobs": true, "messages": {json.dumps(MESSAGES)}, '
    body += f'"{above[0]}": {{{inner}}}}}' if above else f"{inner}}}"
    with pytest.raises(ApiError) as error:
        parse("chat", body.encode())
    assert error.value.param == field and error.value.message.startswith(f"{field} must be")


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


@pytest.mark.parametrize(
    "more",
    [
        {"prompt": [1, 2]}, {"prompt": [[1], [2]]}, {"logprobs": 0}, {"response_format": {"type": "json_object"}},
        {"prompt": "a" * 600_000, "n": 2},
    ],
)  # fmt: skip
def test_an_echo_that_cannot_be_given_is_refused(more: dict[str, Any]) -> None:
    assert refused("completion", {"model": "m", "prompt": "a", "echo": True} | more).param == "echo"


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


def test_a_call_of_a_custom_tool_in_a_history_is_read_as_of_a_function() -> None:
    """Its text is the one argument; what is wrong with it is told as of any other call."""
    call = {"id": "c1", "type": "custom", "custom": {"name": "sql", "input": 'select "a"'}}
    turns = job_of(chat(messages=[{"role": "assistant", "tool_calls": [call]}])).prompt
    assert turns == Chat((ChatTurn("assistant", "", (ToolCall("c1", "sql", '{"input":"select \\"a\\""}'),)),))
    for custom, words in (({"input": "x"}, "name"), ({"name": "sql"}, "needs `custom.input`")):
        with pytest.raises(ApiError, match=words):
            chat(messages=[{"role": "assistant", "tool_calls": [{**call, "custom": custom}]}])


@pytest.mark.parametrize("kind", ["chat", "completion", "job"])
@pytest.mark.parametrize(
    "name",
    [
        "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "structural_tag",
        "json_schema", "regex", "grammar", "ebnf",
    ],
)  # fmt: skip
def test_constraints_of_other_servers_are_refused_with_what_to_use_instead(kind: Kind, name: str) -> None:
    """An answer that was not held to them would be taken for one that was. Null asks for nothing."""
    body = {"model": "m", "prompt": "a"} if kind == "completion" else {"model": "m", "messages": MESSAGES}
    for value in ({"type": "object"}, ["a", "b"], "root ::= x", {}, ""):
        error = refused(kind, {name: value} | body)
        assert (error.status, error.param) == (400, name)
        assert "response_format" in error.message and "json_schema" in error.message
    parse(kind, json.dumps({name: None} | body).encode())


@pytest.mark.parametrize(
    ("wanted", "param"),
    [
        ({"type": "json_object", "schema": {"type": "object"}}, "response_format.schema"),
        ({"type": "text", "grammar": "root ::= x"}, "response_format.grammar"),
        ({"type": "json_object", "json_schema": {"schema": {}}}, "response_format.json_schema"),
        ({"type": "text", "json_schema": {"schema": {}}}, "response_format.json_schema"),
        ({"type": "grammar", "grammar": "root ::= x"}, "response_format.type"),
        ({"type": "regex", "value": "a"}, "response_format.type"),
    ],
)
def test_a_form_that_would_have_no_effect_is_refused(wanted: dict[str, Any], param: str) -> None:
    """Of other servers' dialects, and of a schema beside a type that does not use it."""
    error = refused("chat", {"model": "m", "messages": MESSAGES, "response_format": wanted})
    assert (error.status, error.param) == (400, param)
    assert "json_schema" in error.message


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


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("top_k", -2, "at least -1"), ("repetition_penalty", 2.1, "at most 2"),
        ("logit_bias", {"a": 1}, "token ids"), ("logit_bias", {"-1": 1}, "token ids"),
        ("logit_bias", {"2147483648": 1}, "token ids"), ("logit_bias", {"01": 1}, "token ids"),
        ("logit_bias", {"٣": 1}, "token ids"), ("logit_bias", [5], "an object"),
        ("logit_bias", {str(number): 1 for number in range(1025)}, "at most 1,024 entries"),
    ],
)  # fmt: skip
def test_further_sampling_out_of_range_is_refused(name: str, value: Any, words: str) -> None:
    for kind, base in (("chat", {"messages": MESSAGES}), ("response", {"input": "a"})):
        error = refused(kind, {"model": "m", name: value} | base)  # type: ignore[arg-type]
        assert error.param == name and words in error.message
    for bias in (100.5, -101, "1", None, True):
        assert refused("chat", {"model": "m", "messages": MESSAGES, "logit_bias": {"6": bias}}).param == "logit_bias.6"


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


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 9, "min_tokens": 5}, "min_tokens"),
        ({"min_tokens": 5}, "min_tokens"),
        ({"ignore_eos": True, "response_format": {"type": "json_object"}}, "ignore_eos"),
        ({"ignore_eos": True, "tools": [{"type": "function", "function": {"name": "f"}}]}, "ignore_eos"),
        ({"max_tokens": 5, "min_tokens": 5, "response_format": {"type": "json_object"}}, "min_tokens"),
    ],
)
def test_what_would_not_be_honoured_is_refused(fields: dict[str, Any], param: str) -> None:
    assert refused("chat", {"model": "m", "messages": MESSAGES, **fields}).param == param


CARD = ModelCard(name="m", engine="sim", context=8, max_output=8, capabilities=Capabilities(), created=1)
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
    completion = text()
    assert (
        to_job(completion, job_id="j", tenant="t", ceiling=Priority.BATCH, reply_to="", trace={}, card=card).reasoning
        == ""
    )


def test_best_of_may_equal_n() -> None:
    """Then it changes nothing."""
    assert text(n=3, best_of=3).sampling.n == 3
    assert refused("completion", {"model": "m", "prompt": "a", "n": 3, "best_of": 4}).param == "best_of"


@pytest.mark.parametrize(
    ("name", "value"),
    [("priority", "batch"), ("priority", 5), ("deadline_ms", 1000), ("max_queue_ms", 1), ("do_not_queue", True),
     ("on_disconnect", "continue")],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["chat", "job"])
def test_an_option_of_the_queue_outside_it_is_refused(kind: Kind, name: str, value: object) -> None:
    """It would have no effect, and its sender relies on it. Null and another server's default ask for nothing."""
    error = refused(kind, {"model": "m", "messages": MESSAGES, name: value})
    assert (error.status, error.param) == (400, name)
    assert error.message == f"{name} has no effect there (did you mean queue.{name}?)."
    assert chat(**{name: None}).lane is chat(priority=0).lane is Priority.INTERACTIVE


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
    assert request.choices_per_prompt == 1 and request.further == {"further": sent}
    job = to_job(request, tenant="t", ceiling=Priority.BATCH, card=UNKNOWN)
    assert decode_job(encode(job)).passed == {"further": sent}
