"""The tokens of one open stream, from their frame onto the connection: what each of them needs, and nothing else.

With many streams everything a token touches has left the processor's cache since the stream's last one, and is fetched
anew: that costs as much as the work itself. So it lies together, in one small object; what is rare is the reply's.
"""

from __future__ import annotations

import asyncio

from api.openai.rendering import encode_json, on_one_line
from api.stream.connection import Connection
from api.stream.transport import CHUNK_END, chunk_head
from streaming.jobs.frames import Delta
from telemetry.tallies import BufferedHistogram

SHORT = 1024
HEADS = tuple(chunk_head(size) for size in range(SHORT))
"""Most chunks are shorter than that."""


class TokenFlow:
    """Of a stream with one text and without log-probabilities, once begun: `before` and `after` stand around each
    delta's text, as JSON."""

    __slots__ = ("_after", "_around", "_before", "_tally", "_transport", "last", "owed", "paused")

    def __init__(self, tally: BufferedHistogram) -> None:
        self._tally = tally
        self.last = 0.0
        """When the stream's last tokens came (monotonic); 0: none yet."""
        self.owed = b""
        """What was rendered and could not be written."""
        self.paused = False
        """The reader is behind: the connection takes nothing more for now."""

    def lead(self, connection: Connection, before: bytes, after: bytes) -> None:
        """Where what is shown goes."""
        self._transport: asyncio.Transport = connection.transport
        self._before, self._after = before, after + CHUNK_END
        self._around = len(before) + len(after)
        self.paused = connection.carry(self)

    def show(self, row: Delta, now: float) -> bool:
        """Write the next tokens, which came at `now`. False: they are owed. Done once a token."""
        self._tally.observe_equal(now - self.last, row.n or 1)  # as `inter_token_latency` has it
        self.last = now
        said = row.text
        if not said:
            return True
        text = encode_json(said)
        if not text.isascii():
            text = on_one_line(text)
        if self.paused:
            self.owed = self._before + text + self._after[: -len(CHUNK_END)]
            return False
        size = self._around + len(text)
        head = HEADS[size] if size < SHORT else chunk_head(size)
        transport = self._transport
        if not transport.is_closing():  # what is written to a client that has left is dropped
            transport.write(b"".join((head, self._before, text, self._after)))
        return True
