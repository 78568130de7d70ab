"""Messages and their events as pure functions: the same bytes however the deltas arrive, every suffix of them, and a
message that is what its events say."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from fast_path import written_fast
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from api.anthropic import answer
from api.anthropic.answer import SPAN, START, MessageEvents, message_in_slices, model_page
from api.anthropic.errors import error_object, own_headers
from api.openai.errors import ApiError, invalid_request, queue_full, store_unavailable
from api.openai.rendering import Facts, to_json
from penstock.engine import ChatTurn, Failure, Sampling
from penstock.loops import at_once
from penstock.tools import REASONING, TEXT, Tool, Tools, opened
from streaming.jobs.codec import Delta, Terminal, Usage
from streaming.jobs.job import Chat, Job, JobState, MessageForm
from streaming.order import Priority

JOB = "job_" + "0" * 32
TOOLS = Tools(offered=(Tool("f"),))


def job(*, thinking: bool = False, tools: Tools | None = None) -> Job:
    reasoning, form = "default" if thinking else "", MessageForm(thinking=thinking)
    return Job(id=JOB, model="m", tenant="t", priority=Priority.STANDARD, prompt=Chat((ChatTurn("user", "x"),)),
               sampling=Sampling(stop=("END",)), tools=tools, reasoning=reasoning, message=form)  # fmt: skip


def rows_of(texts: Sequence[str]) -> list[Delta]:
    return [Delta(1, number, text, (7,)) for number, text in enumerate(texts, 1)]


def end(finish: str = "stop", state: JobState = JobState.COMPLETED, failure: Failure | None = None) -> Terminal:
    return Terminal(JOB, state, 3, (finish,), Usage(prompt=5, completion=3, cached=2), failure)


def events(data: bytes, first: int = 0) -> list[dict[str, Any]]:
    """The events of a stream, whose framing and numbers are checked."""
    *blocks, rest = data.split(b"\n\n")
    assert rest == b""
    found = []
    for number, block in enumerate(blocks, first):
        name, payload, event_id = block.split(b"\n")
        found.append(json.loads(payload.removeprefix(b"data: ")))
        assert name == b"event: " + found[-1]["type"].encode() and event_id == b"id: %d" % number
    return found


def joined(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client makes of its events."""
    message: dict[str, Any] = found[0]["message"]
    content: list[dict[str, Any]] = message["content"]
    for event in found[1:]:
        match event["type"], event.get("delta", {}):
            case "content_block_start", _:
                assert event["index"] == len(content)
                content.append(event["content_block"])
            case "content_block_delta", {"type": "input_json_delta", "partial_json": part}:
                content[event["index"]].setdefault("json", []).append(part)
            case "content_block_delta", {"type": kind} as delta:
                content[event["index"]][kind.removesuffix("_delta")] += delta[kind.removesuffix("_delta")]
            case "message_delta", delta:
                message |= delta | {"usage": event["usage"]}
    for block in content:
        if block["type"] == "tool_use":
            block["input"] = json.loads("".join(block.pop("json", [])) or "{}")
    return message


def whole(about: Job, rows: list[Delta], terminal: Terminal) -> dict[str, Any]:
    return json.loads(to_json(at_once(message_in_slices(Facts(about, 1), terminal, rows))))  # type: ignore[no-any-return]


CASES = [
    (False, None, ["a", "", "b\u2028%d"]),
    (True, None, [REASONING, "think", " on", TEXT, "said", " so"]),
    (False, TOOLS, ["I call ", "it", opened("f"), '{"a":', '"é"}', opened("f"), "{}"]),
    (False, TOOLS, [opened("f"), '{"a": [1e400, 123456789012345678901234567890]}']),
    (True, TOOLS, [REASONING + "think" + TEXT, "say" + opened("f") + '{"a":1}', TEXT + "after"]),
]


