"""What is published on one channel, over a connection of its own.

The library makes the connection and is left out of it from then on, as in `line`: its own reader wakes a task for each
message, which could be seen in the cost of a token (bench/NOTES.md). The server is asked for a sign of life now and
then, since a subscriber that sends nothing would never learn that its connection is dead.
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

PING_S = 10.0
"""Between two signs of life that are asked for, and the time one may take."""


class Subscription(asyncio.Protocol):
    """Messages are kept until somebody takes them: one by one, or all poured from where they arrive."""

    def __init__(self, connection: AbstractConnection, channel: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._messages: deque[bytes] = deque()
        self._take: Callable[[bytes], None] | None = None
        self._changed = asyncio.Event()
        self._begun = self._loop.create_future()
        self._fault: Exception | None = None
        self._heard = True
        """Anything since the last time a sign of life was asked for."""
        self._reader = reader()
        self._transport, self._former = take_over(connection, self)
        self._send("SUBSCRIBE", channel)
        self._timer = self._loop.call_later(PING_S, self._look)

    async def begun(self) -> None:
        """Until the server has it: what is published from now on comes. Raises Unavailable."""
        await self._begun

    async def message(self) -> bytes:
        """The next one. Raises Unavailable."""
        while not self._messages:
            await self._news()
        return self._messages.popleft()

    async def pour(self, take: Callable[[bytes], None]) -> NoReturn:
        """Have `take` called for every message, without a task being woken for it. Raises Unavailable, and what `take`
        raises."""
        while self._messages:
            take(self._messages.popleft())
        self._take = take
        while True:
            await self._news()

    async def _news(self) -> None:
        """A message, or the end."""
        if self._fault is not None:
            raise self._fault
        self._changed.clear()
        await self._changed.wait()
        if self._fault is not None and not self._messages:
            raise self._fault

    def _send(self, *words: str) -> None:
        self._transport.write(hiredis.pack_command(words))  # type: ignore[arg-type]  # its stub has tuples of one

    def data_received(self, data: bytes) -> None:
        """Messages, whole or in parts."""
        self._heard = True
        try:
            self._reader.feed(data)
            while (said := self._reader.gets()) is not False:
                self._hear(said)
        except InvalidResponse as error:
            self.end(Unavailable(f"a message cannot be read: {error}"))
        except Exception as error:  # noqa: BLE001 - of `take`: whoever pours hears of it
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
        """Whether the server has said anything since the last time."""
        if not self._heard:
            self.end(Unavailable(f"a subscription has heard nothing for {PING_S:g} s, although it asked"))
            return
        self._heard = False
        self._send("PING")
        self._timer = self._loop.call_later(PING_S, self._look)

    def connection_lost(self, error: Exception | None) -> None:
        """By the server, or by `end`."""
        self.end(Unavailable(f"a subscription was lost: {error or 'closed by the server'}"))
        self._former.connection_lost(error)

    def end(self, error: Exception) -> None:
        """Nothing more comes; whoever waits is told. Idempotent."""
        self._transport.abort()
        self._timer.cancel()
        if self._fault is None:
            self._fault = error
        if not self._begun.done():
            self._begun.set_exception(error)
        self._changed.set()
