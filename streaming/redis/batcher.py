"""Calls of many tasks, bundled: those that wait go to Redis together, the next ones while the first are under way.

A command of its own costs the client some 140 us and the server a turn of its loop; a call among others in a bundle
costs a tenth of it. Whoever is alone is sent at once.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from streaming.redis.client import Call, RedisClient
from streaming.redis.failures import translated

MANY = 8
"""When so many wait that a bundle is worth its price they are sent at once: what comes with the same turn of the event
loop, a burst of requests say, need not wait for the end of the turn."""
MAX_CALLS = 64
"""In one bundle: a script is not to keep the server from everybody else for long."""

Waiting = tuple[Call, "asyncio.Future[Any]"]


class ScriptBatcher:
    """One per process and script. The script must bear repetition; its calls may run in any order."""

    def __init__(self, wire: RedisClient, script: str) -> None:
        self._wire, self._script = wire, script
        self._waiting: dict[int, list[Waiting]] = {}
        """By partition: one that is slow, or down, keeps no other waiting."""
        self._senders: dict[int, asyncio.Task[None]] = {}
        self._again: set[asyncio.Task[None]] = set()

    async def call(self, partition: int, *args: str | bytes | int) -> Any:
        """The answer to this call alone. Raises Unavailable."""
        future = asyncio.get_running_loop().create_future()
        waiting = self._waiting.setdefault(partition, [])
        waiting.append(((self._script, partition, args), future))
        if len(waiting) == MANY and self._wire.send_nowait(
            [call for call, _ in waiting], partial(self._begun, waiting)
        ):
            self._waiting[partition] = []
        elif partition not in self._senders:
            self._senders[partition] = asyncio.create_task(self._send(partition))
        return await future

    async def _send(self, partition: int) -> None:
        """Until nothing waits any more."""
        try:
            while waiting := self._waiting.get(partition):
                bundle, self._waiting[partition] = waiting[:MAX_CALLS], waiting[MAX_CALLS:]
                await self._ask(bundle)
        finally:
            del self._senders[partition]

    def _begun(self, bundle: list[Waiting], answers: list[Any] | None) -> None:
        if answers is not None:
            _deliver(bundle, answers)
            return
        self._again.add(task := asyncio.create_task(self._ask(bundle)))
        task.add_done_callback(self._again.discard)

    async def _ask(self, bundle: list[Waiting]) -> None:
        try:
            answers = await self._wire.outcomes([call for call, _ in bundle])
        except Exception as error:  # noqa: BLE001 - handed on to whoever waits
            answers = [error] * len(bundle)
        except asyncio.CancelledError:  # the process ends
            for _, future in bundle:
                future.cancel()
            raise
        _deliver(bundle, answers)


def _deliver(bundle: list[Waiting], answers: list[Any]) -> None:
    for (_, future), answer in zip(bundle, answers, strict=True):
        if future.done():
            continue
        if isinstance(answer, Exception):
            _fail(future, answer)
        else:
            future.set_result(answer)


def _fail(future: asyncio.Future[Any], answer: Exception) -> None:
    try:
        with translated():
            raise answer
    except Exception as error:  # noqa: BLE001 - handed on to whoever waits
        future.set_exception(error)
