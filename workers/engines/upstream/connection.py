"""HTTP/1.1 client of one server: a pool of connections, each of which carries one request at a time.

Bodies are pushed into a sink as they are read, in the protocol's own callback: a streamed chunk wakes no task, and what
one read brings is handled at once. The parser is httptools, which the API's server needs anyway.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, cast
from urllib.parse import urlsplit

import httptools
import msgspec

log = logging.getLogger(__name__)

KEEP_IDLE_S = 4.0
"""An idle connection is used again for so long: uvicorn closes one after 5 s, and a request may meet the close."""
MAX_HEAD_BYTES = 64 << 10
MAX_REPLY_BYTES = 8 << 20
"""Of a reply that is read as a whole."""
CLOSED = "the server closed the connection"


class ConnectError(Exception):
    """No connection to the server could be opened."""


class BrokenReply(Exception):
    """The reply broke before its end."""


class Sink(Protocol):
    """Receives one reply. After `on_end` nothing follows."""

    def on_head(self, status: int, headers: Mapping[str, str]) -> None: ...

    def on_body(self, data: bytes) -> None:
        """May raise any exception, which closes the connection."""
        ...

    def on_end(self, problem: str) -> None:
        """`problem`: why the reply is not whole; "" if it is."""
        ...


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Where a server listens."""

    url: str
    host: str
    port: int
    secure: bool
    base: str
    """Path in front of "/chat/completions", such as "/v1", which an address without a path means too."""

    @property
    def root(self) -> str:
        """Path in front of the server's own endpoints, such as "/health"."""
        return self.base.removesuffix("/v1")

    @classmethod
    def of(cls, url: str) -> ServerAddress:
        """Parse a checked address (settings.url_problem)."""
        parts = urlsplit(url)
        secure = parts.scheme == "https"
        port = parts.port or (443 if secure else 80)
        return cls(url, parts.hostname or "", port, secure, parts.path.rstrip("/") or "/v1")


