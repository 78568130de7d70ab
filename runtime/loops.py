"""Supervised loops and retries: calls a function again after an error, and logs the error."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator
from types import TracebackType
from typing import NoReturn, TypeVar

log = logging.getLogger(__name__)

LAG_CHECK_INTERVAL_S = 0.5
MIN_LOGGED_LAG_S = 1.0
"""A shorter lag is normal on a busy machine and is not logged."""

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


async def run_periodically(
    work: Callable[[], Awaitable[object]],
    interval_s: float | Callable[[], float],
    expected: ExpectedErrors,
    *,
    wait_first: bool = False,
) -> NoReturn:
    """Call `work` without end, `interval_s` apart. Raises errors of `work` that are not expected."""
    while True:
        if not wait_first:
            with expected:
                await work()
        wait_first = False
        await asyncio.sleep(interval_s() if callable(interval_s) else interval_s)


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


async def watch_lag() -> NoReturn:
    """Log a warning when the event loop was blocked, which explains otherwise unexplained stalls."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + LAG_CHECK_INTERVAL_S
        await asyncio.sleep(LAG_CHECK_INTERVAL_S)
        if (late := loop.time() - due) > MIN_LOGGED_LAG_S:
            log.warning("the event loop was held up for %.1f s", late)
