"""Tokens straight from their frame onto the connection, what is held back for the next write, and readers who leave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from flow import until
from hypothesis import given
from hypothesis import strategies as st
from rendered import facts_of
from starlette.requests import ClientDisconnect
from starlette.types import Message

from api.openai.rendering import ChunkRenderer
from api.stream.connection import AnswerTransport, Connection
from api.stream.reply import PacedWriter, TokenFlow, Watched
from penstock.loops import Sliced
from streaming.jobs.codec import Delta
from telemetry.metrics import Metrics

FACTS = facts_of()


class Pipe:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.written = b""
        self.closing = False

    def write(self, data: bytes) -> None:
        assert not self.closing, "written to a client that has left"
        self.written += data

    def is_closing(self) -> bool:
        return self.closing


class Line:
    """As much of a connection as a flow sees."""

    def __init__(self) -> None:
        self.transport = Pipe()
        self.behind = False
        self.carried: TokenFlow | None = None

    def carry(self, carried: TokenFlow) -> bool:
        self.carried = carried
        return self.behind


def a_delta(seq: int, text: str, n: int = 1) -> Delta:
    return Delta(1, seq, text, (7,), 0, n)


def begun(line: Line) -> tuple[TokenFlow, ChunkRenderer, Any]:
    """A flow behind its first token, which came at second 10."""
    renderer = ChunkRenderer(FACTS)
    assert renderer.plain is None, "the role goes out with the first text"
    renderer.delta(a_delta(1, "first"))
    tally = Metrics.start("", "api").time_per_output_token.labels("chat", "m")
    flow = TokenFlow(tally)
    flow.last = 10.0
    assert renderer.plain is not None
    flow.start(cast(Connection, line), *renderer.plain)
    return flow, renderer, tally


@given(st.lists(st.text(max_size=2000), max_size=5))
def test_the_bytes_are_those_of_the_long_way(texts: list[str]) -> None:
    """Any text, of any length; what has none is not written."""
    line = Line()
    flow, renderer, _ = begun(line)
    blocks = []
    for seq, text in enumerate(texts, 2):
        assert flow.write(a_delta(seq, text))
        flow.flush(10.0 + seq)
        blocks.append(renderer.delta(a_delta(seq, text)))
    assert line.transport.written == b"".join(b"%x\r\n%b\r\n" % (len(block), block) for block in blocks if block)


@given(st.lists(st.text(max_size=20), min_size=1, max_size=5), st.booleans())
def test_tokens_of_one_read_are_one_write(texts: list[str], ends: bool) -> None:
    """They are equal gaps. Where the job has ended, too, they go out with its end instead."""
    line = Line()
    flow, renderer, tally = begun(line)
    rows = [a_delta(seq, text) for seq, text in enumerate(texts, 2)]
    block = b"".join([renderer.delta(row) for row in rows])
    assert all(flow.write(row) for row in rows) and line.transport.written == b""
    if ends:
        assert flow.take(11.0) == block
    flow.flush(11.0)
    flow.flush(12.0)
    written = b"" if ends or not block else b"%x\r\n%b\r\n" % (len(block), block)
    assert line.transport.written == written
    assert (sum(tally._counts), tally._total) == (len(texts), pytest.approx(1.0))


def test_what_a_congested_connection_cannot_take_is_owed() -> None:
    line = Line()
    flow, renderer, _ = begun(line)
    assert line.carried is flow
    flow.paused = True
    assert not flow.write(a_delta(2, "late"))
    assert flow.unwritten == renderer.delta(a_delta(2, "late")) and line.transport.written == b""
    line.behind = True
    flow.paused = False
    assert renderer.plain is not None
    flow.start(cast(Connection, line), *renderer.plain)
    assert flow.paused, "as the connection is when the flow begins"


def test_a_read_with_very_many_tokens_is_owed_in_part() -> None:
    """After a long stall: the reader may be behind by then, and what the flow holds is bounded."""
    line = Line()
    flow, renderer, tally = begun(line)
    rows = [a_delta(seq, "x") for seq in range(2, 2000)]
    taken = next(place for place, row in enumerate(rows) if not flow.write(row)) + 1
    assert 1 < taken < 100 and flow.unwritten == b"".join([renderer.delta(row) for row in rows[:taken]])
    flow.flush(11.0)
    assert line.transport.written == b"" and sum(tally._counts) == taken


def test_nothing_is_written_to_a_client_that_has_left() -> None:
    line = Line()
    flow, _, _ = begun(line)
    line.transport.closing = True
    assert flow.write(a_delta(2, "to nobody")), "a lost client is no congestion"
    flow.flush(11.0)


@pytest.mark.parametrize("facts", [{"choices": 2}, {"logprobs": True}])
def test_streams_of_several_texts_or_with_log_probabilities_go_the_long_way(facts: dict[str, Any]) -> None:
    renderer = ChunkRenderer(facts_of(**facts))
    renderer.delta(a_delta(1, "first"))
    assert renderer.plain is None


class Wire:
    """Notes each write, and the end."""

    def __init__(self) -> None:
        self.written: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def end(self) -> None:
        self.written.append(b"end")


END = None
"""In place of data: the connection is closed."""


@pytest.mark.parametrize(
    ("told", "written"),
    [
        ([b"head", b"first", b"second"], [b"headfirst", b"second"]),
        ([b"head", END], [b"head", b"end"]),
        ([END, b"late"], [b"end", b"late"]),
    ],
    ids=["a head goes with the first chunk alone", "a head without a body", "an end without a head"],
)
def test_what_is_held_back_is_sent_with_the_next_write_or_before_the_end(
    told: list[bytes | None], written: list[bytes]
) -> None:
    wire = Wire()
    transport = AnswerTransport(cast(asyncio.Transport, wire), wire.end)
    transport.hold()
    for data in told:
        if data is None:
            transport.close()
        else:
            transport.write(data)
    assert wire.written == written


class Heard:
    """As much of one as a watch sees."""

    def __init__(self) -> None:
        self.on_lost: Callable[[], None] | None = None

    def watch(self, on_lost: Callable[[], None] | None) -> None:
        self.on_lost = on_lost


async def test_a_connection_tells_of_its_end_by_itself() -> None:
    """No task waits for it, and it is watched no longer than somebody wants to know."""
    connection, told = Heard(), list[bool]()
    with Watched(cast(Connection, connection), lambda: told.append(True)) as client:
        assert connection.on_lost is not None and len(asyncio.all_tasks()) == 1
        client.check()
        connection.on_lost()
        assert told == [True]
        with pytest.raises(ClientDisconnect):
            client.check()
    assert connection.on_lost is None


async def test_work_for_a_client_that_has_left_is_given_up() -> None:
    connection, done = Heard(), list[int]()

    def work() -> Sliced[str]:
        for number in range(9):
            done.append(number)
            yield
        return "all of it"

    with Watched(cast(Connection, connection)) as client:
        assert connection.on_lost is not None
        slices = client.while_there(work())
        next(slices)
        next(slices)
        connection.on_lost()
        with pytest.raises(ClientDisconnect):
            next(slices)
    assert done == [0, 1]


async def test_a_reader_that_was_behind_at_a_ping_and_has_read_since_is_not_cut_off() -> None:
    pings, sent, cut = list[bytes](), list[bytes](), list[bool]()
    connection: Any = SimpleNamespace(
        watch=lambda _: None, write_chunk=pings.append, behind=False, cut_off=lambda: cut.append(True)
    )

    async def send(message: Message) -> None:
        sent.append(message["body"])

    async def events() -> AsyncGenerator[bytes, None]:
        await until(lambda: pings and writer._stall_timer is None)
        yield b"a"

    writer = PacedWriter(send, connection, 0.01)
    await writer.write_events(events(), 0.2)
    assert (sent, cut) == ([b"a", b""], [])
