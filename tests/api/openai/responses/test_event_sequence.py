"""The event sequence as a pure function: the same bytes however the deltas arrive, and every suffix of them, also with
calls and whatever was given up before."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from fast_path import written_fast
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from api.openai.errors import internal_error
from api.openai.rendering import Facts
from api.openai.responses.object import AnswerItems, EventSequence, answer_turn, ended_response
from penstock.engine import ChatTurn, Failure, Logprob, Sampling
from penstock.loops import at_once
from penstock.tools import Tool, Tools, opened
from streaming.jobs.codec import Delta, Draft, Terminal, Usage, encode
from streaming.jobs.job import Chat, Job, JobState, ResponseForm
from streaming.order import Priority

JOB = "job_" + "0" * 32


def facts(*, background: bool = False, logprobs: int | None = None, tools: Tools | None = None) -> Facts:
    job = Job(
        id=JOB,
        model="m",
        tenant="t",
        priority=Priority.STANDARD,
        prompt=Chat((ChatTurn("user", "%d %s"),)),
        sampling=Sampling(logprobs=logprobs),
        tools=tools,
        response=ResponseForm(background=background, own_turns=1),
    )
    return Facts(job, 1_700_000_000_000)


def rows_of(texts: Sequence[str], *, logprobs: bool = False) -> list[Delta]:
    """Deltas with these texts; "" is a token that is only part of a character."""
    found = (Logprob("%d\u2028", -0.5, (("a", -1.0),)),) if logprobs else ()
    return [Delta(1, number, text, (7,), 0, 1, logprobs=found) for number, text in enumerate(texts, 1)]


def end(state: JobState = JobState.COMPLETED, finish: str = "stop", failure: Failure | None = None) -> Terminal:
    return Terminal(JOB, state, 3, (finish,), Usage(3, 3, 1), failure, last_ms=1_700_000_001_000)


def events(data: bytes) -> list[dict[str, Any]]:
    *blocks, done, rest = data.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    return [json.loads(block.partition(b"data: ")[2]) for block in blocks]


texts = st.lists(st.text(max_size=4) | st.sampled_from(["%d", '"', "\\", "\u2028", "\x85", "\U0001f600"]), max_size=8)


@given(st.lists(texts, min_size=1, max_size=3), st.booleans(), st.booleans(), st.data())
def test_every_cut_gives_the_rest_byte_for_byte(
    items: list[list[str]], background: bool, logprobs: bool, data: st.DataObject
) -> None:
    """With items that were given up, with and without log-probabilities."""
    about = facts(background=background, logprobs=0 if logprobs else None)

    def rendered(after: int, early: bool) -> bytes:
        sequence = EventSequence(about, after)
        found = sequence.opening() + (sequence.running() if early else b"")
        *drafts, last = [rows_of(each, logprobs=logprobs) for each in items]
        for draft in drafts:
            found += sequence.deltas(draft) + sequence.begin_again()
        for row in last:
            found += sequence.delta(row)
        return found + sequence.end(end())

    whole = rendered(-1, early=False)
    found, blocks = events(whole), whole.split(b"\n\n")
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    cut = data.draw(st.integers(0, len(found) - 1))
    assert rendered(cut, early=data.draw(st.booleans())) == b"\n\n".join(blocks[cut + 1 :])
    shown = [each for each in items[:-1] if (logprobs and each) or any(each)] + [items[-1]]
    done = [event["text"] for event in found if event["type"] == "response.output_text.done"]
    assert done == ["".join(each) for each in shown]
    assert [item["content"][0]["text"] for item in found[-1]["response"]["output"]] == done[-1:]
    added = [event["output_index"] for event in found if event["type"] == "response.output_item.added"]
    assert added == list(range(len(shown)))


refusals = st.sets(st.integers(1, 8), max_size=3)


@given(texts, st.integers(0, 8), refusals)
def test_the_fast_path_writes_the_same_bytes(parts: list[str], congested: int, refused: set[int]) -> None:
    """Also where the connection is congested at one of the tokens, and the slow path takes over."""
    rows = rows_of(["first", *parts])
    for place in refused.intersection(range(1, len(rows))):
        rows[place] = replace(rows[place], extras={"delta": {"refusal": "No."}})
    slow, fast = EventSequence(facts()), EventSequence(facts())
    expected = slow.opening() + slow.deltas(rows) + slow.end(end())
    assert written_fast(fast, fast.opening(), rows, congested, end()) == expected


@pytest.mark.parametrize(
    ("terminal", "last", "status"),
    [
        (end(), "completed", "completed"),
        (end(finish="length"), "incomplete", "incomplete"),
        (end(JobState.CANCELLED), "incomplete", "cancelled"),
        (end(JobState.EXPIRED), "failed", "failed"),
        (end(JobState.FAILED, failure=Failure("poison", "It was given up.", 500)), "failed", "failed"),
    ],
)
@pytest.mark.parametrize("texts", [[], ["a"]])
def test_a_stream_ends_with_one_of_three_events(terminal: Terminal, last: str, status: str, texts: list[str]) -> None:
    sequence = EventSequence(facts(background=True))
    found = events(sequence.opening() + sequence.deltas(rows_of(texts)) + sequence.end(terminal))
    assert found[-1]["type"] == f"response.{last}" and found[-1]["response"]["status"] == status
    ends = [
        event["type"] for event in found if event["type"].startswith(("response.com", "response.inc", "response.f"))
    ]
    assert len(ends) == 1
    kinds = {event["type"] for event in found}
    assert ("response.output_item.done" in kinds) == ("response.output_item.added" in kinds)
    output = found[-1]["response"]["output"]
    assert bool(output) == (bool(texts) or terminal.state is JobState.COMPLETED)
    assert all(item["status"] == ("completed" if status == "completed" else "incomplete") for item in output)


def test_a_failure_is_told_to_a_reader_who_has_more_events_than_are_left() -> None:
    """After the store lost events: the number of the last one rises all the same."""
    sequence = EventSequence(facts(), after=40)
    (failed,) = events(sequence.opening() + sequence.deltas(rows_of(["a"])) + sequence.fail(internal_error("r")))
    assert (failed["type"], failed["sequence_number"]) == ("response.failed", 41)


def test_a_token_without_text_has_an_event_only_with_its_logprobs() -> None:
    rows = rows_of(["", "é"], logprobs=True)
    sequence = EventSequence(facts(logprobs=1))
    found = events(sequence.opening() + sequence.deltas(rows) + sequence.end(end()))
    deltas = [event for event in found if event["type"] == "response.output_text.delta"]
    assert [(event["delta"], len(event["logprobs"])) for event in deltas] == [("", 1), ("é", 1)]
    done = next(event for event in found if event["type"] == "response.output_text.done")
    assert done["logprobs"] == [each for event in deltas for each in event["logprobs"]]
    assert done["logprobs"][0]["top_logprobs"][0] == {"token": "a", "logprob": -1.0, "bytes": [97]}
    plain = EventSequence(facts())
    assert plain.deltas([*rows_of([""])]) == b""


# --- calls -----------------------------------------------------------------------------------------------------------


ANSWER = ["I ", "call.", opened("f") + '{"a"', "", ": 1}", opened("g"), "{}", "\x1dDone", "."]
LOST = ["I ", opened("f") + '{"b']
CALLING, CALLED = facts(tools=Tools(offered=(Tool("f"), Tool("g")))), end(finish="tool_calls")


def stream(after: int = -1, *, lost: bool = False) -> bytes:
    sequence = EventSequence(CALLING, after)
    data = sequence.opening()
    if lost:
        data += sequence.deltas(rows_of(LOST)) + sequence.begin_again()
    return data + sequence.deltas(rows_of(ANSWER)) + sequence.end(CALLED)


@pytest.mark.parametrize("lost", [False, True])
def test_every_cut_of_an_answer_with_calls_gives_the_rest(lost: bool) -> None:
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
    stored = at_once(ended_response(CALLING, CALLED, rows_of(ANSWER), [encode(Draft(tuple(rows_of(LOST))))]))
    assert json.loads(json.dumps(stored)) == found[-1]["response"]


def test_an_answer_is_one_turn_of_the_next_conversation() -> None:
    """Its calls have the ids that the client knows."""
    turn = answer_turn(CALLING.job, rows_of(ANSWER))
    assert (turn.content, [call.name for call in turn.calls]) == ("I call.Done.", ["f", "g"])
    assert [each.turn(JOB).calls[0].id for each in AnswerItems(CALLING.job).take(rows_of(ANSWER))[1:3]] == [
        call.id for call in turn.calls
    ]
