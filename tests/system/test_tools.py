"""Calls of tools through real processes, by the official client: whole, streamed, in jobs and batches, and through the
death of a worker."""

from __future__ import annotations

import json
import os
import signal
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from batching import begin, client, ended, line
from house import House, serving
from openai import BadRequestError, LengthFinishReasonError, OpenAI
from pydantic import BaseModel

pytestmark = pytest.mark.slow

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
LONG = {
    "type": "object",
    "properties": {"notes": {"type": "array", "items": {"type": "string"}, "minItems": 8}},
    "required": ["notes"],
}
"""A call of it has more than a hundred tokens of the simulated engine."""


def tool(name: str, parameters: dict[str, Any] | None = None, **more: Any) -> Any:
    function = {"name": name, "description": f"the function {name}", "parameters": parameters or WEATHER}
    return {"type": "function", "function": function | more}


def flat(name: str) -> Any:
    """As the Responses API has it."""
    return {"type": "function", "name": name, "parameters": WEATHER, "strict": False}


BOTH = [tool("get_weather"), tool("get_time")]
FLAT = [flat("get_weather"), flat("get_time")]


def chat(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "sim", "messages": [{"role": "user", "content": text}], "tools": BOTH, **more}


class Gathered:
    """What a client that joins the chunks of a stream has, by choice."""

    def __init__(self, chunks: Iterable[Any]) -> None:
        self.text: defaultdict[int, str] = defaultdict(str)
        self.calls: defaultdict[int, dict[int, dict[str, str]]] = defaultdict(dict)
        self.finishes: dict[int, str] = {}
        self.tools = 0
        """Chunks with a part of a call."""
        for chunk in chunks:
            for choice in chunk.choices:
                self.text[choice.index] += choice.delta.content or ""
                for part in choice.delta.tool_calls or ():
                    self._add(choice.index, part)
                if choice.finish_reason:
                    self.finishes[choice.index] = choice.finish_reason

    def _add(self, index: int, part: Any) -> None:
        self.tools += 1
        if part.id:
            assert part.index not in self.calls[index], "an id came twice"
            assert part.type == "function" and part.function.name
            self.calls[index][part.index] = {"id": part.id, "name": part.function.name, "arguments": ""}
        else:
            assert part.type is None and part.function.name is None
        self.calls[index][part.index]["arguments"] += part.function.arguments


def calls_of(message: Any) -> dict[int, dict[str, str]]:
    """The calls of a whole answer in the same form."""
    return {
        number: {"id": call.id, "name": call.function.name, "arguments": call.function.arguments}
        for number, call in enumerate(message.tool_calls or ())
    }


@pytest.fixture(scope="module")
def openai(house: House) -> OpenAI:
    house.start("offline")
    return client(house)


def test_a_whole_answer_a_stream_and_the_stored_answer_hold_the_same_calls(openai: OpenAI) -> None:
    """Two calls at once, n = 2: arguments follow the schema, the text is null; in the stream, an index always, id, type
    and name once; of the stream and its stored answer the ids are equal too."""
    asked = chat("get_weather and get_time, please", n=2)
    whole = openai.chat.completions.create(**asked)
    assert whole.usage is not None and whole.usage.completion_tokens > 2
    with openai.chat.completions.with_raw_response.create(**asked, stream=True).parse() as stream:
        chunks = list(stream)
    found = Gathered(chunks)
    assert found.finishes == {0: "tool_calls", 1: "tool_calls"} and found.tools > 8
    for index, choice in enumerate(whole.choices):
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        for calls in (found.calls[index].values(), calls_of(choice.message).values()):
            assert [call["name"] for call in calls] == ["get_weather", "get_time"]
            assert all(set(json.loads(call["arguments"])) == {"city", "days"} for call in calls)
            assert all(call["id"].startswith("call_") for call in calls)
    streamed = [call for calls in found.calls.values() for call in calls.values()]
    assert len({call["id"] for call in streamed}) == 4
    job = openai.get(f"/jobs/{chunks[0].id.removeprefix('chatcmpl-')}", cast_to=dict[str, Any])
    stored = [call for each in job["result"]["choices"] for call in each["message"]["tool_calls"]]
    assert [(call["id"], call["function"]["arguments"]) for call in stored] == [
        (call["id"], call["arguments"]) for call in streamed
    ]


