"""Calls of many tasks, sent together: one round trip for all that came while the one before was under way.

Alone a call goes at once; under load a round trip's cost, most of what a call costs a process, is shared.
"""

from __future__ import annotations

import asyncio
from typing import Any, TypeAlias

from streaming.errors import Unavailable
from streaming.wire import Call, Wire

MOST = 64
"""Calls in one round trip: bounds how long a server is busy with it."""

Waiting: TypeAlias = "tuple[Call, asyncio.Future[Any]]"


class Bundle:
    """For scripts that bear repetition, as everything does that is sent together."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._waiting: list[Waiting] = []
        self._sending: asyncio.Task[None] | None = None

    async def call(self, script: str, partition: int, *args: str | bytes | int) -> Any:
        """As Wire.call. Raises Unavailable, Fenced; Unavailable strikes all that were sent together."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append(((script, partition, args), answer))
        if self._sending is None:
            self._sending = asyncio.create_task(self._send())
        return await answer

    async def _send(self) -> None:
        try:
            while self._waiting:
                batch, self._waiting = self._waiting[:MOST], self._waiting[MOST:]
                await self._answer(batch)
        finally:
            self._sending = None
            for _, answer in self._waiting:  # none, unless this was stopped
                answer.cancel()

    async def _answer(self, batch: list[Waiting]) -> None:
        try:
            answers = await self._wire.calls([call for call, _ in batch])
        except Exception as error:  # noqa: BLE001 - handed on to whoever waits for the answer
            if len(batch) > 1 and not isinstance(error, Unavailable):
                for one in batch:  # one of them is at fault: the others are not to suffer for it
                    await self._answer([one])
                return
            for _, waiting in batch:
                if not waiting.done():
                    waiting.set_exception(error)
            return
        except BaseException:
            for _, waiting in batch:
                waiting.cancel()
            raise
        for (_, waiting), answer in zip(batch, answers, strict=True):
            if not waiting.done():
                waiting.set_result(answer)
