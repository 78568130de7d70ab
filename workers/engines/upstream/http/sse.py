"""Splitter of server-sent events: cuts what one read brought into the data of whole events, by WHATWG's rules. Pure.

Lines end with LF, CRLF or CR; a byte order mark, comments, other fields and events without data are dropped. Two rules
are looser, because servers break them: the end of a stream ends its last event, and a complete object or `[DONE]` is an
event of its own although no blank line separates it from the next one.
"""

from __future__ import annotations

MAX_LINE_BYTES = 1 << 20
"""A line or an event beyond this is refused: a server that never ends it must not fill the worker's memory."""
BOM = b"\xef\xbb\xbf"
DONE = b"[DONE]"
PINGS = (b"ping", b"heartbeat", b"keepalive", b"keep-alive", b"keep_alive")
"""Names of events that only keep a connection open, in lower case."""


class LineTooLongError(Exception):
    """A line of the stream, or the data of one event, is longer than MAX_LINE_BYTES."""


class EventSplitter:
    """One stream's splitter."""

    __slots__ = ("_began", "_data", "_rest", "_returned", "_skips")

    def __init__(self) -> None:
        self._rest = self._data = b""
        self._began = self._returned = self._skips = False
        """Whether the first line has come; whether the last byte was a CR; and whether the open event is a ping."""

    def feed(self, data: bytes) -> list[bytes]:
        """The data of each event that these bytes complete. Raises LineTooLongError, if they complete no line."""
        if self._returned or b"\r" in data:
            data = self._without_returns(data)
        elif data.endswith(b"\n\n") and data.startswith(b"data: {") and data.count(b"\n") == 2 and not self._is_open:
            self._began = True
            return [data[6:-2]]  # one event, as nearly all reads bring it
        lines = (self._rest + data if self._rest else data).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) + len(self._data) > MAX_LINE_BYTES and b"" not in lines:
            raise LineTooLongError
        if not self._began and lines:
            self._began, lines[0] = True, lines[0].removeprefix(BOM)
        events = list[bytes]()
        for line in lines:
            if not line:
                self._end(events)
            elif line.startswith(b"data:"):
                self._add(line[5:].strip(), events)
            elif line.startswith(b"event:"):
                self._skips = line[6:].strip().lower() in PINGS
        return events

    def flush(self) -> list[bytes]:
        """The data of an event that the end of the stream completes."""
        return self.feed(b"\n\n") if self._rest or self._data else []

    @property
    def _is_open(self) -> bool:
        return bool(self._rest or self._data or self._skips)

    def _add(self, data: bytes, events: list[bytes]) -> None:
        before = self._data
        if before and (before == DONE or (before.endswith(b"}") and data.startswith((b"{", DONE)))):
            self._end(events)
        self._data = self._data + b"\n" + data if self._data else data

    def _end(self, events: list[bytes]) -> None:
        if self._data and not self._skips:
            events.append(self._data)
        self._data, self._skips = b"", False

    def _without_returns(self, data: bytes) -> bytes:
        if self._returned:  # a line has ended with the CR before
            data = data.removeprefix(b"\n")
        self._returned = data.endswith(b"\r") if data else False
        return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
