"""Streamed replies: what chunks and ends mean, how far a server is believed, and timers, by a clock of the test."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from penstock.engine import ChatTurn, Piece, Request, Sampling
from workers.engines.upstream import reply, server
from workers.engines.upstream.continuation import Rung
from workers.engines.upstream.generation import (
    MAX_CHARACTERS_PER_ALTERNATIVE,
    MAX_ERROR_BYTES,
    MAX_EXCESS_TOKENS,
    MIN_CHARACTERS,
    StreamReader,
    UpstreamGeneration,
)
from workers.engines.upstream.http import (
    EXCESS,
    MAX_LENIENT_BYTES,
    MAX_LINE_BYTES,
    MAX_REPLY_BYTES,
    MAX_WORDS,
    EventSplitter,
    LineTooLongError,
    error_of,
)
from workers.engines.upstream.reply import (
    MAX_COUNT,
    MAX_TEXT,
    MAX_TOKEN_ID,
    End,
    ReplyOutcome,
    by_error,
    by_finish,
    by_status,
)

SECRET = "sk-operator-42"


@pytest.mark.parametrize(
    ("reason", "end"),
    [
        ("stop", "stop"), ("length", "length"), ("tool_calls", "stop"), ("function_call", "stop"),
        ("eos_token", "stop"), ("eos", "stop"), ("end_turn", "stop"), ("STOP", "stop"), ("repetition", "stop"),
        ("a word of tomorrow", "stop"), ("max_tokens", "length"), ("MAX_TOKENS", "length"), ("model_length", "length"),
        ("content_filter", "content_filter"), ("SAFETY", "content_filter"), ("refusal", "content_filter"),
        ("abort", End.BROKEN), ("error", End.BROKEN), ("cancelled", End.BROKEN), ("timeout", End.BROKEN),
        ("insufficient_system_resource", End.BROKEN), ("", None), ("null", None),
    ],
)  # fmt: skip
def test_a_finish_reason_completes_an_answer_unless_it_tells_an_interruption(reason: str, end: Any) -> None:
    outcome = by_finish(reason)
    assert outcome is not None if end else outcome is None
    if outcome is not None:
        assert (outcome.end if isinstance(end, End) else outcome.finish) == end


STATUSES = {
    400: End.FAILED, 401: End.KEY, 403: End.FAILED, 404: End.FAILED, 408: End.BROKEN, 413: End.FAILED, 422: End.FAILED,
    429: End.BUSY, 500: End.BROKEN, 502: End.BROKEN, 503: End.BUSY, 504: End.BROKEN, 529: End.BUSY,
}  # fmt: skip
BODIES: dict[str, Any] = {
    "nested": {"error": {"message": "no such thing", "type": "invalid"}},
    "flat": {"object": "error", "message": "no such thing", "code": 400},
    "TGI": {"error": "no such thing", "error_type": "validation"},
    "FastAPI": {"detail": "no such thing"},
    "text": None,
}


@pytest.mark.parametrize("status", STATUSES)
@pytest.mark.parametrize("body", BODIES)
def test_a_status_says_whose_fault_it_is_in_the_servers_words(status: int, body: str) -> None:
    decoded = BODIES[body]
    outcome = by_status(status, b"no such thing" if decoded is None else json.dumps(decoded).encode())
    assert outcome.end is STATUSES[status] and outcome.words == "no such thing"
    assert outcome.reason == f"HTTP {status}", "logs do not repeat a server, who may repeat a prompt"
    failure = outcome.failure
    if outcome.end is End.FAILED:
        assert failure.status == status and "no such thing" in failure.message
    else:  # the words about a server's own fault are for no client
        assert failure.status == 502 and "no such thing" not in failure.message


def inside(error: object) -> ReplyOutcome:
    """The end of a stream with this error."""
    return by_error(error_of({"error": error}))


def status_with(status: int, error: object) -> ReplyOutcome:
    return by_status(status, json.dumps({"error": error}).encode())


def test_an_error_inside_a_stream_is_read_like_a_status() -> None:
    """SGLang refuses with 200 and an error inside."""
    assert inside({"message": "full", "code": 503}).end is End.BUSY
    assert inside({"message": "too long", "code": 400}).end is End.FAILED
    assert inside({"message": "gone", "type": "server_error"}).end is End.BROKEN
    assert inside({"message": "x", "code": "rate_limit_exceeded"}).end is End.BROKEN
    told = [inside({"code": code}).how == "told" for code in ("job_cancelled", "draining", 503)]
    assert told == [True, False, False]


def test_a_prompt_that_is_too_long_has_the_code_of_that() -> None:
    said = "request (3001 tokens) exceeds the available context size (2048 tokens), try increasing it"
    assert status_with(400, {"message": said}).failure.code == "context_length_exceeded"


@pytest.mark.parametrize("status", [402, 411, 418, 421, 426, 499])
def test_a_status_that_means_nothing_to_a_client_becomes_400(status: int) -> None:
    outcome = status_with(status, "no")
    assert outcome.end is End.KEY or outcome.failure.status == 400


CODES = [
    "\u00b2", "\u0664\u0660\u0664", "9" * 5000, "1e3", "-404", " 404", 10**40, -404, 99, 600, True, 404.0, None, [404],
]  # fmt: skip


@pytest.mark.parametrize("code", CODES, ids=lambda code: str(code)[:20])
def test_a_strange_code_is_no_status(code: Any) -> None:
    found = error_of({"error": {"message": "m", "code": code}})
    assert found is not None and found[:3] == ("m", 0, None)
    assert by_error(found).end is End.BROKEN


def test_no_key_and_no_control_character_is_passed_on() -> None:
    """Nor half a key, where the words are cut."""
    said = "\x1b[31m" + "y" * (MAX_WORDS - 10) + SECRET
    error = {"message": said, "param": "p" + SECRET + "q" * 5000}
    for outcome in (status_with(400, error), by_status(400, said.encode()), inside(said)):
        hidden = outcome.without(["", SECRET])
        failure = hidden.failure
        for text in (hidden.words, hidden.reason, failure.message, failure.param or ""):
            assert SECRET[:6] not in text and text.isprintable()
        assert len(failure.message) < MAX_WORDS + 100 and len(failure.param or "") <= 128


IDS = [
    '{"choices": [{"text": "x", "token_ids": [1, N]}]}', '{"choices": [{"text": "x", "prompt_token_ids": [N]}]}',
    '{"prompt_token_ids": [N]}', '{"__verbose": {"tokens": [N], "tokens_predicted": 1}}',
]  # fmt: skip
COUNTS = [
    '{"usage": {"prompt_tokens": N}}', '{"usage": {"completion_tokens": N}}', '{"prompt_progress": {"total": N}}',
    '{"usage": {"prompt_tokens_details": {"cached_tokens": N}}}', '{"prompt_progress": {"cache": N}}',
    '{"__verbose": {"tokens_predicted": N}}',
]  # fmt: skip


@pytest.mark.parametrize(
    ("chunk", "numbers", "most"),
    [
        *[(each, ("-1", str(2**31), str(10**30), "true", "1.5"), MAX_TOKEN_ID) for each in IDS],
        *[(each, ("-1", str(MAX_COUNT + 1), str(10**30)), MAX_COUNT) for each in COUNTS],
    ],
)
def test_a_number_that_cannot_be_true_makes_a_chunk_malformed(chunk: str, numbers: tuple[str, ...], most: int) -> None:
    for number in numbers:
        with pytest.raises((msgspec.DecodeError, ValueError)):
            reply.decode(chunk.replace("N", number).encode())
    for number in ("0", str(most)):
        reply.decode(chunk.replace("N", number).encode())


@pytest.mark.parametrize("number", ["-Infinity", "NaN", "-1e999"])
def test_a_log_probability_without_a_number_is_a_small_one(number: str) -> None:
    row = f'{{"token": "a", "logprob": {number}, "top_logprobs": [{{"token": "b", "logprob": {number}}}]}}'
    chunk = reply.decode(reply.mended(f'{{"choices": [{{"logprobs": {{"content": [{row}]}}}}]}}'.encode()))
    assert chunk.choices
    (found,) = reply.logprobs_of(chunk.choices[0].logprobs, 1)
    assert found.logprob == -9999.0 and found.top == (("b", -9999.0),)


FIRST_S, BETWEEN_S = 300.0, 60.0
TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":" x"}}]}\n\n'
FINISHED = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
NOTHING = [b": ping\n\n", b'data: {"choices":[{"index":0,"delta":{"content":""}}]}\n\n', b'data: {"choices":[]}\n\n']


class Closed:
    """A connection that is only ever closed."""

    closed = False

    def close(self) -> None:
        self.closed = True


class Clock:
    """The time that a reader sees."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr("workers.engines.upstream.generation.time", SimpleNamespace(monotonic=lambda: self.now))


