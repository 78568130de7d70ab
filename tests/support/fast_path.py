"""The fast path of streams whose events are numbered, on a connection that keeps what is written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from api.anthropic.answer import MessageEvents
from api.openai.responses.object import EventSequence
from api.stream.reply import NumberedFlow
from streaming.jobs.codec import Delta, Terminal


class Wire:
    """A connection that keeps what is written, without the framing of chunks."""

    def __init__(self) -> None:
        self.written = b""
        self.transport = self

    def carry(self, _: object) -> bool:
        return False

    def is_closing(self) -> bool:
        return False

    def write(self, data: bytes) -> None:
        size, _, rest = data.partition(b"\r\n")
        assert len(rest) == int(size, 16) + 2 and rest.endswith(b"\r\n")
        self.written += rest[:-2]


class Times:
    def observe_equal(self, value: float, count: int) -> None: ...


def written_fast(
    events: EventSequence | MessageEvents, begun: bytes, rows: Sequence[Delta], congested: int, terminal: Terminal
) -> bytes:
    """The bytes of a stream, of which `begun` goes before the first delta. The connection is congested at one of the
    tokens after it, and the slow path takes over."""
    wire: Any = Wire()
    wire.written = begun + events.delta(rows[0])
    flow = NumberedFlow(Times(), events)  # type: ignore[arg-type]
    around = events.plain
    assert around is not None
    flow.start(wire, *around, events.delta)
    for place, row in enumerate(rows[1:]):
        flow.paused = place == congested
        if around is None:
            wire.written += events.delta(row)
        elif not flow.write(row):
            wire.written += flow.unwritten
            around = events.plain
        flow.flush(1.0)
    written: bytes = wire.written + events.end(terminal)
    return written
