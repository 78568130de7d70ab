"""What clients get to see: read back by the OpenAI library itself, and by parsers that split lines greedily."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import httpx2
import msgspec
import openai
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from rendered import completion, facts_of

from api.openai.cursor import Cursor
from api.openai.errors import ApiError, Wait
from api.openai.job_events import delta_event, position_event, queued_event, reset_event, terminal_event
from api.openai.rendering import ChunkRenderer, Facts, Waiting, error_event, job_object
from api.openai.results import count_of
from penstock.engine import Failure, Logprob
from streaming.jobs.codec import Delta, Terminal, Usage
from streaming.jobs.job import JobState
from streaming.jobs.records import JobRecord
from streaming.jobs.waiting import QueuePosition
from workers.engines.task_answers import reported_tokens

TOKEN = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
"""Any text a token may be: line ends, quotes, NUL, U+2028; no lone surrogates, which no wire message can hold."""
NASTY = 'a\u2028b\u2029c\x85d\r\ne\n\nf\x00g"h\\i\x0b\x0c\x1c\U0001f600'


def delta(text: str, index: int = 0, seq: int = 1, logprobs: tuple[Logprob, ...] = ()) -> Delta:
    return Delta(1, seq, text, (7,), index, 1, logprobs=logprobs)


def done(*finishes: str, seq: int = 1, rows: tuple[Delta, ...] = ()) -> Terminal:
    return Terminal("j1", JobState.COMPLETED, seq, finishes, Usage(5, 3, 2), rows=rows)


def payloads(stream: bytes) -> Iterator[Any]:
    """Split at everything any client splits lines at; each event must still be one `data:` line and a blank one."""
    lines = stream.decode().splitlines()
    assert lines[1::2] == [""] * (len(lines) // 2)
    for line in lines[::2]:
        assert line.startswith("data: ")
        yield msgspec.json.decode(line.removeprefix("data: ")) if line != "data: [DONE]" else None


def through_openai(stream: bytes, *, chat: bool = True) -> list[Any]:
    """The stream as the real library's caller sees it."""

    def answer(request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(200, headers={"content-type": "text/event-stream"}, content=stream)

    transport = httpx2.Client(transport=httpx2.MockTransport(answer))
    with openai.OpenAI(api_key="k", base_url="http://127.0.0.1/v1", http_client=transport, max_retries=0) as client:
        if chat:
            return list(client.chat.completions.create(model="m", messages=[], stream=True))
        return list(client.completions.create(model="m", prompt="p", stream=True))


def record(state: JobState, *, metadata: dict[str, str] | None = None, **fields: Any) -> JobRecord:
    """The record of a job in this state; `metadata` is the job's."""
    job = facts_of(metadata=metadata or {}).job
    return JobRecord(job=job, state=state, **{"created_ms": 1_700_000_000_999, "keep_s": 0, "terminal": None} | fields)


def render(about: Facts, deltas: Iterable[Delta], terminal: Terminal, *, include_usage: bool = False) -> bytes:
    renderer = ChunkRenderer(about, include_usage=include_usage)
    data = b"".join(renderer.delta(each) for each in deltas)
    try:
        return data + renderer.end(terminal)
    except ApiError as error:
        return data + error_event(error, lambda _code: None)


# --- streams -------------------------------------------------------------------------------------------------------


@given(TOKEN)
@example(NASTY)
def test_any_token_text_comes_back_from_a_chunk(text: str) -> None:
    """One event, whatever the text, and the same text out of it: of a chat and of a completion."""
    for chat, said, nothing in (
        (True, {"delta": {"role": "assistant", "content": text}}, {"delta": {}}),
        (False, {"text": text}, {"text": ""}),
    ):
        first, finish, end = payloads(render(facts_of(chat=chat), [delta(text)], done("stop")))
        assert first["choices"] == [{"index": 0, **said, "logprobs": None, "finish_reason": None}]
        assert finish["choices"] == [{"index": 0, **nothing, "logprobs": None, "finish_reason": "stop"}]
        assert end is None


@given(st.lists(TOKEN, max_size=4))
@example([NASTY, NASTY])
def test_the_openai_library_reads_the_same_text(texts: list[str]) -> None:
    """Through the library's own line splitting the texts add up, and every chunk is of its type."""
    deltas = [delta(text, seq=seq) for seq, text in enumerate(texts, 1)]
    chunks = through_openai(render(facts_of(), deltas, done("stop"), include_usage=True))
    assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == "".join(texts)
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk.model_dump(), strict=True)
    assert chunks[-1].usage.total_tokens == 8
    assert chunks[-2].choices[0].finish_reason == "stop"


@given(st.dictionaries(st.sampled_from("ab"), TOKEN, min_size=1), TOKEN)
@example({"a": NASTY}, NASTY)
def test_any_token_text_comes_back_from_a_job_event(metadata: dict[str, str], text: str) -> None:
    """Job events too are one data line each, with the cursor as their id."""
    name, cursor, data, blank = delta_event(facts_of(), Cursor(3, 9, "w-1"), delta(text)).encode().decode().splitlines()
    assert (name, cursor, blank) == ("event: delta", "id: 3:9:w-1", "")
    assert msgspec.json.decode(data.removeprefix("data: "))["text"] == text
    end = terminal_event(record(JobState.CANCELLED, terminal=Terminal("j1", JobState.CANCELLED, 0), metadata=metadata))
    assert msgspec.json.decode(end.encode().decode().splitlines()[2].removeprefix("data: "))["metadata"] == metadata


