"""HTTP connection of the server, which writes each token of a stream straight to its transport, without ASGI.

An ASGI `send` costs a message, a coroutine and a state machine. The body of a token stream needs none of these, and
they were half of a token's cost in this process. Head and end of an answer use ASGI as usual, except that the head is
written together with the first chunk.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from api.stream.bounded_protocol import BoundedProtocol
from api.stream.transport import CHUNK_END, chunk_head

MAX_UNSENT_BYTES = 16 * 1024
"""Bytes kept for a reader that is behind, beside what the kernel keeps; the rest of its tokens wait in the log."""


class BackpressureListener(Protocol):
    """Whatever writes chunks onto the transport itself."""

    paused: bool


class Connection(BoundedProtocol):
    """Given to each request as `scope["state"]["connection"]`."""

    _carried: BackpressureListener | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as the server's own
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=MAX_UNSENT_BYTES)

    def carry(self, carried: BackpressureListener | None) -> bool:
        """Tell `carried` from now on whether the reader is behind; returns whether it is."""
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
        """One chunk of a body that was begun without a length. False, and nothing is written, if the reader is behind.

        What is written to a client that has left is dropped; the server tells of its leaving by itself.
        """
        if self.flow.write_paused:
            return False
        transport = self.transport
        if not transport.is_closing():
            transport.write(chunk_head(len(data)) + data + CHUNK_END)
        return True

    def cut_off(self) -> None:
        """End the connection of a reader who does not take its answer, and drop what it has not taken."""
        if self.cycle is not None:  # else the client has just left by itself
            self.cycle.disconnected = True  # else the library logs that the answer has no end
        self.transport.abort()