def test_the_choice_is_kept(openai: OpenAI) -> None:
    """none, required, named, allowed, and one call at most."""
    none = openai.chat.completions.create(**chat("get_time", tool_choice="none", max_tokens=4))
    assert none.choices[0].message.tool_calls is None and none.choices[0].finish_reason == "length"
    named = {"type": "function", "function": {"name": "get_time"}}
    for choice in (named, {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}):
        answer = openai.chat.completions.create(**chat("get_weather", tool_choice=choice))
        assert [call["name"] for call in calls_of(answer.choices[0].message).values()] == ["get_time"]
    single = openai.chat.completions.create(
        **chat("get_weather get_time", tool_choice="required", parallel_tool_calls=False)
    )
    assert [call["name"] for call in calls_of(single.choices[0].message).values()] == ["get_weather"]


def test_results_of_calls_go_back(openai: OpenAI) -> None:
    """An agent's loop: the call and its result are in the next prompt, whose answer is text."""
    first = openai.chat.completions.create(**chat("get_weather"))
    message = first.choices[0].message
    assert message.tool_calls
    history = [
        {"role": "user", "content": "get_weather"},
        message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"},
    ]
    second = openai.chat.completions.create(**chat("", max_tokens=5) | {"messages": history})
    assert second.choices[0].message.content and second.choices[0].finish_reason == "length"
    alone = openai.chat.completions.create(**chat("get_weather", max_tokens=5, tools=[]))
    assert second.usage and alone.usage and second.usage.prompt_tokens > alone.usage.prompt_tokens + 8


def test_the_clients_own_helper_parses(openai: OpenAI) -> None:
    """`.parse` with a pydantic model, as its tool helper sends it: strict."""

    class Weather(BaseModel):
        city: str
        days: int

    import openai as package  # noqa: PLC0415 - the name is the fixture's here

    parsed = openai.chat.completions.parse(
        model="sim",
        messages=[{"role": "user", "content": "weather"}],
        tools=[package.pydantic_function_tool(Weather, name="get_weather")],
    )
    assert parsed.choices[0].message.tool_calls
    assert isinstance(parsed.choices[0].message.tool_calls[0].function.parsed_arguments, Weather)


def test_a_limit_cuts_the_arguments_visibly(openai: OpenAI) -> None:
    strict = [tool("get_weather", strict=True)]
    with pytest.raises(LengthFinishReasonError):
        openai.chat.completions.parse(**chat("x", max_tokens=3, tools=strict))
    cut = openai.chat.completions.create(**chat("x", max_tokens=3))
    assert cut.choices[0].finish_reason == "length"


OTHER = {"type": "function", "function": {"name": "other"}}
HOSTED = {"type": "web_search"}


@pytest.mark.parametrize(("kind", "fields", "param", "words"), [
    ("chat", {"tool_choice": OTHER}, "tool_choice", "not in tools"),
    ("chat", {"tools": [], "tool_choice": "required"}, "tool_choice", "needs tools"),
    ("chat", {"tools": [{"type": "custom"}], "tool_choice": {"type": "custom"}}, "tool_choice", "must name"),
    ("chat", {"tools": [tool("a"), tool("a")]}, "tools", "different names"),
    ("chat", {"response_format": {"type": "json_object"}}, "response_format", "force its call"),
    ("response", {"tools": [HOSTED], "tool_choice": HOSTED}, "tool_choice", "must name"),
    ("response", {"tool_choice": {"type": "function", "name": "other"}}, "tool_choice", "not in tools"),
    ("response", {"text": {"format": {"type": "json_object"}}}, "text.format", "force its call"),
])  # fmt: skip
def test_what_cannot_be_is_refused_with_field_and_remedy(
    openai: OpenAI, kind: str, fields: dict[str, Any], param: str, words: str
) -> None:
    asked: Any = chat("x") if kind == "chat" else {"model": "sim", "input": "x", "tools": FLAT}
    create: Any = openai.chat.completions.create if kind == "chat" else openai.responses.create
    with pytest.raises(BadRequestError, match=words) as caught:
        create(**asked | fields)
    assert caught.value.param == param


