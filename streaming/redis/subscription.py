"""Subscription to one pub/sub channel, over a connection of its own.

redis-py opens the connection; this protocol then takes over its transport, as in `connection.py`, because redis-py
wakes a task for each message, which raises the cost of a token measurably. The protocol sends PING at intervals, since
a subscriber that only reads would never notice that its connection is dead.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, NoReturn

import hiredis
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import InvalidResponse

from streaming.errors import Unavailable
from streaming.redis.connection import reader, take_over

PING_INTERVAL_S = 10.0
"""Between two PINGs, and the timeout of their answer."""


class Subscription(asyncio.Protocol):
    """Buffers messages until the caller takes them one by one with `message`, or passes them to a callback (`pour`)."""

    def __init__(self, connection: AbstractConnection, channel: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._messages: deque[bytes] = deque()
        self._take: Callable[[bytes], None] | None = None
        self._changed = asyncio.Event()
        self._begun = self._loop.create_future()
        self._fault: Exception | None = None
        self._heard = True
        """Whether the server has sent anything since the last PING."""
        self._reader = reader()
        self._transport, self._former = take_over(connection, self)
        self._send("SUBSCRIBE", channel)
        self._timer = self._loop.call_later(PING_INTERVAL_S, self._look)

    async def begun(self) -> None:
        """Wait until the server has confirmed the subscription. Raises Unavailable."""
        await self._begun

    async def message(self) -> bytes:
        """Wait for the next message. Raises Unavailable."""
        while not self._messages:
            await self._news()
        return self._messages.popleft()

    async def pour(self, take: Callable[[bytes], None]) -> NoReturn:
        """Call `take` with every message as it arrives, without waking a task. Raises Unavailable, and what `take`
        raises."""
        while self._messages:
            take(self._messages.popleft())
        self._take = take
        while True:
            await self._news()

    async def _news(self) -> None:
        """Wait for a message, or raise the error that ended the subscription."""
        if self._fault is not None:
            raise self._fault
        self._changed.clear()
        await self._changed.wait()
        if self._fault is not None and not self._messages:
            raise self._fault

    def _send(self, *words: str) -> None:
        self._transport.write(hiredis.pack_command(words))  # type: ignore[arg-type]  # its stub has tuples of one

    def data_received(self, data: bytes) -> None:
        """Parse messages, which may arrive in parts."""
        self._heard = True
        try:
            self._reader.feed(data)
            while (said := self._reader.gets()) is not False:
                self._hear(said)
        except InvalidResponse as error:
            self.end(Unavailable(f"a message cannot be read: {error}"))
        except Exception as error:  # noqa: BLE001 - raised by `take`: `pour` raises it
            self.end(error)

    def _hear(self, said: Any) -> None:
        match said:
            case [b"message", _, data] if self._take is not None:
                self._take(data)
            case [b"message", _, data]:
                self._messages.append(data)
                self._changed.set()
            case [b"subscribe", *_]:
                if not self._begun.done():
                    self._begun.set_result(None)
            case Exception():
                self.end(Unavailable(f"Redis refuses a subscription: {said}"))

    def _look(self) -> None:
        """End the subscription if the server has sent nothing since the last PING, else send another."""
        if not self._heard:
            self.end(Unavailable(f"a subscription has heard nothing for {PING_INTERVAL_S:g} s, although it asked"))
            return
        self._heard = False
        self._send("PING")
        self._timer = self._loop.call_later(PING_INTERVAL_S, self._look)

    def connection_lost(self, error: Exception | None) -> None:
        """Called by the transport when the server, or `end`, has closed it."""
        self.end(Unavailable(f"a subscription was lost: {error or 'closed by the server'}"))
        self._former.connection_lost(error)

    def end(self, error: Exception) -> None:
        """Close the connection and raise `error` in every waiting caller. Idempotent."""
        self._transport.abort()
        self._timer.cancel()
        if self._fault is None:
            self._fault = error
        if not self._begun.done():
            self._begun.set_exception(error)
        self._changed.set()
