"""Script batcher: coalesces concurrent calls of one script into one command per partition.

A command of its own costs the client some 140 us and the server a loop iteration; a call in a batch costs a tenth of
it. A single call is sent at once; calls that arrive while a batch is under way form the next one.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from streaming.redis.client import Call, RedisClient
from streaming.redis.failures import translated

EAGER_CALLS = 8
"""So many waiting calls are sent at once, in the middle of a loop iteration: of a burst of requests the first need not
wait until the last has been handled."""
MAX_CALLS = 64
"""In one batch: a script blocks the server for all other clients."""

Waiting = tuple[Call, "asyncio.Future[Any]"]


class ScriptBatcher:
    """Batcher of one script. The script must be idempotent: a failed batch may be sent again. Its calls run in any
    order."""

    def __init__(self, client: RedisClient, script: str) -> None:
        self._client, self._script = client, script
        self._waiting: dict[int, list[Waiting]] = {}
        """By partition, so that a slow or unavailable one delays no other."""
        self._senders: dict[int, asyncio.Task[None]] = {}
        self._again: set[asyncio.Task[None]] = set()

    async def call(self, partition: int, *args: str | bytes | int) -> Any:
        """Call the script with these arguments; returns the answer to this call alone. Raises Unavailable."""
        future = asyncio.get_running_loop().create_future()
        waiting = self._waiting.setdefault(partition, [])
        waiting.append(((self._script, partition, args), future))
        if len(waiting) == EAGER_CALLS and self._client.send_nowait(
            [call for call, _ in waiting], partial(self._begun, waiting)
        ):
            self._waiting[partition] = []
        elif partition not in self._senders:
            self._senders[partition] = asyncio.create_task(self._send(partition))
        return await future

    async def _send(self, partition: int) -> None:
        """Send batches until no call waits."""
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
            answers = await self._client.outcomes([call for call, _ in bundle])
        except Exception as error:  # noqa: BLE001 - raised in the waiting callers
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
    except Exception as error:  # noqa: BLE001 - raised in the waiting callers
        future.set_exception(error)
