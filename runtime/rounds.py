"""Call batcher: coalesces concurrent requests of many tasks into rounds, one call per round.

A request made during a round waits for the next one. For work that costs nearly the same for many items as for one,
such as reading a log or sending calls to Redis.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar

T = TypeVar("T")
Answer = TypeVar("Answer")

StartNow: TypeAlias = Callable[[Sequence[T], Callable[[Sequence[Any] | None], None]], bool]
"""Starts the work before it returns, without waking a task; False: it cannot. The callback gets the answers, or None if
the items must go with the next round."""


class Rounds(Generic[T, Answer]):
    """Calls `work` with the items of one round. Work returns an answer for each item, or an exception for its caller
    alone; an exception that it raises goes to the callers of all items.

    Args:
        max_items: in one round.
        eager_items: if so many items wait, they are given to `start_now`, in the middle of a loop iteration: of a burst
            the first need not wait until the last has been handled.
    """

    def __init__(
        self,
        work: Callable[[Sequence[T]], Awaitable[Sequence[Answer | Exception]]],
        *,
        max_items: int = sys.maxsize,
        eager_items: int = 0,
        start_now: StartNow[T] = lambda _items, _then: False,
    ) -> None:
        self._work, self._max_items, self._eager_items, self._start_now = work, max_items, eager_items, start_now
        self._waiting: list[tuple[T, asyncio.Future[Answer]]] = []
        self._running: asyncio.Task[None] | None = None

    async def ask(self, item: T) -> Answer:
        """Wait for the round with this item, and return its answer. Raises what `work` raises or answers."""
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        asked = self._waiting
        asked.append((item, future))
        if len(asked) == self._eager_items and self._start_now(
            [each for each, _ in asked], partial(self._began, asked)
        ):
            self._waiting = []
        else:
            self._keep_running()
        return await future

    def _began(self, asked: list[tuple[T, asyncio.Future[Answer]]], answers: Sequence[Answer] | None) -> None:
        if answers is not None:
            _deliver(asked, answers)
            return
        self._waiting = [*asked, *self._waiting]
        self._keep_running()

    def _keep_running(self) -> None:
        if self._running is None:
            self._running = asyncio.create_task(self._run())

    async def _run(self) -> None:
        """Run rounds until no request waits. Cancelled requests are skipped."""
        try:
            while self._waiting:
                waiting, self._waiting = self._waiting[: self._max_items], self._waiting[self._max_items :]
                if asked := [each for each in waiting if not each[1].done()]:
                    await self._round(asked)
        finally:
            self._running = None

    async def _round(self, asked: Sequence[tuple[T, asyncio.Future[Answer]]]) -> None:
        try:
            answers: Sequence[Answer | Exception] = await self._work([item for item, _ in asked])
        except Exception as error:  # noqa: BLE001 - passed on to the callers
            answers = [error] * len(asked)
        except asyncio.CancelledError:  # the process ends
            for _, future in (*asked, *self._waiting):
                future.cancel()
            raise
        _deliver(asked, answers)


def _deliver(asked: Sequence[tuple[T, asyncio.Future[Answer]]], answers: Sequence[Answer | Exception]) -> None:
    for (_, future), answer in zip(asked, answers, strict=True):
        if future.done():
            continue
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)