@pytest.mark.parametrize(("thinking", "tools", "texts"), CASES)
@pytest.mark.parametrize("finish", ["stop", "length"])
def test_a_message_is_what_its_events_say(
    thinking: bool, tools: Tools | None, texts: list[str], finish: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many slices it takes to render it."""
    monkeypatch.setattr(answer, "ROWS_PER_SLICE", 2)
    about, rows = job(thinking=thinking, tools=tools), rows_of(texts)
    made = MessageEvents(about)
    found = events(made.deltas(rows) + made.end(end(finish)))
    assert joined(found) == whole(about, rows, end(finish))
    kinds = [event["type"] for event in found]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop")


texts = st.lists(st.text(max_size=4) | st.sampled_from(["%d", '"', "\u2028", "\x85", "\U0001f600"]), max_size=8)


@given(texts, st.integers(0, 2), st.data())
def test_every_cut_gives_the_rest_byte_for_byte(parts: list[str], resets: int, data: st.DataObject) -> None:
    about, rows = job(), rows_of(parts)

    def rendered(after: int) -> bytes:
        made = MessageEvents(about, resets, after)
        return made.deltas(rows) + made.end(end())

    complete = rendered(START)
    count = len(events(complete, resets * SPAN))
    cut = data.draw(st.integers(0, count - 1))
    rest = b"".join(each + b"\n\n" for each in complete.split(b"\n\n")[cut + 1 : -1])
    assert rendered(resets * SPAN + cut) == rest


refusals = st.sets(st.integers(1, 8), max_size=3)


@given(texts, st.integers(0, 8), refusals)
def test_the_fast_path_writes_the_same_bytes(parts: list[str], congested: int, refused: set[int]) -> None:
    rows = rows_of(["first", *parts])
    for place in refused.intersection(range(1, len(rows))):
        rows[place] = replace(rows[place], extras={"delta": {"refusal": "No."}})
    slow, fast = MessageEvents(job()), MessageEvents(job())
    expected = slow.deltas(rows) + slow.end(end())
    assert written_fast(fast, b"", rows, congested, end()) == expected


def test_only_plain_text_takes_the_fast_path() -> None:
    for about in (job(thinking=True), job(tools=TOOLS)):
        made = MessageEvents(about)
        made.delta(rows_of([REASONING + "a" + TEXT + "b"])[0])
        assert made.plain is None
    assert MessageEvents(job()).plain is None
    rows, resumed = rows_of("abcd"), MessageEvents(job(), after=4)
    found = [(resumed.delta(row), resumed.plain is not None) for row in rows]
    assert [(data != b"", plain) for data, plain in found] == [(False, False)] * 2 + [(False, True), (True, True)]


@pytest.mark.parametrize(
    ("finish", "extras", "texts", "stop"),
    [
        ("stop", None, ["a"], ("end_turn", None)),
        ("length", None, ["a"], ("max_tokens", None)),
        ("content_filter", None, ["a"], ("refusal", None)),
        ("stop", {"choice": {"stop_reason": "END"}}, ["a"], ("stop_sequence", "END")),
        ("stop", {"choice": {"stop_reason": 128009}}, ["a"], ("end_turn", None)),
        ("stop", {"choice": {"stop_reason": "<|end|>"}}, ["a"], ("end_turn", None)),
        ("stop", {"choice": {"stop_reason": "END"}}, [opened("f") + "{}"], ("tool_use", None)),
        ("stop", {"delta": {"refusal": "No."}}, [""], ("refusal", None)),
        ("tool_calls", None, [opened("f") + "{}"], ("tool_use", None)),
        ("length", None, [opened("f") + '{"a'], ("max_tokens", None)),
    ],
)
def test_why_a_message_stopped(
    finish: str, extras: dict[str, Any] | None, texts: list[str], stop: tuple[str, str | None]
) -> None:
    about = job(tools=TOOLS if "f" in texts[0] else None)
    rows = [Delta(1, 1, texts[0], (7,), extras=extras)]
    for tail in ([], [Delta(1, 2, "", (8,))]):
        made = MessageEvents(about)
        found = [whole(about, rows + tail, end(finish)), joined_or_none(made, rows + tail, finish)]
        for message in filter(None, found):
            assert (message["stop_reason"], message["stop_sequence"]) == stop


def joined_or_none(made: MessageEvents, rows: list[Delta], finish: str) -> dict[str, Any] | None:
    """What the events say; None if their last call was cut in the middle of its JSON."""
    found = events(made.deltas(rows) + made.end(end(finish)))
    return joined(found) if '{"a' not in rows[0].text else None


@pytest.mark.parametrize("text", ['{"a', '{"a": "\\ud800"}', "[1]", '{"a":' * 2000 + "1" + "}" * 2000])
def test_arguments_that_are_no_object_are_told_as_they_are(text: str) -> None:
    """And never as a call without arguments, which a client would run."""
    for arguments, told in ((text, {"INVALID_JSON": text}), ("", {})):
        (block,) = whole(job(tools=TOOLS), rows_of([opened("f") + arguments]), end("tool_calls"))["content"]
        assert block["input"] == told


def test_thinking_is_shown_only_where_it_was_asked_for() -> None:
    """Numbers of blocks do not tell of it either."""
    rows = rows_of([REASONING, "think", TEXT, "said"])
    about = Job(id=JOB, model="m", tenant="t", priority=Priority.STANDARD, prompt=Chat(()), reasoning="default",
                message=MessageForm())  # fmt: skip
    made = MessageEvents(about)
    data = made.deltas(rows) + made.end(end())
    assert b"think" not in data
    assert joined(events(data))["content"] == whole(about, rows, end())["content"] == [{"type": "text", "text": "said"}]


def test_an_empty_answer_has_one_empty_block() -> None:
    made = MessageEvents(job())
    assert joined(events(made.end(end()))) == whole(job(), [], end())


def test_tokens_of_a_cached_prompt_count_apart() -> None:
    usage = whole(job(), [], end())["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]) == (3, 2, 3)


def test_the_tier_is_that_of_the_lane() -> None:
    for priority, tier in (("interactive", "priority"), ("standard", "standard"), ("batch", "batch")):
        assert whole(replace(job(), priority=Priority(priority)), [], end())["usage"]["service_tier"] == tier


def test_a_page_of_models_names_its_ends() -> None:
    page = model_page([{"id": name, "created": 1} for name in "abc"])
    assert (page["first_id"], page["last_id"]) == ("a", "c")


def test_a_job_that_did_not_complete_is_an_error() -> None:
    for state in (JobState.FAILED, JobState.CANCELLED, JobState.EXPIRED):
        with pytest.raises(ApiError):
            MessageEvents(job()).end(end(state=state))


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (invalid_request("x"), "invalid_request_error"),
        (ApiError(401, "c", "x"), "authentication_error"),
        (ApiError(403, "c", "x"), "permission_error"),
        (ApiError(404, "c", "x"), "not_found_error"),
        (ApiError(408, "c", "x"), "timeout_error"),
        (ApiError(409, "c", "x"), "invalid_request_error"),
        (ApiError(413, "c", "x"), "request_too_large"),
        (queue_full(3, 1, 2.0), "rate_limit_error"),
        (store_unavailable(), "overloaded_error"),
        (ApiError(500, "c", "x"), "api_error"),
    ],
)
def test_errors_have_their_types(error: ApiError, kind: str) -> None:
    shown = error_object(error, "req_1")
    assert shown["type"] == "error" and shown["request_id"] == "req_1"
    assert (shown["error"]["type"], shown["error"]["message"]) == (kind, error.message)


def test_rates_are_told_by_their_names() -> None:
    now = datetime.now(UTC)
    rates = [(b"x-ratelimit-limit-requests", b"9"), (b"x-ratelimit-reset-requests", b"1.5s"), (b"x-job-id", b"j")]
    found = dict(own_headers(rates, "req_1"))
    assert found[b"anthropic-ratelimit-requests-limit"] == b"9" and found[b"request-id"] == b"req_1" and len(found) == 3
    until = datetime.fromisoformat(found[b"anthropic-ratelimit-requests-reset"].decode())
    assert 0 <= (until - now).total_seconds() < 60 and until.utcoffset() == timedelta(0)
