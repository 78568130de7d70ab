"""One connection to one server that all tasks of a process share: commands go out in the order they are given, and the
answers come back in that order.

The library makes the connection (address, TLS, password, which server is the primary) and is left out of it from then
on: a call through its pool costs five to ten times as much CPU (bench/NOTES.md). Nothing that makes the server wait
(WAIT, BLOCK) may be sent here: everybody else's commands would wait behind it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import hiredis
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ClusterDownError, InvalidResponse, MovedError, NoScriptError, ReadOnlyError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

Command: TypeAlias = tuple[str | bytes | int, ...]

KINDS: dict[str, type[ResponseError]] = {
    "CLUSTERDOWN": ClusterDownError,
    "MOVED": MovedError,
    "NOSCRIPT": NoScriptError,
    "READONLY": ReadOnlyError,
}
"""Refusals that somebody here looks for by their class."""


class SharedConnection:
    """`acquire` gives a connection that is open, `release` takes it back once it is not."""

    def __init__(
        self,
        acquire: Callable[[], Awaitable[AbstractConnection]],
        release: Callable[[AbstractConnection], Awaitable[None]],
        timeout_s: float,
    ) -> None:
        self._acquire, self._release, self._timeout_s = acquire, release, timeout_s
        self._opening: asyncio.Task[PipelinedProtocol] | None = None
        self._connection: AbstractConnection | None = None
        self._talk: PipelinedProtocol | None = None

    async def run(self, commands: Sequence[Command]) -> list[Any]:
        """Answers and error answers. Raises the library's ConnectionError and TimeoutError: some may have run."""
        talk = self._talk
        if talk is None or talk.over:
            if self._opening is None:
                self._opening = asyncio.create_task(self._open())
                self._opening.add_done_callback(self._opened)
            talk = await self._open_for_all(self._opening)
            if talk.over:  # again, before those who waited for it had their turn
                raise RedisConnectionError("the connection was lost as soon as it was open")
        return await talk.send(commands)

    def send(self, commands: Sequence[Command]) -> asyncio.Future[list[Any]] | None:
        """The same at once, before whoever asks goes on; None, and nothing is sent, where it is not open."""
        talk = self._talk
        return None if talk is None or talk.over else talk.send(commands)

    @staticmethod
    async def _open_for_all(opening: asyncio.Task[PipelinedProtocol]) -> PipelinedProtocol:
        """For all who wait: a server that is down is asked once. One of them may leave, and `close` may cancel it:
        that cancels none of them."""
        await asyncio.wait({opening})
        if opening.cancelled():
            raise RedisConnectionError("the connection was closed while it was opened")
        return opening.result()

    async def _open(self) -> PipelinedProtocol:
        await self._give_back()
        self._connection = await self._acquire()
        self._talk = PipelinedProtocol(self._connection, self._timeout_s)
        return self._talk

    def _opened(self, opening: asyncio.Task[PipelinedProtocol]) -> None:
        self._opening = None
        if not opening.cancelled():
            opening.exception()  # whoever waited has it; perhaps nobody does any more

    async def close(self) -> None:
        """End the connection; the next command makes another."""
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait({self._opening})
        if self._talk is not None:
            self._talk.end(RedisConnectionError("the connection was closed"))
        await self._give_back()

    async def _give_back(self) -> None:
        if self._connection is not None:
            connection, self._connection = self._connection, None
            await connection.disconnect(nowait=True)
            await self._release(connection)


@dataclass(slots=True, eq=False)
class Sent:
    """Commands under way."""

    count: int
    due: float
    """Loop time by which they must be answered."""
    done: asyncio.Future[list[Any]]
    answers: list[Any] = field(default_factory=list)


class PipelinedProtocol(asyncio.Protocol):
    """One life of a connection."""

    def __init__(self, connection: AbstractConnection, timeout_s: float) -> None:
        self._over = False
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._sent: deque[Sent] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._reader = reader()
        self._transport, self._former = take_over(connection, self)

    @property
    def over(self) -> bool:
        """Whether nothing can be sent any more. The transport knows first, `connection_lost` comes a turn later."""
        return self._over or self._transport.is_closing()

    def send(self, commands: Sequence[Command]) -> asyncio.Future[list[Any]]:
        """Send them, unless it is over; their answers, in time. Whoever no longer waits for them disturbs nobody."""
        now = self._loop.time()
        sent = Sent(len(commands), now + self._timeout_s, self._loop.create_future())
        self._sent.append(sent)
        if self._timer is None:
            self._timer = self._loop.call_at(sent.due, self._look)
        # Its stub has tuples of one.
        data = [hiredis.pack_command(command) for command in commands]  # type: ignore[arg-type]
        try:
            self._transport.writelines(data)
        except RuntimeError as error:  # uvloop, of a connection that is closed but has not said so
            self.end(RedisConnectionError(f"the connection is closed: {error}"))
        return sent.done

    def data_received(self, data: bytes) -> None:
        """Answers, whole or in parts."""
        try:
            self._reader.feed(data)
            while (answer := self._reader.gets()) is not False:
                self._take(answer)
        except InvalidResponse as error:
            self.end(RedisConnectionError(f"the answer cannot be read: {error}"))

    def _take(self, answer: Any) -> None:
        sent = self._sent[0]
        sent.answers.append(answer)
        if len(sent.answers) == sent.count:
            self._sent.popleft()
            if not sent.done.done():
                sent.done.set_result(sent.answers)

    def _look(self) -> None:
        """One timer for all: the oldest is due first."""
        self._timer = None
        if self._sent and self._sent[0].due <= self._loop.time():
            self.end(RedisTimeoutError(f"no answer within {self._timeout_s:g} s"))
        elif self._sent:
            self._timer = self._loop.call_at(self._sent[0].due, self._look)

    def connection_lost(self, error: Exception | None) -> None:
        """By the server, or by `end`."""
        self.end(RedisConnectionError(f"connection lost: {error}" if error else "connection closed by the server"))
        self._former.connection_lost(error)

    def end(self, error: Exception) -> None:
        """Nothing more is sent; what is under way fails. Idempotent."""
        self._over = True
        self._transport.abort()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._sent:
            sent = self._sent.popleft()
            if not sent.done.done():
                sent.done.set_exception(error)


def take_over(
    connection: AbstractConnection, protocol: asyncio.Protocol
) -> tuple[asyncio.WriteTransport, asyncio.BaseProtocol]:
    """The connection's transport, from now on this protocol's; and the library's own protocol, which waits to hear of
    the end when it closes a connection. Raises the library's ConnectionError: of an end before, only the library's
    protocol was told."""
    writer = connection._writer  # the library has no other way to it
    if writer is None or writer.transport.is_closing():
        raise RedisConnectionError("the connection was lost before it was used")
    try:
        transport, former = writer.transport, writer.transport.get_protocol()
        transport.set_protocol(protocol)
    except RuntimeError as error:
        raise RedisConnectionError(f"the connection was lost before it was used: {error}") from error
    return transport, former


def reader() -> hiredis.Reader:
    """Of answers, among them errors as the library's exceptions."""
    return hiredis.Reader(protocolError=InvalidResponse, replyError=refusal)


def refusal(text: str) -> ResponseError:
    """An error answer as an exception of the library."""
    code, _, words = text.partition(" ")
    kind = KINDS.get(code)
    return ResponseError(text) if kind is None else kind(words, status_code=code)
