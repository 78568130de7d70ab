"""Tokens straight from their frame onto the connection: the same bytes as the long way, and none when it is full."""

from __future__ import annotations

from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rendered import facts_of

from api.openai.rendering import ChunkRenderer
from api.stream.connection import Connection
from api.stream.writer import TokenFlow
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


def test_each_token_is_measured() -> None:
    """Also one without a text; several at once are equal gaps."""
    flow, _, tally = begun(Line())
    flow.write(a_delta(2, "a"))
    flow.flush(10.5)
    flow.write(a_delta(3, "", 2))
    flow.flush(11.5)
    assert flow.last == 11.5
    assert sum(tally._counts) == 3 and tally._total == pytest.approx(1.5)


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
