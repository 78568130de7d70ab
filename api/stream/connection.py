"""HTTP connection of the server, which writes each token of a stream straight to its transport, without ASGI.

An ASGI `send` costs a message, a coroutine and a state machine. The body of a token stream needs none of these, and
they were half of a token's cost in this process. Head and end of an answer use ASGI as usual.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from api.stream.bounded_protocol import BoundedProtocol
from api.stream.transport import CHUNK_END, chunk_head

MAX_UNSENT_BYTES = 16 * 1024
"""Bytes kept for a reader that is behind, besides the kernel's buffer; its other tokens wait in the log."""


class BackpressureListener(Protocol):
    """A writer of chunks, whose `paused` the connection sets while the reader is behind."""

    paused: bool


class Connection(BoundedProtocol):
    """The connection of a request, as `scope["state"]["connection"]`."""

    _carried: BackpressureListener | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as the server's own
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=MAX_UNSENT_BYTES)

    @property
    def framed(self) -> bool:
        """Whether the present answer may have chunks, which HTTP/1.0 does not know."""
        return self.answers is None or not self.answers.unframed

    def carry(self, carried: BackpressureListener | None) -> bool:
        """From now on, set `carried.paused` while the reader is behind. Returns whether it is behind now."""
        self._carried = carried
        return self.flow.write_paused

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writing()
        if self._carried is not None:
            self._carried.paused = True

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():  # else the rest of the last answer has its deadline until it is sent
            self._guard.writing.leave(self)
        if self._carried is not None:
            self._carried.paused = False

    def write_chunk(self, data: bytes) -> bool:
        """Write one chunk of a chunked body. Returns False, and writes nothing, if the reader is behind.

        A chunk for a client that has disconnected is dropped; `watch` reports the disconnect.
        """
        if self.flow.write_paused:
            return False
        if not self.transport.is_closing():
            self.answers.write(chunk_head(len(data)) + data + CHUNK_END)
        return True

    def hold_head(self) -> None:
        """Send the head of the answer, which is written next, in one piece with the first chunk."""
        if self.answers is not None:  # else the client has just disconnected
            self.answers.hold()

    def cut_off(self) -> None:
        """Disconnect a reader that does not read its answer, and drop the unread rest."""
        if self.cycle is not None:  # else the client has just disconnected
            self.cycle.disconnected = True  # else the library logs that the answer has no end
        self.transport.abort()
