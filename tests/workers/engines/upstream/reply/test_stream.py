"""Timers of a streamed reply, by a clock that the test turns."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.engine import ChatTurn, Piece, Request, Sampling
from workers.engines.upstream import server
from workers.engines.upstream.continuation import Rung
from workers.engines.upstream.generation import StreamReader, UpstreamGeneration
from workers.engines.upstream.reply import End

FIRST_S, BETWEEN_S = 300.0, 60.0
TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":" x"}}]}\n\n'
NOTHING = [b": ping\n\n", b'data: {"choices":[{"index":0,"delta":{"content":""}}]}\n\n', b'data: {"choices":[]}\n\n']


class Closed:
    """A connection that is only ever closed."""

    def __init__(self) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True


class Clock:
    """The time that a reader sees."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr("workers.engines.upstream.generation.time", SimpleNamespace(monotonic=lambda: self.now))


def a_reader(clock: Clock, pieces: list[Piece]) -> tuple[StreamReader, Closed]:
    generation = UpstreamGeneration(Request("r", [ChatTurn("user", "a")], Sampling(max_tokens=10_000)), clock.now)
    generation.begin(server.of("ollama"), Rung.FRESH, clock.now)
    connection: Any = Closed()
    reader = StreamReader(generation, connection, pieces.append)
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
    assert (await reader.done).end is End.BROKEN and connection.closed


async def test_a_finished_stream_waits_a_moment_for_its_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not for ever."""
    clock = Clock(monkeypatch)
    reader, connection = a_reader(clock, [])
    reader.on_body(TOKEN + b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n')
    reader.check_time(clock.now + 1, FIRST_S, BETWEEN_S)
    assert not reader.done.done()
    reader.check_time(clock.now + 3, FIRST_S, BETWEEN_S)
    assert (await reader.done).finish == "stop" and connection.closed


async def test_an_end_that_cannot_be_read_ends_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is wrong with it, the server is to blame."""
    reader, connection = a_reader(Clock(monkeypatch), [])
    monkeypatch.setattr("workers.engines.upstream.generation.by_status", {}.__getitem__)
    reader.on_head(500, {})
    reader.on_end("")
    outcome = await reader.done
    assert outcome.end is End.BROKEN and outcome.reason == "a malformed end (TypeError)" and connection.closed
