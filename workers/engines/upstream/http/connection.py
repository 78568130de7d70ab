"""HTTP/1.1 connection to a server: carries one request at a time, and pushes the reply into a sink.

Bodies are pushed into a sink as they are read, in the protocol's own callback: a streamed chunk wakes no task, and what
one read brings is handled at once. The parser is httptools, which the API's server needs anyway.
"""

from __future__ import annotations

import asyncio
import select
import time
from collections.abc import Mapping
from typing import Any, Protocol, cast

import httptools

MAX_HEAD_BYTES = 64 << 10
MAX_REPLY_BYTES = 8 << 20
"""Of a reply that is read as a whole."""
CLOSED = "the server closed the connection"
SWITCHING_PROTOCOLS, FIRST_FINAL_STATUS = 101, 200


class Sink(Protocol):
    """Receives one reply. After `on_end` nothing follows."""

    def on_head(self, status: int, headers: Mapping[str, str]) -> None: ...

    def on_body(self, data: bytes) -> None:
        """May raise any exception, which closes the connection."""
        ...

    def on_end(self, problem: str) -> None:
        """`problem`: why the reply is not whole; "" if it is."""
        ...


class UpstreamConnection(asyncio.Protocol):
    """One connection. It ends with its request unless the server keeps it open."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser: Any = None
        self._sink: Sink | None = None
        self._headers: dict[str, str] = {}
        self._head_bytes = self._header_bytes = 0
        self._headed = False
        """Whether the head of the final reply has come."""
        self._complete = self._reusable = False
        """Whether the final reply has come to its end, and whether the server then keeps the connection."""
        self._on_free: Any = None
        self.idle_since = 0.0
        self.used = 0
        """Requests that it has carried."""

    @property
    def alive(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def quiet(self) -> bool:
        """Whether nothing waits to be read: neither bytes that nobody asked for, nor the end of the connection."""
        assert self._transport is not None
        poll = select.poll()
        poll.register(self._transport.get_extra_info("socket").fileno(), select.POLLIN)
        return not poll.poll(0)

    def send(self, data: bytes, sink: Sink, on_free: Any) -> None:
        """Write a request. `on_free` is called with this connection once it can carry another."""
        assert self._transport is not None
        self._sink, self._on_free = sink, on_free
        self._parser, self._headers = httptools.HttpResponseParser(self), {}
        self._head_bytes = self._header_bytes = 0
        self._headed = self._complete = self._reusable = False
        self.used += 1
        self._transport.write(data)

    def close(self) -> None:
        """Close at once, with nothing more to the sink. Idempotent."""
        self._sink = None
        if self._transport is not None:
            self._transport.abort()

    # --- the transport's callbacks -------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's has another base class

    def data_received(self, data: bytes) -> None:
        if self._sink is None:  # bytes that nobody asked for
            self.close()
            return
        if not self._headed:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES + MAX_REPLY_BYTES:
                self._fail("its header has no end")
                return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:  # raised by a sink about a strange body
            self._fail(str(error.__context__ or error))
        except httptools.HttpParserError as error:
            self._fail(f"no valid HTTP reply: {error}")
        else:
            if self._complete:
                self._release()

    def connection_lost(self, exc: Exception | None) -> None:
        length_known = "content-length" in self._headers or "chunked" in self._headers.get("transfer-encoding", "")
        if self._headed and not length_known and exc is None:
            self._finish("")  # such a body ends with its connection
        else:
            self._finish(CLOSED)

    # --- the parser's callbacks ----------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._complete:
            raise ValueError("a second reply to one request")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > MAX_HEAD_BYTES:
            raise ValueError("its header is too long")
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status == SWITCHING_PROTOCOLS:
            raise ValueError("it switches to another protocol")
        if status < FIRST_FINAL_STATUS:  # an interim reply: the final one follows
            self._headers = {}
        elif self._sink is not None:
            self._headed = True
            self._sink.on_head(status, self._headers)

    def on_body(self, data: bytes) -> None:
        if self._sink is not None:
            self._sink.on_body(data)

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() >= FIRST_FINAL_STATUS:
            self._complete, self._reusable = True, self._parser.should_keep_alive()

    def _release(self) -> None:
        """The final reply is whole, and what was read ends with it."""
        if self._reusable and self.alive:
            self.idle_since = time.monotonic()
            sink, self._sink = self._sink, None
            self._on_free(self)
            if sink is not None:
                sink.on_end("")
        else:
            self._finish("")
            self.close()

    def _fail(self, problem: str) -> None:
        self._finish("" if self._complete else problem)
        self.close()

    def _finish(self, problem: str) -> None:
        sink, self._sink = self._sink, None
        if sink is not None:
            sink.on_end(problem)
