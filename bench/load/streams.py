"""Connections that ask and stamp what comes back: no HTTP client stands between the clock and the socket."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Mapping

import msgspec

from bench.load.answer import Answer, Framing

HOST = "127.0.0.1"
QUICKACK = getattr(socket, "TCP_QUICKACK", None)
"""Only Linux has it. Without it a server that leaves Nagle's algorithm on seems to stall for 40 ms."""


class Stream(asyncio.Protocol):
    """One connection; `ask` one thing at a time. It connects again if the server has closed it."""

    def __init__(self, port: int, host: str = HOST) -> None:
        self._host, self._port = host, port
        self._socket: socket.socket | None = None
        self._transport: asyncio.Transport | None = None
        self._answer: Answer | None = None
        self._framing = Framing()
        self._ended: asyncio.Future[None] | None = None

    async def connect(self) -> None:
        """Raises OSError."""
        loop = asyncio.get_running_loop()
        sock = socket.socket()
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await loop.sock_connect(sock, (self._host, self._port))
            transport, _ = await loop.create_connection(lambda: self, sock=sock)
        except BaseException:
            sock.close()
            raise
        self._socket, self._transport = sock, transport
        self._acknowledge()

    async def ask(self, request: bytes, tokens: int) -> Answer:
        """Send a request and keep what follows, until its end. Raises OSError where no connection can be made."""
        answer = self.begin(request, tokens) if self._transport else await self._ask_anew(request, tokens)
        await self.end()
        return answer

    async def _ask_anew(self, request: bytes, tokens: int) -> Answer:
        await self.connect()
        return self.begin(request, tokens)

    def begin(self, request: bytes, tokens: int) -> Answer:
        """Send it on the open connection."""
        assert self._transport is not None
        self._framing = Framing()
        self._ended = asyncio.get_running_loop().create_future()
        self._answer = Answer(tokens, time.monotonic())
        self._transport.write(request)
        return self._answer

    async def end(self) -> None:
        """Until the answer has ended."""
        if self._ended is not None:
            await self._ended

    def close(self, why: str = "") -> None:
        """At once; an answer that is under way ends here."""
        if self._answer is not None and why:
            self._answer.fault = self._answer.fault or why
        if self._transport is not None:
            self._transport.abort()

    # --- what the event loop tells ------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        self._acknowledge()
        if self._answer is not None:
            self._answer.arrivals.append((now, data))
            if self._framing.ends_with(data):
                self._finish()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._answer is not None:
            self._answer.fault = self._answer.fault or f"cut off ({exc or 'closed'})"
            self._finish()

    def _finish(self) -> None:
        self._answer = None
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    def _acknowledge(self) -> None:
        """The kernel forgets this with every segment, so it is said again."""
        if QUICKACK is not None and self._socket is not None:
            self._socket.setsockopt(socket.IPPROTO_TCP, QUICKACK, 1)


def chat(path: str, model: str, prompt: str, tokens: int, headers: Mapping[str, str]) -> bytes:
    """A streamed chat request, ready to send."""
    body = msgspec.json.encode(
        {"model": model, "messages": [{"role": "user", "content": prompt}], "max_tokens": tokens, "stream": True}
    )
    lines = [
        f"POST {path} HTTP/1.1",
        f"Host: {HOST}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body
