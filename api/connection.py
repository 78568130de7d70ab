"""The server's side of one HTTP connection, with a short way for tokens: a chunk straight onto the transport.

An ASGI `send` costs a message, a coroutine and a state machine; for the body of a token stream, where nothing of that
can change any more, it was half of what a token costs this process. Head and end of an answer go the usual way, but for
the head's own write: it goes out with what follows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

CHUNK_END = b"\r\n"
MOST_UNSENT = 16 * 1024
"""Bytes kept for a reader that is behind, beside what the kernel keeps; the rest of its tokens wait in the log."""


def chunk_head(size: int) -> bytes:
    """What stands before so many bytes of a body that was begun without a length."""
    return b"%x\r\n" % size


class Together:
    """The transport as one answer sees it: the first write waits for the second, within the same turn of the loop."""

    __slots__ = ("_first", "_loop", "_transport")

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._first: bytes | None = None

    def write(self, data: bytes) -> None:
        if self._first is None:
            self._first = data
            self._loop.call_soon(self._go)
        elif self._first:
            first, self._first = self._first, b""
            self._transport.write(first + data)
        else:
            self._transport.write(data)

    def close(self) -> None:
        self._go()
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def _go(self) -> None:
        if self._first and not self._transport.is_closing():
            self._transport.write(self._first)
        self._first = b""


class Carried(Protocol):
    """Whatever writes chunks onto the transport itself."""

    paused: bool


class Connection(HttpToolsProtocol):
    """Given to each request as `scope["state"]["connection"]`."""

    _on_lost: Callable[[], None] | None = None
    _carried: Carried | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as the server's own
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=MOST_UNSENT)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"]["connection"] = self

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self.cycle.transport = cast(asyncio.Transport, Together(self.transport, self.loop))

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._on_lost is not None:
            self._on_lost()

    def watch(self, on_lost: Callable[[], None] | None) -> None:
        """Have `on_lost` called when the client leaves: no task needs to wait for it. None ends the watch."""
        self._on_lost = on_lost
        if on_lost is not None:
            self.flow.resume_reading()  # a long body may have left the socket unread, and its end unseen
            if self.transport.is_closing():
                on_lost()

    def carry(self, carried: Carried | None) -> bool:
        """Tell `carried` from now on whether the reader is behind; returns whether it is."""
        self._carried = carried
        return self.flow.write_paused

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._carried is not None:
            self._carried.paused = True

    def resume_writing(self) -> None:
        super().resume_writing()
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
