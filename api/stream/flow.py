"""Token fast path: writes each token of an open stream from the relay's frame straight to its connection.

With many streams, the memory that a token touches has left the CPU cache since the stream's previous token, and loading
it costs as much as the work. So this state is one small object; the Reply handles everything rare.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol, TypeAlias

from api.openai.rendering import encode_json, on_one_line
from api.openai.responses.events import EventSequence
from api.stream.connection import Connection
from api.stream.transport import CHUNK_END, chunk_head
from streaming.jobs.codec import Delta

Renderer: TypeAlias = Callable[[Delta], bytes]


class TokenTimes(Protocol):
    """Takes the times between tokens."""

    def observe_equal(self, total: float, n: int) -> None:
        """Add `n` equal times of `total` seconds together."""
        ...


class TokenFlow:
    """Token writer of a stream with one choice and without log-probabilities, after its first token."""

    __slots__ = ("_after", "_around", "_before", "_render", "_transport", "histogram", "last", "paused", "unwritten")

    def __init__(self, histogram: TokenTimes) -> None:
        self.histogram = histogram
        self.last = 0.0
        """Monotonic time of the last tokens; 0: none yet."""
        self.unwritten = b""
        """Rendered bytes that could not be written."""
        self.paused = False
        """The connection's write buffer is full."""

    def start(self, connection: Connection, before: bytes, after: bytes, render: Renderer | None = None) -> None:
        """Start writing to a connection; `before` and `after` are the constant JSON around each delta's text, and
        `render` renders a delta that has extras; None: there are none."""
        self._render = render
        self._transport: asyncio.Transport = connection.transport
        self._before, self._after = before, after + CHUNK_END
        self._around = len(before) + len(after)
        self.paused = connection.carry(self)

    def write(self, row: Delta, now: float) -> bool:
        """Write a delta that arrived at `now`; called for every token. False: it is in `unwritten` instead."""
        self.histogram.observe_equal(now - self.last, row.n or 1)  # as `inter_token_latency` has it
        self.last = now
        if row.extras and self._render is not None:
            return self._write_rendered(self._render(row))
        content = row.text
        if not content:
            return True
        text = encode_json(content)
        if not text.isascii():
            text = on_one_line(text)
        if self.paused:
            self.unwritten = self._before + text + self._after[: -len(CHUNK_END)]
            return False
        head = chunk_head(self._around + len(text))
        transport = self._transport
        if not transport.is_closing():  # drop tokens of a disconnected client
            transport.write(b"".join((head, self._before, text, self._after)))
        return True

    def _write_rendered(self, data: bytes) -> bool:
        if self.paused:
            self.unwritten = data
            return False
        if data and not self._transport.is_closing():
            self._transport.write(b"".join((chunk_head(len(data)), data, CHUNK_END)))
        return True


class NumberedFlow(TokenFlow):
    """The same for a response, whose events are numbered and whose text its last events repeat."""

    __slots__ = ("_end", "_sequence")

    def __init__(self, histogram: TokenTimes, sequence: EventSequence) -> None:
        super().__init__(histogram)
        self._sequence = sequence

    def start(self, connection: Connection, before: bytes, after: bytes, render: Renderer | None = None) -> None:
        """Start writing; `after` has %d where the number of the event goes."""
        super().start(connection, before, b"", render)
        self._around, self._end = len(before) - len(CHUNK_END), after + CHUNK_END

    def write(self, row: Delta, now: float) -> bool:
        self.histogram.observe_equal(now - self.last, row.n or 1)
        self.last = now
        if row.extras:
            return self._write_rendered(self._sequence.delta(row))
        content = row.text
        if not content:
            return True
        text = encode_json(content)
        if not text.isascii():
            text = on_one_line(text)
        sequence = self._sequence
        number = sequence.number
        sequence.number = number + 1
        sequence.text += text[1:-1]
        end, before = self._end % number, self._before
        if self.paused:
            self.unwritten = before + text + end[: -len(CHUNK_END)]
            return False
        head = chunk_head(self._around + len(text) + len(end))
        transport = self._transport
        if not transport.is_closing():
            transport.write(b"".join((head, before, text, end)))
        return True
