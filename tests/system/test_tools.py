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
from openai import OpenAI

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