def a_reader(clock: Clock, pieces: list[Piece], **sampling: Any) -> tuple[StreamReader, Closed]:
    wanted = Sampling(**{"max_tokens": 10_000} | sampling)
    generation = UpstreamGeneration(Request("r", [ChatTurn("user", "a")], wanted), clock.now)
    connection: Any = Closed()
    reader = StreamReader(generation, connection, pieces.append, server.of("ollama"), Rung.FRESH)
    reader.status = 200
    return reader, connection


async def test_a_stream_of_30_minutes_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token comes just in time, again and again."""
    clock, pieces = Clock(monkeypatch), list[Piece]()
    reader, _ = a_reader(clock, pieces)
    clock.now += FIRST_S - 1
    for _ in range(40):
        reader.check_time(clock.now, FIRST_S, BETWEEN_S)
        reader.on_body(TOKEN)
        clock.now += BETWEEN_S - 1
    assert not reader.done.done() and len(pieces) == 40 and clock.now > 1000 + 1800


async def test_the_first_chunks_name_another_model_also_if_one_read_brings_several(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without the name, the answer and its bill would be the asked model's."""
    pieces = list[Piece]()
    reader, _ = a_reader(Clock(monkeypatch), pieces)
    reader.generation.move_to("b")
    reader.on_body(2 * TOKEN)
    reader.on_body(TOKEN)
    assert [(piece.text, piece.served_by) for piece in pieces] == [(" x x", "b"), (" x", "")]


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("data", NOTHING)
async def test_what_brings_no_token_keeps_no_stream_alive(
    monkeypatch: pytest.MonkeyPatch, data: bytes, begun: bool
) -> None:
    """Before the first token, and between two."""
    clock = Clock(monkeypatch)
    reader, connection = a_reader(clock, [])
    limit_s = FIRST_S
    if begun:
        reader.on_body(TOKEN)
        limit_s = BETWEEN_S
    begin = clock.now
    while clock.now < begin + limit_s:
        reader.on_body(data)
        reader.check_time(clock.now, FIRST_S, BETWEEN_S)
        assert not reader.done.done()
        clock.now += 1
    clock.now += 1
    reader.check_time(clock.now, FIRST_S, BETWEEN_S)
    assert reader.outcome is not None and reader.outcome.end is End.BROKEN and connection.closed


