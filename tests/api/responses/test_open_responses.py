"""What the Open Responses specification asks of an HTTP server, as cases of our own on the simulated engine.

docs/responses.md lists what is left out: images, compaction and WebSockets.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from house import House
from openapi_document import DOCUMENT, conforms

pytestmark = pytest.mark.slow

ITEM_STATUS = {"in_progress", "completed", "incomplete"}


def schema(name: str) -> dict[str, Any]:
    found: dict[str, Any] = DOCUMENT["components"]["schemas"][name]
    return found


def create(house: House, **body: Any) -> dict[str, Any]:
    """The response to a request, which has every field of the specification in its type."""
    status, headers, data = house.post("/v1/responses", {"model": "sim", **body})
    assert status == 200, data
    assert headers["content-type"] == "application/json"
    found: dict[str, Any] = json.loads(data)
    assert conforms(found, schema("Response")), found
    return found


TOOL = {"type": "function", "name": "f", "description": None, "parameters": {"type": "object"}, "strict": True}


def test_a_tool_is_called(house: House) -> None:
    """The response shows the tools as they were sent, with each of their fields."""
    found = create(house, input="Call f.", tools=[TOOL])
    (item,) = found["output"]
    assert (item["type"], item["name"], item["status"]) == ("function_call", "f", "completed")
    assert json.loads(item["arguments"]) == {} and item["call_id"]
    assert (found["tools"], found["tool_choice"], found["parallel_tool_calls"]) == ([TOOL], "auto", True)
    named = create(house, input="x", tools=[TOOL], tool_choice={"type": "function", "name": "f"})
    assert named["tool_choice"] == {"type": "function", "name": "f"}


@pytest.mark.parametrize("tools", [[], [TOOL]])
def test_every_event_of_a_stream_is_of_its_type(house: House, tools: list[Any]) -> None:
    asked = {"model": "sim", "input": "count", "stream": True, "tools": tools}
    status, headers, data = house.post("/v1/responses", asked)
    assert status == 200 and headers["content-type"].startswith("text/event-stream")
    *blocks, done, rest = data.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    begun: set[tuple[str, int]] = set()
    for number, block in enumerate(blocks):
        name, payload = block.split(b"\n")
        event = json.loads(payload.removeprefix(b"data: "))
        assert name == b"event: " + event["type"].encode() and event["sequence_number"] == number
        if "response" in event:
            assert conforms(event["response"], schema("Response"))
        if "item" in event:
            assert conforms(event["item"], schema("OutputItem")) and event["item"]["status"] in ITEM_STATUS
        if event["type"] == "response.output_item.added":
            begun.add((event["item"]["id"], event["output_index"]))
        elif "item_id" in event:
            assert (event["item_id"], event["output_index"]) in begun
            assert event.get("content_index", 0) == 0 and ("content_index" in event) is not bool(tools)
        if event["type"].startswith("response.output_text."):
            assert isinstance(event["logprobs"], list)
    assert {json.loads(block.partition(b"data: ")[2])["type"].split(".")[0] for block in blocks} == {"response"}
