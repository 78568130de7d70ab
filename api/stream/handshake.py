"""TLS before HTTP: a connection counts once it is accepted, and has `header_timeout_s` for its handshake."""

from __future__ import annotations

import asyncio
import os
import socket
from functools import partial
from typing import Any, cast

from uvicorn.protocols.utils import get_remote_addr

from api.stream.connection import MAX_UNSENT_BYTES, Connection
from api.stream.connection_guard import ConnectionGuard
from api.tls import Certificate


class PacedTransport:
    """TLS takes all that is written and tells nothing of what is unsent: it gets some at a time, and ends behind the
    last."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport, self._unsent, self._closed = transport, bytearray(), False
        self.paused = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._closed:
            self._unsent += data
            self.go_on()

    def go_on(self) -> None:
        while self._unsent and not self.paused:
            piece = bytes(self._unsent[:MAX_UNSENT_BYTES])
            del self._unsent[:MAX_UNSENT_BYTES]
            self._transport.write(piece)
        if self._closed and not self._unsent:
            self._transport.close()

    def close(self) -> None:
        self._closed = True
        self.go_on()

    def is_closing(self) -> bool:
        return self._closed or self._transport.is_closing()

    def get_write_buffer_size(self) -> int:
        return len(self._unsent) + self._transport.get_write_buffer_size()


class SecureConnection(Connection):
    """A connection over TLS, which counts in place of its handshake."""

    transport: Any

    def __init__(self, handshake: Handshake, **options: Any) -> None:
        super().__init__(**options)
        self._handshake = handshake

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as the server's own
        self._guard.release(self._handshake)
        super().connection_made(cast(asyncio.Transport, PacedTransport(transport)))

    def data_received(self, data: bytes) -> None:
        if not self.transport.is_closing():
            super().data_received(data)

    def pause_writing(self) -> None:
        self.transport.paused = True
        if not self.behind:
            super().pause_writing()

    def resume_writing(self) -> None:
        self.transport.paused = False
        self.transport.go_on()
        if not self.transport.paused:
            super().resume_writing()


class Handshake(asyncio.Protocol):
    """A connection until both sides have agreed on TLS; then a SecureConnection has it."""

    def __init__(self, *, guard: ConnectionGuard, certificate: Certificate, **options: Any) -> None:
        self._guard, self._context = guard, certificate.context
        self._protocol = partial(SecureConnection, self, guard=guard, **options)
        self.address = ""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as the server's own
        client = get_remote_addr(transport)
        self.address = client[0] if client else ""
        # The transport may read what TLS must: the socket gets another one before it does.
        self._socket = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
        self._socket.setblocking(False)
        transport.abort()
        self._task = asyncio.get_running_loop().create_task(self._agree())
        self._guard.handshakes.add(self._task)
        self._task.add_done_callback(self._ended)
        self._guard.admit(self)

    def turn_away(self) -> None:
        """Called by the guard: a newer connection replaces this one among those beyond the limits."""
        self._task.cancel()

    def _ended(self, task: asyncio.Task[bool]) -> None:
        self._guard.handshakes.discard(task)
        self._guard.release(self)
        if task.cancelled() or not task.result():
            self._socket.close()

    async def _agree(self) -> bool:
        """Whether both sides agreed."""
        # The end is also that of the last answer, of which TLS holds some: it has as long as the rest of it.
        loop, start_s, end_s = asyncio.get_running_loop(), self._guard.head.timeout_s, self._guard.writing.timeout_s
        times = {"ssl_handshake_timeout": start_s, "ssl_shutdown_timeout": end_s}
        try:
            await loop.connect_accepted_socket(self._protocol, self._socket, ssl=self._context, **times)
        except OSError:  # not TLS, no version or cipher that both know, too slow, or gone
            return False
        return True
