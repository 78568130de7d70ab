"""Transport of one HTTP response: leaves the closing of its connection to the protocol, and frames chunked bodies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

CHUNK_END = b"\r\n"


def chunk_head(size: int) -> bytes:
    """The line before a chunk of `size` bytes in a chunked body."""
    return b"%x\r\n" % size


class AnswerTransport:
    """The server's transport as one response sees it; the protocol decides how the connection is closed."""

    __slots__ = ("_end", "_transport")

    def __init__(self, transport: asyncio.Transport, end: Callable[[], None]) -> None:
        self._transport, self._end = transport, end

    def write(self, data: bytes) -> None:
        self._transport.write(data)

    def close(self) -> None:
        self._end()

    def is_closing(self) -> bool:
        return self._transport.is_closing()
