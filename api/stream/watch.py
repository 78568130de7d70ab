"""Disconnect watcher: notices at once that a client has disconnected, while its request waits or computes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope

from api.stream.connection import Connection
from penstock.loops import Sliced

T = TypeVar("T")


class Watched:
    """Context manager that calls `on_lost` when the client disconnects, or has done so before.

    The request's body must have been read, or be of no interest.
    """

    __slots__ = ("_connection", "_on_lost", "_receive", "_task", "lost")

    def __init__(self, scope: Scope, receive: Receive, on_lost: Callable[[], None] | None = None) -> None:
        self._connection: Connection | None = scope["state"].get("connection")
        self._receive, self._on_lost = receive, on_lost
        self._task: asyncio.Task[None] | None = None
        self.lost = False
        """The client has disconnected."""

    def __enter__(self) -> Watched:
        if self._connection is not None:
            self._connection.watch(self._set_lost)
        else:
            self._task = asyncio.create_task(self._wait())
        return self

    def __exit__(self, *_: object) -> None:
        if self._connection is not None:
            self._connection.watch(None)
        elif self._task is not None:
            self._task.cancel()

    def check(self) -> None:
        """Raise ClientDisconnect if the client has disconnected."""
        if self.lost:
            raise ClientDisconnect

    def while_there(self, work: Sliced[T]) -> Sliced[T]:
        """Run sliced work, and abort it when the client disconnects. Raises ClientDisconnect."""
        while True:
            self.check()
            try:
                next(work)
            except StopIteration as done:
                value: T = done.value
                return value
            yield

    def _set_lost(self) -> None:
        self.lost = True
        if self._on_lost is not None:
            self._on_lost()

    async def _wait(self) -> None:
        """Wait for the ASGI disconnect message, under a server other than ours."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._set_lost()
