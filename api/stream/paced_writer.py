"""Paced writer: writes the body of a streamed answer at its reader's pace, and disconnects a reader that stalls."""

from __future__ import annotations

import asyncio
import random

from starlette.types import Send

from api.stream.connection import Connection
from api.stream.messages import body_message

MAX_SEND_TIMEOUT_FACTOR = 1.2
"""A stalled reader is disconnected up to this factor later than its timeout, at random: readers that stalled together
are then not all disconnected in one iteration of the event loop, which would delay every other stream."""


class ClientGone(Exception):
    """Raised inside an answer when its client has disconnected."""


class PacedWriter:
    """Writer of one answer. `stalled`: the reader took no byte for too long and is disconnected."""

    def __init__(self, send: Send, connection: Connection | None, timeout_s: float) -> None:
        self._send, self._connection, self._timeout_s = send, connection, timeout_s
        self.stalled = False

    async def write(self, data: bytes, *, more: bool) -> None:
        """Write once the reader takes it. Raises ClientGone."""
        task = asyncio.current_task()
        timeout_s = self._timeout_s * random.uniform(1.0, MAX_SEND_TIMEOUT_FACTOR)  # noqa: S311 - jitter
        timer = asyncio.get_running_loop().call_later(timeout_s, self._on_stalled, task)
        try:
            await self._send(body_message(data, more=more))
        except asyncio.CancelledError:
            if not self.stalled:
                raise
            self.cut_off()
            raise ClientGone from None
        finally:
            timer.cancel()

    def cut_off(self) -> None:
        """Disconnect the reader in the middle of the answer, so that it cannot take what it has for the whole."""
        if self._connection is not None:
            self._connection.cut_off()

    def _on_stalled(self, task: asyncio.Task[object] | None) -> None:
        self.stalled = True
        if task is not None:
            task.cancel()