def test_jobs_and_batches_take_tools(openai: OpenAI) -> None:
    """The job shows its request as it was accepted, its result and its events; lines of a batch have calls too."""
    asked = chat("get_time", tool_choice="required", parallel_tool_calls=False)
    made = openai.post("/jobs", body=asked, cast_to=dict[str, Any])
    job = openai.get(f"/jobs/{made['id']}?wait=30&include=input", cast_to=dict[str, Any])
    assert job["input"]["tools"] == BOTH and job["input"]["tool_choice"] == "required"
    assert job["input"]["parallel_tool_calls"] is False
    (call,) = job["result"]["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "get_time"
    batch = ended(openai, begin(openai, [line(1, "get_time", tools=BOTH), line(2, "plain")]))
    assert batch.output_file_id
    lines = [json.loads(each) for each in openai.files.content(batch.output_file_id).text.splitlines()]
    by_id = {each["custom_id"]: each["response"]["body"]["choices"][0] for each in lines}
    assert by_id["r-1"]["message"]["tool_calls"][0]["function"]["name"] == "get_time"
    assert "tool_calls" not in by_id["r-2"]["message"]


def test_events_go_on_after_each_one(openai: OpenAI, house: House) -> None:
    """Whatever event was the last, the rest is the same: parts of calls do not depend on where a reader began."""
    made = openai.post("/jobs", body=chat("get_weather get_time"), cast_to=dict[str, Any])
    whole = house.events(made["id"])
    parts = [part for _, name, data in whole if name == "delta" for part in data.get("tool_calls", ())]
    assert [part["function"]["name"] for part in parts if "id" in part] == ["get_weather", "get_time"]
    assert whole[-1][2]["finish_reasons"] == ["tool_calls"]
    for place, (event, _, _) in enumerate(whole[:-1]):
        assert house.events(made["id"], event) == whole[place + 1 :]


def test_a_worker_killed_in_a_call_is_not_seen(tmp_path: Path) -> None:
    """kill -9 in the middle of the arguments: the same call with the same id, in the stream and everywhere else."""
    asked = chat("take notes", tools=[tool("take_notes", LONG)], stream=True)
    with serving(tmp_path, "workers", PENSTOCK_SIM_STEP_MS="8") as house:
        openai = client(house)
        expected = Gathered(openai.chat.completions.create(**asked))
        victim = house._processes[0]
        chunks = []
        for chunk in openai.chat.completions.create(**asked):
            chunks.append(chunk)
            if len(chunks) == 30:
                house.start("workers")
                os.kill(victim.pid, signal.SIGKILL)
        found = Gathered(chunks)
        assert found.finishes == expected.finishes == {0: "tool_calls"}
        call, known = found.calls[0][0], expected.calls[0][0]
        assert call["arguments"] == known["arguments"] and len(json.loads(call["arguments"])["notes"]) == 8
        job = openai.get(f"/jobs/{chunks[0].id.removeprefix('chatcmpl-')}", cast_to=dict[str, Any])
        assert job["attempts"] == 2
        function = {"name": "take_notes", "arguments": call["arguments"]}
        stored = {"id": call["id"], "type": "function", "function": function}
        assert job["result"]["choices"][0]["message"]["tool_calls"] == [stored]


# --- the Responses API -----------------------------------------------------------------------------------------------


def test_a_response_has_an_item_for_each_call(openai: OpenAI) -> None:
    """Whole and streamed are the same, and so is the one that is stored; the client's own helper follows the events."""
    whole = openai.responses.create(model="sim", input="get_weather get_time", tools=FLAT)
    assert [(item.type, item.status) for item in whole.output] == [("function_call", "completed")] * 2
    assert [item.name for item in whole.output if item.type == "function_call"] == ["get_weather", "get_time"]
    assert [tool.name for tool in whole.tools if tool.type == "function"] == ["get_weather", "get_time"]
    assert openai.responses.retrieve(whole.id).output == whole.output
    with openai.responses.stream(model="sim", input="get_weather get_time", tools=FLAT) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds.count("response.function_call_arguments.done") == kinds.count("response.output_item.done") == 2
    calls = [item for item in final.output if item.type == "function_call"]
    assert [json.loads(call.arguments) for call in calls] == [
        json.loads(item.arguments) for item in whole.output if item.type == "function_call"
    ]
    assert len({call.call_id for call in calls} | {call.id for call in calls}) == 4


def test_a_response_is_continued_with_the_output_of_its_call(openai: OpenAI) -> None:
    """The call is in the input by the response's id, as it is, or by its own id."""
    asked: Any = {"model": "sim", "tools": FLAT, "max_output_tokens": 40}
    first = openai.responses.create(input="get_time", **asked)
    (call,) = first.output
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "noon"}
    second = openai.responses.create(previous_response_id=first.id, input=[output], **asked)
    assert second.output[0].type == "message" and second.output_text
    for item in (call.model_dump(exclude_none=True), {"type": "item_reference", "id": call.id}):
        third = openai.responses.create(input=[{"role": "user", "content": "get_time"}, item, output], **asked)
        assert third.output_text == second.output_text
        shown = list(openai.responses.input_items.list(third.id, order="asc"))
        assert [each.type for each in shown] == ["message", "function_call", "function_call_output"]
