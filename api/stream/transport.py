"""Transport of the HTTP responses of one connection: leaves its closing to the protocol, and frames chunked bodies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

CHUNK_END = b"\r\n"


def chunk_head(size: int) -> bytes:
    """The line before a chunk of `size` bytes in a chunked body."""
    return b"%x\r\n" % size


class AnswerTransport:
    """The server's transport as responses see it; the protocol decides how the connection is closed."""

    __slots__ = ("_end", "_held", "_holds", "_transport")

    def __init__(self, transport: asyncio.Transport, end: Callable[[], None]) -> None:
        self._transport, self._end = transport, end
        self._holds, self._held = False, b""

    def hold(self) -> None:
        """Hold the next write back, and send it together with the one after it: a write costs a system call."""
        self._holds = True

    def write(self, data: bytes) -> None:
        if self._holds:
            self._holds, self._held = False, data
            return
        if self._held:
            data, self._held = self._held + data, b""
        self._transport.write(data)

    def close(self) -> None:
        self._holds = False
        if self._held:
            self.write(b"")
        self._end()

    def is_closing(self) -> bool:
        return self._transport.is_closing()
