"""Background work on the event loop: supervised loops, long computations in slices, concurrent requests in rounds."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Generic, NoReturn, TypeAlias, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")


class ExpectedErrors:
    """Context manager that swallows the errors its block may raise, and logs them. For any number of blocks and tasks.

    Args:
        errors: the expected exceptions; all others pass.
        write: called with `message` and the error, e.g. `log.debug`.
        once: whether only the first of several errors in a row is written.
        on_end: called when a block succeeds after one that failed.
    """

    def __init__(
        self,
        errors: type[Exception] | tuple[type[Exception], ...],
        write: Callable[[str, Exception], object],
        message: str = "%s",
        *,
        once: bool = False,
        on_end: Callable[[], object] = lambda: None,
    ) -> None:
        self._errors, self._write, self._message, self._once, self._on_end = errors, write, message, once, on_end
        self.active = False
        """Whether the last block failed."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        if error is None:
            self.end()
        if not isinstance(error, self._errors):
            return False
        if not (self._once and self.active):
            self._write(self._message, error)
        self.active = True
        return True

    def end(self) -> None:
        """The errors are over. Idempotent."""
        if self.active:
            self._on_end()
        self.active = False


def spawn(work: Coroutine[Any, Any, T], tasks: set[asyncio.Task[T]]) -> asyncio.Task[T]:
    """Begin a task, which `tasks` holds until it ends: the event loop would not."""
    task = asyncio.create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task


async def supervise(work: Callable[[], Awaitable[None]], restart_delay_s: float) -> None:
    """Run `work` until it returns. On any exception log it, wait, and start `work` again.

    `work` handles the errors it expects. If it ended on an unexpected one, readers would hang without an error.
    """
    while True:
        try:
            return await work()
        except Exception:  # the boundary of a task: logged, then restarted
            log.exception("%s broke and is begun again", getattr(work, "__qualname__", work))
            await asyncio.sleep(restart_delay_s)


STEPS_S = (1.0, 0.5, 0.25)
"""Grids of wake-ups: a loop uses the largest step that its interval holds."""
TIMER_SLACK_S = 0.002
"""How much too early a timer may fire: uvloop counts in milliseconds."""


def coalesced(interval_s: float) -> float:
    """Seconds until the next wake-up of a loop whose interval is `interval_s`: on a full second of this process, or on
    a half or quarter if the interval is shorter, so that its loops wake together. At most `interval_s` and
    TIMER_SLACK_S; the first wait may be much shorter.

    A process whose caches are cold pays 0.2 ms of CPU for each wake, whatever it wakes for. Shorter intervals are
    returned as they are. The seconds of each process begin at a moment of its own: not all wake at once.
    """
    for step_s in STEPS_S:
        if interval_s >= step_s:
            now = asyncio.get_running_loop().time() - os.getpid() % 1000 / 1000
            return (now + interval_s + TIMER_SLACK_S) // step_s * step_s - now
    return interval_s


async def run_periodically(
    work: Callable[[], Awaitable[object]],
    interval_s: float | Callable[[], float],
    expected: ExpectedErrors,
    *,
    wait_first: bool = False,
) -> NoReturn:
    """Call `work` without end, at most `interval_s` apart. Raises errors of `work` that are not expected."""
    while True:
        if not wait_first:
            with expected:
                await work()
        wait_first = False
        await asyncio.sleep(coalesced(interval_s() if callable(interval_s) else interval_s))


async def retry(work: Callable[[], Awaitable[T]], expected: ExpectedErrors, delays_s: Iterable[float]) -> T:
    """The result of the first call of `work` that does not raise an expected error.

    `delays_s` are the seconds before each retry. When there are no more of them, the expected error is raised too.
    """
    for delay_s in delays_s:
        with expected:
            return await work()
        await asyncio.sleep(delay_s)
    return await work()


