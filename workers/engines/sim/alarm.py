"""High-resolution timer for asyncio: wakes within a fraction of a millisecond, where asyncio's own is up to 1 ms late.

Only the simulated engine needs it, so that its steps are as even as those of a GPU. It uses a timerfd on Linux and
asyncio's timer elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import sys
from types import TracebackType

CLOCK_MONOTONIC = 1
"""The clock of asyncio's event loop."""
ABSOLUTE = 1
NS = 1_000_000_000


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Timer(ctypes.Structure):
    _fields_ = (("interval", _Time), ("at", _Time))


class Alarm:
    """A context manager, for use inside a running event loop. Only one task may sleep on it at a time."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
        self._fd = -1
        self._expired = asyncio.Event()

    def __enter__(self) -> Alarm:
        if self._libc is not None:
            self._fd = self._libc.timerfd_create(CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd >= 0:
            self._loop.add_reader(self._fd, self._on_expiry)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    async def sleep_until(self, moment: float) -> None:
        """Sleep until `moment` of the event loop's clock; yields to other tasks even if it has passed."""
        if self._fd < 0 or self._libc is None or moment <= self._loop.time():
            await asyncio.sleep(max(0.0, moment - self._loop.time()))
            return
        self._expired.clear()
        seconds, nanoseconds = divmod(int(moment * NS), NS)
        timer = _Timer(at=_Time(seconds, nanoseconds))
        self._libc.timerfd_settime(self._fd, ABSOLUTE, ctypes.byref(timer), None)
        await self._expired.wait()

    def _on_expiry(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the timer was set again meanwhile
            os.read(self._fd, 8)
            self._expired.set()
