"""Connection of one client to a server of the bench: a whole request at a time, with just enough HTTP."""

from __future__ import annotations

import asyncio
from typing import cast


class ServedConnection(asyncio.Protocol):
    """One client; one request at a time. Its requests say their length, or have no body."""

    def __init__(self) -> None:
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._write = cast(asyncio.Transport, transport).write

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, found, body = self._received.partition(b"\r\n\r\n")
        if not found:
            return
        if len(body) < int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0] or 0):
            return
        self._received = b""
        method, path, *_ = head.split(b" ", 2)
        self.asked(method, path, body)

    def asked(self, method: bytes, path: bytes, body: bytes) -> None:
        """A whole request has come."""
        raise NotImplementedError
