"""Streamed replies: the splitter of their events, and their timers, by a clock that the test turns."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.engine import ChatTurn, Piece, Request, Sampling
from workers.engines.upstream import server
from workers.engines.upstream.continuation import Rung
from workers.engines.upstream.generation import StreamReader, UpstreamGeneration
from workers.engines.upstream.http import EventSplitter, LineTooLongError
from workers.engines.upstream.reply import End

FIRST_S, BETWEEN_S = 300.0, 60.0
TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":" x"}}]}\n\n'
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


def a_reader(clock: Clock, pieces: list[Piece]) -> tuple[StreamReader, Closed]:
    generation = UpstreamGeneration(Request("r", [ChatTurn("user", "a")], Sampling(max_tokens=10_000)), clock.now)
    connection: Any = Closed()
    reader = StreamReader(generation, connection, pieces.append, server.of("ollama"), Rung.FRESH)
    reader.on_head(200, {})
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
    reader.on_body(TOKEN + b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n')
    reader.check_time(clock.now + 1, FIRST_S, BETWEEN_S)
    assert not reader.done.done()
    reader.check_time(clock.now + 3, FIRST_S, BETWEEN_S)
    assert reader.done.done() and reader.outcome is not None and reader.outcome.finish == "stop" and connection.closed


async def test_an_end_that_cannot_be_read_ends_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is wrong with it, the server is to blame."""
    reader, connection = a_reader(Clock(monkeypatch), [])
    monkeypatch.setattr("workers.engines.upstream.reply.by_status", {}.__getitem__)
    reader.on_head(500, {})
    reader.on_end("")
    outcome = reader.outcome
    assert (
        outcome is not None
        and outcome.end is End.BROKEN
        and outcome.reason == "a malformed end (TypeError)"
        and connection.closed
    )


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
