"""HTTP/1.1 as a careful client reads it: it tells an answer that ended from one that was cut off."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import asynccontextmanager
from contextvars import ContextVar

from bench.chaos.asks import FIRST, authorization

HOST = "127.0.0.1"
SILENCE_S: ContextVar[float] = ContextVar("silence_s", default=60.0)
"""After which a peer is given up. Longer than any fault of one machine lasts: there it may come back."""


class Cut(ConnectionError):
    """The connection ended, or was never made, before the answer was whole."""


class Exchange:
    """One request and its answer. Close it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.status = 0
        self.headers: dict[str, str] = {}

    @classmethod
    async def begin(
        cls,
        port: int,
        method: str,
        path: str,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        *,
        receive_buffer: int = 0,
    ) -> Exchange:
        """Send a request, as the first tenant unless headers say otherwise; the answer is not waited for.

        Raises Cut.
        """
        try:
            async with asyncio.timeout(SILENCE_S.get()):
                sock, limit = await _connected(port, receive_buffer), receive_buffer or 1 << 16
                reader, writer = await asyncio.open_connection(sock=sock, limit=limit)
                exchange = cls(reader, writer)
                writer.write(_head(method, path, body, headers or {}) + body)
                await writer.drain()
        except (OSError, TimeoutError) as error:
            raise Cut(f"no connection: {error!r}") from error
        return exchange

    async def answer(self) -> None:
        """Wait for status and headers. Raises Cut."""
        status, *lines = (await self._until(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        self.status = int(status.split(" ")[1])
        pairs = (line.partition(":") for line in lines if line)
        self.headers = {name.strip().lower(): value.strip() for name, _, value in pairs}

    async def body(self) -> bytes:
        """All of it. Raises Cut."""
        return b"".join([chunk async for chunk in self.chunks()])

    async def chunks(self) -> AsyncIterator[bytes]:
        """Parts of the body as they come. Raises Cut where it ends too early."""
        if self.headers.get("transfer-encoding") != "chunked":
            yield await self._exactly(int(self.headers.get("content-length", 0)))
            return
        while size := int(await self._until(b"\r\n"), 16):
            yield (await self._exactly(size + 2))[:-2]
        await self._until(b"\r\n")

    async def blocks(self) -> AsyncIterator[dict[str, str]]:
        """Server-sent events, as fields; comments left out. Raises Cut."""
        rest = b""
        async for chunk in self.chunks():
            *whole, rest = (rest + chunk).split(b"\n\n")
            for block in whole:
                lines = (line.partition(":") for line in block.decode().split("\n") if not line.startswith(":"))
                yield {name: value.removeprefix(" ") for name, _, value in lines}

    async def sip(self, size: int) -> bytes:
        """At most so many raw bytes; b"" at the end."""
        try:
            return await self._reader.read(size)
        except OSError:
            return b""

    def close(self) -> None:
        """At once, whatever is still under way."""
        self._writer.transport.abort()

    async def _until(self, mark: bytes) -> bytes:
        return (await self._in_time(self._reader.readuntil(mark)))[: -len(mark)]

    async def _exactly(self, size: int) -> bytes:
        return await self._in_time(self._reader.readexactly(size))

    async def _in_time(self, reading: Awaitable[bytes]) -> bytes:
        try:
            async with asyncio.timeout(SILENCE_S.get()):
                return await reading
        except (OSError, EOFError, TimeoutError) as error:
            raise Cut(repr(error)) from error


CONNECT_TIMEOUT_S = 5.0
"""A port that is published anew may have swallowed what was sent to the old one: another connection gets through."""


async def _connected(port: int, receive_buffer: int) -> socket.socket:
    """A socket; a small buffer must be asked for before it connects."""
    sock = socket.socket()
    sock.setblocking(False)
    try:
        if receive_buffer:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            await asyncio.get_running_loop().sock_connect(sock, (HOST, port))
    except BaseException:
        sock.close()
        raise
    return sock


def _head(method: str, path: str, body: bytes, headers: Mapping[str, str]) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", f"Host: {HOST}", "Connection: close", f"Content-Length: {len(body)}"]
    if body:
        lines.append("Content-Type: application/json")
    lines += [f"{name}: {value}" for name, value in {**authorization(FIRST), **headers}.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


@asynccontextmanager
async def answered(
    port: int,
    method: str,
    path: str,
    body: bytes = b"",
    headers: Mapping[str, str] | None = None,
    *,
    receive_buffer: int = 0,
) -> AsyncIterator[Exchange]:
    """A request whose status and headers have come; the connection is closed behind it. Raises Cut."""
    exchange = await Exchange.begin(port, method, path, body, headers, receive_buffer=receive_buffer)
    try:
        await exchange.answer()
        yield exchange
    finally:
        exchange.close()


async def fetch(
    port: int, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
) -> tuple[int, dict[str, str], bytes]:
    """Status, headers (lower case) and body. Raises Cut."""
    async with answered(port, method, path, body, headers) as exchange:
        return exchange.status, exchange.headers, await exchange.body()