def test_the_role_comes_once_per_choice() -> None:
    """Each choice's first chunk has the role, later ones have not; a choice without text gets it with its finish."""
    deltas = [delta("a", 0), delta("b", 1), delta("c", 0)]
    chunks = through_openai(render(facts_of(choices=3), deltas, done("stop", "length", "stop")))
    roles = [(choice.index, choice.delta.role) for chunk in chunks for choice in chunk.choices if choice.delta.role]
    assert roles == [(0, "assistant"), (1, "assistant"), (2, "assistant")]
    finishes = [(c.index, c.finish_reason) for chunk in chunks for c in chunk.choices if c.finish_reason]
    assert finishes == [(0, "stop"), (1, "length"), (2, "stop")]


def test_a_delta_without_text_is_no_event_and_does_not_use_up_the_role() -> None:
    """Half a character gives no block; the role waits for the first that does."""
    renderer = ChunkRenderer(facts_of())
    assert renderer.delta(delta("")) == b""
    assert next(payloads(renderer.delta(delta("a"))))["choices"][0]["delta"] == {"role": "assistant", "content": "a"}


def test_usage_comes_last_and_only_if_wanted() -> None:
    """With include_usage every chunk has the key, and the last has the counts and no choices."""
    wanted = list(payloads(render(facts_of(), [delta("a")], done("stop"), include_usage=True)))
    assert [chunk["usage"] for chunk in wanted[:2]] == [None, None]
    assert wanted[2]["choices"] == []
    counts = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
    assert wanted[2]["usage"] == counts | {"prompt_tokens_details": {"cached_tokens": 2}}
    assert all("usage" not in chunk for chunk in payloads(render(facts_of(), [delta("a")], done("stop"))) if chunk)


def test_the_head_is_the_jobs() -> None:
    """Id, creation second, model, the tier really used and the fingerprint stand in every chunk."""
    for chunk in through_openai(render(facts_of(), [delta("a")], done("stop"))):
        assert (chunk.id, chunk.created, chunk.model) == ("chatcmpl-j1", 1_700_000_000, "m")
        assert (chunk.service_tier, chunk.system_fingerprint) == ("default", "fp_1")
    for chunk in through_openai(render(facts_of(chat=False), [delta("a")], done("stop")), chat=False):
        assert (chunk.id, chunk.object) == ("cmpl-j1", "text_completion")


@pytest.mark.parametrize(
    ("terminal", "code"),
    [
        (Terminal("j1", JobState.FAILED, 1, failure=Failure("poison", "Gave up\nhere.", 500)), "poison"),
        (Terminal("j1", JobState.CANCELLED, 1), "job_cancelled"),
        (Terminal("j1", JobState.EXPIRED, 1), "deadline_exceeded"),
    ],
)
def test_a_job_that_fails_in_mid_stream_says_so(terminal: Terminal, code: str) -> None:
    """The last frame is the error; no finish and no [DONE] follow, and the library raises it."""
    stream = render(facts_of(), [delta("a")], terminal)
    *_, last = payloads(stream)
    assert last["error"]["code"] == code
    assert stream.count(b"data: ") == 2
    with pytest.raises(openai.APIError) as raised:
        through_openai(stream)
    assert raised.value.code == code


# --- log-probabilities -----------------------------------------------------------------------------------------------

PAIR = (Logprob("He", -0.5, (("He", -0.5), ("Hö", -1.5))), Logprob("\ufffd", -math.inf))


def test_chat_logprobs_are_read_by_the_library() -> None:
    """Tokens, bytes and alternatives; minus infinity has its stand-in, half a character has no bytes."""
    chunk = through_openai(render(facts_of(logprobs=True), [delta("He", logprobs=PAIR)], done("stop")))[0]
    ChatCompletionChunk.model_validate(chunk.model_dump(), strict=True)
    first, second = chunk.choices[0].logprobs.content
    assert (first.token, first.logprob, first.bytes) == ("He", -0.5, [72, 101])
    assert [(top.token, top.logprob) for top in first.top_logprobs] == [("He", -0.5), ("Hö", -1.5)]
    assert (second.logprob, second.bytes) == (-9999.0, None)


TOKENS = ("bytes: \\xf0\\x9f", "bytes:\\x98", "bytes:\\x80", "!")
PARTS = tuple(Logprob(token, -0.5, (("bytes:\\x98", -0.5),)) for token in TOKENS)