async def retry_until(
    stop: asyncio.Event, work: Callable[[], Awaitable[object]], expected: ExpectedErrors, delay_s: float
) -> bool:
    """Retry `work` until it succeeds or `stop` is set. Returns whether it succeeded."""
    while not stop.is_set():
        with expected:
            await work()
            return True
        await wait(stop, delay_s)
    return False


def backoff(min_delay_s: float, max_delay_s: float) -> Iterator[float]:
    """Delays without end: each is twice the one before it, up to a maximum."""
    while True:
        yield min_delay_s
        min_delay_s = min(2 * min_delay_s, max_delay_s)


async def wait(event: asyncio.Event, timeout_s: float) -> bool:
    """Wait for an event for at most `timeout_s`. Returns whether it is set."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
    return event.is_set()


async def wait_any(*events: asyncio.Event, timeout_s: float | None = None) -> None:
    """Wait until one of these events is set, or for at most `timeout_s`."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in waits:
            each.cancel()


ROWS_PER_SLICE = 5_000
"""Rows of a result that one slice decodes or joins, in two or three milliseconds. Smaller slices would delay long
answers by more loop iterations."""

MAX_UNSLICED_ROWS = 100
"""Work of at most this many rows runs at once, so that a short answer does not wait behind a long one."""

Sliced: TypeAlias = Generator[None, None, T]
"""Work that yields wherever other tasks may run, and returns its value."""


def at_once(work: Generator[object, None, T]) -> T:
    """Run the work without slicing, and return its value; drops what it yields. Raises what the work raises."""
    while True:
        try:
            next(work)
        except StopIteration as done:
            value: T = done.value
            return value


class Turns:
    """Runs at most one slice per loop iteration, whatever the number of long computations. One per process.

    A thread would not help: one call of a codec holds the interpreter lock until it returns.

    `async with` it for one slice, or let it `run` all of them.
    """

    def __init__(self) -> None:
        self._one = asyncio.Lock()

    async def __aenter__(self) -> None:
        await self._one.acquire()

    async def __aexit__(self, *_: object) -> None:
        try:
            await asyncio.sleep(0)
        finally:
            self._one.release()

    async def run(self, work: Sliced[T], rows: int | None = None) -> T:
        """Run the work in slices, and return its value. `rows`: its size, if known. Raises what the work raises."""
        if rows is not None and rows <= MAX_UNSLICED_ROWS:
            return at_once(work)
        while True:
            async with self:
                try:
                    next(work)
                except StopIteration as done:
                    value: T = done.value
                    return value


Answer = TypeVar("Answer")

StartNow: TypeAlias = Callable[[Sequence[T], Callable[[Sequence[Any] | None], None]], bool]
"""Starts the work before it returns, without waking a task; False: it cannot. The callback gets the answers, or None if
the items must go with the next round."""


class Rounds(Generic[T, Answer]):
    """Calls `work` with the items of one round. Work returns an answer for each item, or an exception for its caller
    alone; an exception that it raises goes to the callers of all items.

    A request made during a round waits for the next one. For work that costs nearly the same for many items as for one,
    such as reading a log or sending calls to Redis.

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

    def ask(self, item: T) -> asyncio.Future[Answer]:
        """Queue this item for the next round. The future gets its answer; it raises what `work` raises, or the
        exception that `work` returned for the item."""
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        asked = self._waiting
        asked.append((item, future))
        if len(asked) == self._eager_items and self._start_now(
            [each for each, _ in asked], partial(self._began, asked)
        ):
            self._waiting = []
        else:
            self._keep_running()
        return future

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
            answers = await self._work([item for item, _ in asked])
        except Exception as error:  # noqa: BLE001 - passed on to the callers
            _deliver(asked, [error] * len(asked))
        except asyncio.CancelledError:  # the process ends
            for _, future in (*asked, *self._waiting):
                future.cancel()
            raise
        else:
            _deliver(asked, answers)


def _deliver(asked: Sequence[tuple[T, asyncio.Future[Answer]]], answers: Sequence[Answer | Exception]) -> None:
    for (_, future), answer in zip(asked, answers, strict=True):
        if future.done():
            continue
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)
