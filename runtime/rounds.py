"""Call batcher: coalesces concurrent requests of many tasks into rounds, one call per round.

A request made during a round waits for the next one. For work that costs nearly the same for many items as for one,
such as reading a log.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")
Answer = TypeVar("Answer")


class Rounds(Generic[T, Answer]):
    """Calls `work` with the items of one round; it returns an answer per item. Its error goes to all items' callers."""

    def __init__(self, work: Callable[[Sequence[T]], Awaitable[Sequence[Answer]]]) -> None:
        self._work = work
        self._waiting: list[tuple[T, asyncio.Future[Answer]]] = []
        self._running: asyncio.Task[None] | None = None

    async def ask(self, item: T) -> Answer:
        """Wait for the round with this item, and return its answer. Raises what `work` raises."""
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        if self._running is None:
            self._running = asyncio.create_task(self._run())
        return await future

    async def _run(self) -> None:
        """Run rounds until no request waits. Cancelled requests are skipped."""
        try:
            while self._waiting:
                waiting, self._waiting = self._waiting, []
                if asked := [each for each in waiting if not each[1].done()]:
                    await self._round(asked)
        finally:
            self._running = None

    async def _round(self, asked: Sequence[tuple[T, asyncio.Future[Answer]]]) -> None:
        try:
            answers = await self._work([item for item, _ in asked])
        except Exception as error:  # noqa: BLE001 - passed on to the callers
            for _, future in asked:
                if not future.done():
                    future.set_exception(error)
        except asyncio.CancelledError:  # the process ends
            for _, future in (*asked, *self._waiting):
                future.cancel()
            raise
        else:
            for (_, future), answer in zip(asked, answers, strict=True):
                if not future.done():
                    future.set_result(answer)
