"""Transport of the HTTP responses of one connection: leaves its closing to the protocol, and frames chunked bodies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

CHUNK_END = b"\r\n"
CHUNKED = b"transfer-encoding: chunked\r\n"
"""The field of the head of a chunked answer, as the server writes it."""


def chunk_head(size: int) -> bytes:
    """The line before a chunk of `size` bytes in a chunked body."""
    return b"%x\r\n" % size


class AnswerTransport:
    """The server's transport as responses see it; the protocol decides how the connection is closed."""

    __slots__ = ("_chunked", "_end", "_held", "_holds", "_transport", "unframed")

    def __init__(self, transport: asyncio.Transport, end: Callable[[], None]) -> None:
        self._transport, self._end = transport, end
        self._holds, self._held = False, b""
        self.unframed = False
        """Chunks are written without their framing."""
        self._chunked: bool | None = None
        """Whether the body is chunked; None: the head is not written."""

    def unframe(self) -> None:
        """Answer a client of HTTP/1.0, which knows no chunks: the end of the connection ends the body. Call it before
        the head is written; the answer is the connection's last."""
        self.unframed = True

    def hold(self) -> None:
        """Hold the next write back, and send it together with the one after it: a write costs a system call."""
        self._holds = True

    def write(self, data: bytes) -> None:
        if self.unframed:
            data = self._without_framing(data)
        if self._holds:
            self._holds, self._held = False, data
            return
        if self._held:
            data, self._held = self._held + data, b""
        self._transport.write(data)

    def _without_framing(self, data: bytes) -> bytes:
        """Return a head without the field of chunks, or the content of whole chunks."""
        if self._chunked is None:
            self._chunked = CHUNKED in data
            return data.replace(CHUNKED, b"")
        if not self._chunked:
            return data
        content = []
        while data:
            size, _, data = data.partition(CHUNK_END)
            content.append(data[: int(size, 16)])
            data = data[int(size, 16) + len(CHUNK_END) :]
        return b"".join(content)

    def close(self) -> None:
        self._holds = False
        if self._held:
            data, self._held = self._held, b""
            self._transport.write(data)
        self._end()

    def is_closing(self) -> bool:
        return self._transport.is_closing()
