"""Splitter of server-sent events: cuts what one read brought into the data of complete lines. Pure.

The servers write each event as one `data:` line. Comments (lines that begin with a colon), other fields and blank lines
are dropped.
"""

from __future__ import annotations

MAX_LINE_BYTES = 1 << 20
"""A line beyond this is refused: a server that never ends it must not fill the worker's memory."""


class LineTooLongError(Exception):
    """A line of the stream is longer than MAX_LINE_BYTES."""


class EventSplitter:
    """One stream's splitter."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The data of each event that these bytes complete. Raises LineTooLongError, if they complete no line."""
        lines = (self._rest + data if self._rest else data).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > MAX_LINE_BYTES and not lines:
            raise LineTooLongError
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]
