"""The events of a response with calls: every suffix of them, whatever was given up before."""

from __future__ import annotations

import json
from typing import Any

import pytest

from api.openai.rendering import Facts
from api.openai.responses.object import EventSequence, answer_turn, ended_response, items_of
from penstock.engine import ChatTurn
from penstock.loops import at_once
from penstock.tools import Tool, Tools, opened
from streaming.jobs.codec import Delta, Draft, Terminal, Usage, encode
from streaming.jobs.job import Chat, Job, JobState, ResponseForm
from streaming.order import Priority

JOB = "job_" + "0" * 32
TOOLS = Tools(offered=(Tool("f"), Tool("g")))
ANSWER = ["I ", "call.", opened("f") + '{"a"', "", ": 1}", opened("g"), "{}", "\x1dDone", "."]
LOST = ["I ", opened("f") + '{"b']


def facts() -> Facts:
    turns = Chat((ChatTurn("user", "x"),))
    fields: Any = {"id": JOB, "model": "m", "tenant": "t", "priority": Priority.STANDARD, "prompt": turns}
    return Facts(Job(**fields, tools=TOOLS, response=ResponseForm(own_turns=1)), 1_700_000_000_000)


def rows_of(texts: list[str]) -> list[Delta]:
    return [Delta(1, number, text, (), 0, 1) for number, text in enumerate(texts, 1)]


def end(finish: str = "tool_calls", state: JobState = JobState.COMPLETED) -> Terminal:
    return Terminal(JOB, state, 3, (finish,), Usage(3, 3, 1), last_ms=1_700_000_001_000)


def stream(after: int = -1, *, lost: bool = False, finish: str = "tool_calls") -> bytes:
    sequence = EventSequence(facts(), after)
    data = sequence.opening()
    if lost:
        data += sequence.deltas(rows_of(LOST)) + sequence.begin_again()
    return data + sequence.deltas(rows_of(ANSWER)) + sequence.end(end(finish))


def as_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


def events(data: bytes) -> list[dict[str, Any]]:
    return [json.loads(block.partition(b"data: ")[2]) for block in data.split(b"\n\n")[:-2]]


@pytest.mark.parametrize("lost", [False, True])
def test_every_cut_gives_the_rest_byte_for_byte(lost: bool) -> None:
    whole = stream(lost=lost)
    frames = [frame + b"\n\n" for frame in whole.split(b"\n\n")[:-1]]
    assert [event["sequence_number"] for event in events(whole)] == list(range(len(frames) - 1))
    for number in range(len(frames) - 1):
        assert stream(number, lost=lost) == b"".join(frames[number + 1 :])


def test_texts_and_calls_are_items_in_their_order() -> None:
    """Each begins, comes in deltas and ends, before the next one begins."""
    found = events(stream())
    names = [event["type"].removeprefix("response.") for event in found if "delta" not in event["type"]]
    text = ["output_item.added", "content_part.added", "output_text.done", "content_part.done", "output_item.done"]
    call = ["output_item.added", "function_call_arguments.done", "output_item.done"]
    assert names == ["created", "in_progress", *text, *call, *call, *text, "completed"]
    output = found[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["message", "function_call", "function_call", "message"]
    assert [item["id"].split("_")[0] for item in output] == ["msg", "fc", "fc", "msg"]
    assert [item["arguments"] for item in output if item["type"] == "function_call"] == ['{"a": 1}', "{}"]
    for index, item in enumerate(output):
        deltas = [each["delta"] for each in found if each.get("output_index") == index and "delta" in each]
        assert "".join(deltas) == (item["content"][0]["text"] if "content" in item else item["arguments"])


def test_what_was_given_up_ends_incomplete_and_the_rest_has_later_indexes() -> None:
    """The calls have the same ids again, and the stored response is that of the stream."""
    found = events(stream(lost=True))
    done = [event for event in found if event["type"] == "response.output_item.done"]
    assert [event["output_index"] for event in done] == list(range(6))
    assert [event["item"]["status"] for event in done] == ["completed", "incomplete", *4 * ["completed"]]
    assert done[1]["item"]["call_id"] == done[3]["item"]["call_id"] and done[1]["item"]["id"] != done[3]["item"]["id"]
    known = facts()
    stored = at_once(ended_response(known, end(), rows_of(ANSWER), [encode(Draft(tuple(rows_of(LOST))))]))
    assert as_json(stored) == found[-1]["response"]


def test_an_answer_is_one_turn_of_the_next_conversation() -> None:
    """Its calls have the ids that the client knows."""
    turn = answer_turn(facts().job, rows_of(ANSWER))
    assert (turn.content, [call.name for call in turn.calls]) == ("I call.Done.", ["f", "g"])
    assert [each.turn(JOB).calls[0].id for each in items_of(facts().job, rows_of(ANSWER))[1:3]] == [
        call.id for call in turn.calls
    ]
