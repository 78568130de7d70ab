"""HTTP/1.1 client of one server: a pool of connections, each of which carries one request at a time."""

from __future__ import annotations

import asyncio
import errno
import os
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import msgspec

from workers.engines.upstream.http.address import ServerAddress
from workers.engines.upstream.http.connection import MAX_REPLY_BYTES, Sink, UpstreamConnection
from workers.engines.upstream.http.proxy import Proxy, ProxyError, proxy_for

NO_HEADERS: Mapping[str, str] = MappingProxyType({})
KEEP_IDLE_S = 4.0
"""An idle connection is used again for so long: uvicorn closes one after 5 s, and a request may meet the close."""


class ConnectError(Exception):
    """No connection to the server could be opened."""


class BrokenReply(Exception):
    """The reply broke before its end."""


@dataclass(slots=True)
class BufferedReply:
    """A reply that was read as a whole."""

    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""

    def json(self) -> Any:
        """Raises ValueError."""
        try:
            return msgspec.json.decode(self.body)
        except RecursionError:
            raise ValueError("nested too deep") from None


class _ReplyBuffer:
    """Sink that collects a whole reply."""

    def __init__(self) -> None:
        self.done: asyncio.Future[BufferedReply] = asyncio.get_running_loop().create_future()
        self.begun = False
        """Whether the server has begun to reply."""
        self._reply, self._parts, self._size = BufferedReply(), list[bytes](), 0

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

    def __init__(self, address: ServerAddress, connect_s: float, proxy: str = "") -> None:
        """`proxy`: the setting of that name; one of the environment is read now. Raises ValueError if it is none."""
        self.address, self._connect_s = address, connect_s
        self._proxy = proxy_for(proxy, address.host, address.port, os.environ, secure=address.secure)
        self._ssl = ssl.create_default_context() if address.secure else None
        self._idle: list[UpstreamConnection] = []
        self._closed = False

    async def connection(self, *, fresh: bool = False) -> UpstreamConnection:
        """An idle connection, or a new one. `fresh`: a new one in any case. Raises ConnectError."""
        while self._idle and not fresh:
            connection = self._idle.pop()
            if connection.alive and time.monotonic() - connection.idle_since < KEEP_IDLE_S and connection.quiet:
                return connection
            connection.close()
        loop, address = asyncio.get_running_loop(), self.address
        try:
            async with asyncio.timeout(self._connect_s):
                if self._proxy is not None:
                    return await self._through(self._proxy)
                _, connection = await loop.create_connection(
                    UpstreamConnection, address.host, address.port, ssl=self._ssl
                )
        except TimeoutError:
            by = f" through the proxy {self._proxy.name}" if self._proxy is not None else ""
            raise ConnectError(f"no connection{by} within {self._connect_s:g} s") from None
        except (OSError, ssl.SSLError) as error:
            raise ConnectError(_words_of(error)) from None
        return connection

    async def _through(self, proxy: Proxy) -> UpstreamConnection:
        """A connection to the server through a proxy. Raises OSError, TimeoutError."""
        address, loop = self.address, asyncio.get_running_loop()
        transport = await proxy.connect(address.host, address.port)
        try:
            if self._ssl is not None:
                found = await loop.start_tls(
                    transport, transport.get_protocol(), self._ssl, server_hostname=address.host
                )
                if found is None:
                    raise ProxyError(f"the proxy {proxy.name} closed the tunnel")
                transport = found
        except BaseException:
            transport.abort()
            raise
        connection = UpstreamConnection()
        transport.set_protocol(connection)
        connection.connection_made(transport)
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
        trace: str = "",
        more: Mapping[str, str] = NO_HEADERS,
    ) -> None:
        """Write one request on a connection; `path` with the base. The key goes into the header alone. `trace`: its
        `traceparent`. `more`: further headers, of plain letters."""
        head = self._head(method, path, body, key, stream=stream, trace=trace, more=more)
        connection.send(head + body, sink, self._free)

    async def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        key: str = "",
        timeout_s: float = 10.0,
        trace: str = "",
        more: Mapping[str, str] = NO_HEADERS,
    ) -> BufferedReply:
        """Send one request and read its whole reply; `more` as in `send`. Raises ConnectError, BrokenReply.

        If an idle connection turns out to be closed, it is sent again on a new one: the call changes nothing there.
        """
        data = b"" if body is None else msgspec.json.encode(body)
        connection = await self.connection()
        was_used, whole = connection.used > 0, _ReplyBuffer()
        try:
            return await self._asked(connection, method, path, data, key, whole, timeout_s, trace, more)
        except BrokenReply:
            if not was_used or whole.begun:
                raise
        connection = await self.connection(fresh=True)
        return await self._asked(connection, method, path, data, key, _ReplyBuffer(), timeout_s, trace, more)

    async def _asked(
        self,
        connection: UpstreamConnection,
        method: str,
        path: str,
        data: bytes,
        key: str,
        whole: _ReplyBuffer,
        timeout_s: float,
        trace: str,
        more: Mapping[str, str],
    ) -> BufferedReply:
        """Raises BrokenReply."""
        done = whole.done
        try:
            self.send(connection, method, path, data, key, whole, trace=trace, more=more)
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

    def _head(
        self, method: str, path: str, body: bytes, key: str, *, stream: bool, trace: str, more: Mapping[str, str]
    ) -> bytes:
        address = self.address
        host = f"[{address.host}]" if ":" in address.host else address.host
        lines = [
            f"{method} {path} HTTP/1.1",
            f"Host: {host}:{address.port}",
            f"Accept: {'text/event-stream' if stream else 'application/json'}",
            "Accept-Encoding: identity",
            "User-Agent: penstock",
            *[f"{name}: {value}" for name, value in more.items()],
        ]
        if body:
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        elif method != "GET":
            lines.append("Content-Length: 0")
        if trace:
            lines.append(f"traceparent: {trace}")
        if key:
            lines.append(f"Authorization: Bearer {key}")
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def _words_of(error: OSError) -> str:
    """Why no connection was made, in the fewest words that say it."""
    said = str(error)
    refused = f"[Errno {errno.ECONNREFUSED}]"
    if refused in said and said.count("[Errno") == said.count(refused):  # by each address of the name
        return "connection refused"
    return said