class UpstreamConnection(asyncio.Protocol):
    """One connection. It ends with its request unless the server keeps it open."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser: Any = None
        self._sink: Sink | None = None
        self._headers: dict[str, str] = {}
        self._head_bytes = 0
        self._headed = False
        self._on_free: Any = None
        self.idle_since = 0.0
        self.used = 0
        """Requests that it has carried."""

    @property
    def alive(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def send(self, data: bytes, sink: Sink, on_free: Any) -> None:
        """Write a request. `on_free` is called with this connection once it can carry another."""
        assert self._transport is not None
        self._sink, self._on_free = sink, on_free
        self._parser, self._headers, self._head_bytes, self._headed = httptools.HttpResponseParser(self), {}, 0, False
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

    def connection_lost(self, exc: Exception | None) -> None:
        length_known = "content-length" in self._headers or "chunked" in self._headers.get("transfer-encoding", "")
        if self._headed and not length_known and exc is None:
            self._finish("")  # such a body ends with its connection
        else:
            self._finish(CLOSED)

    # --- the parser's callbacks ----------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        if sum(map(len, self._headers)) > MAX_HEAD_BYTES:
            raise ValueError("its header is too long")
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        if self._sink is not None:
            self._headed = True
            self._sink.on_head(self._parser.get_status_code(), self._headers)

    def on_body(self, data: bytes) -> None:
        if self._sink is not None:
            self._sink.on_body(data)

    def on_message_complete(self) -> None:
        reusable = self.alive and self._parser.should_keep_alive()
        if not reusable:
            self._finish("")
            self.close()
            return
        self.idle_since = time.monotonic()
        sink, self._sink = self._sink, None
        self._on_free(self)
        if sink is not None:
            sink.on_end("")

    def _fail(self, problem: str) -> None:
        self._finish(problem)
        self.close()

    def _finish(self, problem: str) -> None:
        sink, self._sink = self._sink, None
        if sink is not None:
            sink.on_end(problem)


@dataclass(slots=True)
class WholeReply:
    """A reply that was read as a whole."""

    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""

    def json(self) -> Any:
        """Raises ValueError."""
        return msgspec.json.decode(self.body)


class _Whole:
    """Sink that collects a whole reply."""

    def __init__(self) -> None:
        self.done: asyncio.Future[WholeReply] = asyncio.get_running_loop().create_future()
        self.begun = False
        """Whether the server has begun to reply."""
        self._reply, self._parts, self._size = WholeReply(), list[bytes](), 0

    def on_head(self, status: int, headers: Mapping[str, str]) -> None:
        self.begun = True
        self._reply.status, self._reply.headers = status, headers

    def on_body(self, data: bytes) -> None:
        self._size += len(data)
        if self._size > MAX_REPLY_BYTES:
            raise ValueError(f"a reply of more than {MAX_REPLY_BYTES} bytes")
        self._parts.append(data)

    def on_end(self, problem: str) -> None:
        if self.done.done():
            return
        if problem:
            self.done.set_exception(BrokenReply(problem))
        else:
            self._reply.body = b"".join(self._parts)
            self.done.set_result(self._reply)


class UpstreamClient:
    """HTTP client of one server."""

    def __init__(self, address: ServerAddress, connect_s: float) -> None:
        self.address, self._connect_s = address, connect_s
        self._ssl = ssl.create_default_context() if address.secure else None
        self._idle: list[UpstreamConnection] = []
        self._closed = False

    async def connection(self, *, fresh: bool = False) -> UpstreamConnection:
        """An idle connection, or a new one. `fresh`: a new one in any case. Raises ConnectError."""
        while self._idle and not fresh:
            connection = self._idle.pop()
            if connection.alive and time.monotonic() - connection.idle_since < KEEP_IDLE_S:
                return connection
            connection.close()
        loop, address = asyncio.get_running_loop(), self.address
        try:
            async with asyncio.timeout(self._connect_s):
                _, connection = await loop.create_connection(
                    UpstreamConnection, address.host, address.port, ssl=self._ssl
                )
        except TimeoutError:
            raise ConnectError(f"no connection within {self._connect_s:g} s") from None
        except (OSError, ssl.SSLError) as error:
            raise ConnectError(str(error)) from None
        return connection

    def send(
        self,
        connection: UpstreamConnection,
        method: str,
        path: str,
        body: bytes,
        key: str,
        sink: Sink,
        *,
        stream: bool = False,
    ) -> None:
        """Write one request on a connection; `path` with the base. The key goes into the header alone."""
        connection.send(self._head(method, path, body, key, stream=stream) + body, sink, self._free)

    async def ask(self, method: str, path: str, body: Any = None, key: str = "", timeout_s: float = 10.0) -> WholeReply:
        """Send one request and read its whole reply. Raises ConnectError, BrokenReply.

        If an idle connection turns out to be closed, it is sent again on a new one: the call changes nothing there.
        """
        data = b"" if body is None else msgspec.json.encode(body)
        connection = await self.connection()
        was_used, whole = connection.used > 0, _Whole()
        try:
            return await self._asked(connection, method, path, data, key, whole, timeout_s)
        except BrokenReply:
            if not was_used or whole.begun:
                raise
        connection = await self.connection(fresh=True)
        return await self._asked(connection, method, path, data, key, _Whole(), timeout_s)

    async def _asked(
        self,
        connection: UpstreamConnection,
        method: str,
        path: str,
        data: bytes,
        key: str,
        whole: _Whole,
        timeout_s: float,
    ) -> WholeReply:
        """Raises BrokenReply."""
        done = whole.done
        try:
            self.send(connection, method, path, data, key, whole)
            async with asyncio.timeout(timeout_s):
                return await done
        except TimeoutError:
            whole.begun = True  # slow, not closed
            raise BrokenReply(f"no reply within {timeout_s:g} s") from None
        finally:
            if not done.done() or done.cancelled() or done.exception() is not None:
                connection.close()

    def close(self) -> None:
        self._closed = True
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    def _free(self, connection: UpstreamConnection) -> None:
        if self._closed:
            connection.close()
        else:
            self._idle.append(connection)

    def _head(self, method: str, path: str, body: bytes, key: str, *, stream: bool) -> bytes:
        address = self.address
        host = f"[{address.host}]" if ":" in address.host else address.host
        lines = [
            f"{method} {path} HTTP/1.1",
            f"Host: {host}:{address.port}",
            f"Accept: {'text/event-stream' if stream else 'application/json'}",
            "Accept-Encoding: identity",
            "User-Agent: penstock",
        ]
        if body:
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        elif method != "GET":
            lines.append("Content-Length: 0")
        if key:
            lines.append(f"Authorization: Bearer {key}")
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
