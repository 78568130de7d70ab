"""Transport of one HTTP response: sends its first two writes together, and frames the chunks of a chunked body."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

CHUNK_END = b"\r\n"


def chunk_head(size: int) -> bytes:
    """The line before a chunk of `size` bytes in a chunked body."""
    return b"%x\r\n" % size


class CoalescingTransport:
    """Holds a response's first write until its second, or until the event loop's next iteration, and sends both."""

    __slots__ = ("_end", "_first", "_loop", "_transport")

    def __init__(
        self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, end: Callable[[], None] | None = None
    ) -> None:
        self._transport, self._loop = transport, loop
        self._end = end or transport.close
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
        self._end()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def _go(self) -> None:
        if self._first and not self._transport.is_closing():
            self._transport.write(self._first)
        self._first = b""