def test_a_token_within_a_character_has_its_bytes() -> None:
    """Chat: text as OpenAI shows it, and bytes, also of alternatives. Completion: offsets count characters."""
    said = done("stop")
    chunk = through_openai(render(facts_of(logprobs=True), [delta(" \U0001f600!", logprobs=PARTS)], said))[0]
    rows = chunk.choices[0].logprobs.content
    assert b"".join(bytes(row.bytes) for row in rows).decode() == " \U0001f600!"
    assert [row.token for row in rows] == [each.token for each in PARTS] and rows[0].top_logprobs[0].bytes == [0x98]
    about = facts_of(chat=False, logprobs=True)
    deltas = [delta(" \U0001f600!", 0, 1, PARTS), delta("He", 0, 2, PAIR[:1])]
    first, second = through_openai(render(about, deltas, said), chat=False)[:2]
    assert (first.choices[0].logprobs.text_offset, second.choices[0].logprobs.text_offset) == ([0, 2, 2, 2], [3])
    whole = completion(about, said, deltas)["choices"][0]["logprobs"]
    assert whole["text_offset"] == [0, 2, 2, 2, 3] and whole["tokens"][1] == "bytes:\\x98"


# --- answers in one piece --------------------------------------------------------------------------------------------


def test_a_chat_answer_is_a_chat_completion() -> None:
    """The deltas of each choice are joined in order; the library's strict model takes the result."""
    rows = [delta("a", 0), delta("x", 1), delta("b", 0)]
    body = completion(facts_of(choices=2), done("stop", "length"), rows)
    answer = ChatCompletion.model_validate(body, strict=True)
    assert [(c.message.content, c.finish_reason) for c in answer.choices] == [("ab", "stop"), ("x", "length")]
    assert (answer.id, answer.created, answer.service_tier) == ("chatcmpl-j1", 1_700_000_000, "default")
    assert answer.usage and answer.usage.prompt_tokens_details and answer.usage.prompt_tokens_details.cached_tokens == 2


# --- jobs ------------------------------------------------------------------------------------------------------------


def test_a_waiting_job_shows_where_it_stands() -> None:
    """Position and estimate while queued; what has not happened is null."""
    position = QueuePosition(own=2, others=40, served=1200, higher=1)
    wait = Wait(1500, 900, 4000)
    queued = record(JobState.QUEUED, metadata={"a": "b"})
    shown = job_object(queued, Waiting(position, wait))
    assert (shown["status"], shown["queue_position"], shown["eta_ms"]) == ("queued", 43, 1500)
    assert (shown["eta_low_ms"], shown["eta_high_ms"]) == (900, 4000)
    assert shown["queue_reason"].startswith("lane standard; 1 job of higher lanes first; about 40 jobs of others first")
    assert shown["created_at"] == 1_700_000_000.999
    held = job_object(queued, Waiting(position, wait, "no worker is ready: none is running"))
    assert held["queue_reason"] == "no worker is ready: none is running", "nobody goes first"
    for name in ("started_at", "first_token_at", "completed_at", "expires_at", "usage", "result", "error"):
        assert shown[name] is None
    assert (shown["last_event_id"], shown["metadata"]) == ("1:1:-", {"a": "b"})


def test_a_finished_job_shows_its_answer() -> None:
    """The result is the very answer of the synchronous call, if it is wanted; lists leave it out."""
    terminal = done("stop", rows=(delta("hi"),))
    times = {"started_ms": 1500, "first_ms": 2000, "done_ms": 2500}
    over = record(JobState.COMPLETED, terminal=terminal, attempt=2, keep_s=7, **times)
    shown = job_object(over, result=completion(facts_of(), terminal, terminal.rows))
    moments = ("started_at", "first_token_at", "completed_at", "expires_at")
    assert [shown[name] for name in moments] == [1.5, 2.0, 2.5, 9.5]
    assert (shown["attempts"], shown["usage"]["total_tokens"], shown["error"]) == (2, 8, None)
    assert job_object(over) == shown | {"result": None}


def test_a_jobs_events_tell_its_life() -> None:
    """queued, started, delta and the final state's name, each with the cursor to go on behind it."""
    waiting = Waiting(QueuePosition(own=2), Wait(1500))
    over = record(JobState.COMPLETED, epoch=4, terminal=done("stop", rows=(delta("hi"),)))
    place = {"position": 2, "eta_ms": 1500, "eta_low_ms": None, "eta_high_ms": None}
    assert queued_event(4, waiting) == ("queued", Cursor(4, 1), place)
    assert position_event(waiting) == ("queue.position", None, place)
    assert b"id:" not in position_event(waiting).encode()
    end = terminal_event(over)
    assert (end.name, end.id) == ("completed", Cursor(4, 2))
    assert (end.data["result"], end.data["finish_reasons"]) == (None, ["stop"])
    cut = Terminal("j1", JobState.CANCELLED, 1, ("stop", ""))
    assert terminal_event(record(JobState.CANCELLED, terminal=cut)).data["finish_reasons"] == ["stop", None], (
        "a choice that was not finished"
    )
    assert reset_event(5) == ("stream.reset", Cursor(5, 0), {"epoch": 5})


@pytest.mark.parametrize("ids", [[], [7], [1, 22, 333], list(range(1000))], ids=len)
def test_ids_are_counted_without_parsing_them(ids: list[int]) -> None:
    assert count_of(reported_tokens(ids, 4096)) == len(ids)