async def test_a_finished_stream_waits_a_moment_for_its_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not for ever."""
    clock = Clock(monkeypatch)
    reader, connection = a_reader(clock, [])
    reader.on_body(TOKEN + FINISHED)
    reader.check_time(clock.now + 1, FIRST_S, BETWEEN_S)
    assert not reader.done.done()
    reader.check_time(clock.now + 3, FIRST_S, BETWEEN_S)
    assert reader.done.done() and reader.outcome is not None and reader.outcome.finish == "stop" and connection.closed


async def test_an_end_that_cannot_be_read_ends_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is wrong with it, the server is to blame."""
    reader, connection = a_reader(Clock(monkeypatch), [])
    monkeypatch.setattr("workers.engines.upstream.reply.by_status", {}.__getitem__)
    reader.status = 500
    reader.on_end("")
    assert reader.outcome == reply.by_malformed("end (TypeError)") and connection.closed


def chunk_with(logprobs: dict[str, Any]) -> bytes:
    choice = {"index": 0, "delta": {"content": "x"}, "logprobs": logprobs}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


LONG = {"token": "y" * 5000, "logprob": -1.0}
FORMS = {
    "of a chat": {"content": [LONG | {"top_logprobs": [LONG] * 3}] * 40},
    "of a completion": {"tokens": ["y" * 5000] * 40, "token_logprobs": [-1.0] * 40,
                        "top_logprobs": [{"y" * 5000 + each: -1.0 for each in "abc"}] * 40},
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
async def test_log_probabilities_are_as_many_and_as_long_as_those_of_tokens(
    monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """However many a server sends, and however long: the store keeps them, and the API process shows them."""
    pieces = list[Piece]()
    reader, _ = a_reader(Clock(monkeypatch), pieces, max_tokens=10, logprobs=2)
    for _ in range(5):
        reader.on_body(chunk_with(FORMS[form]))
    rows = [row for piece in pieces for row in piece.logprobs]
    assert reader.generation.out == 5 and 10 <= len(rows) <= 10 + MAX_EXCESS_TOKENS
    assert {len(text) for row in rows for text, _ in [(row.token, 0), *row.top]} == {MAX_TEXT}
    assert {len(row.top) for row in rows} == {2}
    most = max(MIN_CHARACTERS, 3 * MAX_CHARACTERS_PER_ALTERNATIVE * (10 + MAX_EXCESS_TOKENS))
    assert sum(len(text) for row in rows for text, _ in [(row.token, 0), *row.top]) <= most


async def test_a_chunk_of_too_many_levels_is_malformed(monkeypatch: pytest.MonkeyPatch) -> None:
    """However deep, and wherever: it ends its reply, and no other one that the engine reads."""
    deep = b"[" * 5000 + b"]" * 5000
    reader, _ = a_reader(Clock(monkeypatch), [])
    reader.on_body(b'data: {"choices":[{"index":0,"delta":{"tool_calls":[{"x":' + deep + b"}]}}]}\n\n")
    assert reader.outcome is not None and reader.outcome.how == "malformed"


async def test_a_reply_has_bytes_for_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long answer has more of them than one that brings nothing."""
    reader, _ = a_reader(Clock(monkeypatch), [])
    reader.size = MAX_REPLY_BYTES
    assert not reader.is_excessive
    reader.size += 1
    assert reader.is_excessive
    reader.on_body(TOKEN)
    assert not reader.is_excessive


async def test_too_many_bytes_for_the_tokens_show_that_the_server_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """So it stays in use for others; an answer that was complete before is complete."""
    for data, end in ((TOKEN, End.BROKEN), (FINISHED, End.DONE)):
        reader, _ = a_reader(Clock(monkeypatch), [])
        reader.on_body(data)
        reader.on_end(EXCESS)
        assert reader.outcome is not None and reader.outcome.end is end
        assert reader.outcome.how == ("malformed" if end is End.BROKEN else "")


@pytest.mark.parametrize("status", [200, 500])
async def test_a_reply_in_one_piece_is_bounded(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    """It is decoded at once: an answer that is too long breaks, and of an error the beginning is read."""
    reader, connection = a_reader(Clock(monkeypatch), [])
    reader.status = status
    for _ in range(20):
        reader.on_body(b'{"error":"' + b"x" * 100_000)
    reader.on_end("")
    assert len(reader.body) <= (MAX_LINE_BYTES + 200_000 if status == 200 else MAX_ERROR_BYTES)
    assert reader.outcome is not None and reader.outcome.end is End.BROKEN
    assert connection.closed == (status == 200)


async def test_words_and_long_chunks_are_not_decoded_leniently(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes a hundred times as long: a server that sends many words, or a huge chunk, would keep the event loop."""
    pieces, calls, lenient = list[Piece](), list[bytes](), json.loads
    monkeypatch.setattr("workers.engines.upstream.http.json", SimpleNamespace(
        loads=lambda text, **more: calls.append(text) or lenient(text, **more), dumps=json.dumps,
    ))  # fmt: skip
    reader, _ = a_reader(Clock(monkeypatch), pieces)
    reader.on_body(b"data: 1\n\ndata: ping\n\ndata: [[]]\n\n" * 50 + TOKEN)
    assert not calls and [piece.text for piece in pieces] == [" x"] and not reader.done.done()
    reader.on_body(b'data: {"choices":[],"x":NaN,"y":[' + b"[]," * MAX_LENIENT_BYTES + b"0]}\n\n")
    assert not calls and reader.outcome is not None and reader.outcome.how == "malformed"


STREAMS = {
    b': ping\r\ndata: {"a": 1}\r\n\r\nevent: x\nid: 3\ndata:{"b":2}\n\n\ndata: [DONE]\n\n':
        [b'{"a": 1}', b'{"b":2}', b"[DONE]"],
    b'\xef\xbb\xbfdata: {"a":1}\r\rdata: {"b":2}\r\rdata: [DONE] \r\r': [b'{"a":1}', b'{"b":2}', b"[DONE]"],
    b'\xef\xbb\xbf\r\n: x\r\n\r\ndata: {"a":1}\r\n\r\n': [b'{"a":1}'],
    b'data\n\ndata:\n\ndata: \n\nretry: 5\n\nid\n\ndata: {"a":1}\n\n': [b'{"a":1}'],
    b'data: {"a":\ndata: "\xc3\xa4"}\n\n': [b'{"a":\n"\xc3\xa4"}'],
    b'data: {"a":1}\ndata: {"b":2}\ndata: [DONE]\n': [b'{"a":1}', b'{"b":2}', b"[DONE]"],
    b'event: ping\ndata: {"type": "ping"}\n\nevent: heartbeat\ndata: x\n\ndata: {"a":1}\n\n': [b'{"a":1}'],
    b'event: ping\n\ndata: {"a":1}': [b'{"a":1}'],
}  # fmt: skip


@pytest.mark.parametrize("stream", STREAMS, ids=repr)
def test_events_are_the_same_however_they_are_cut(stream: bytes) -> None:
    for size in range(1, len(stream) + 1):
        splitter = EventSplitter()
        found = [each for at in range(0, len(stream), size) for each in splitter.feed(stream[at : at + size])]
        assert [*found, *splitter.flush()] == STREAMS[stream]


@pytest.mark.parametrize("data", [b"x", b"data: x\n"])
def test_a_line_or_an_event_without_an_end_is_refused(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr("workers.engines.upstream.http.MAX_LINE_BYTES", 5000)
    splitter = EventSplitter()
    with pytest.raises(LineTooLongError):
        for _ in range(100):
            splitter.feed(data * 100)
