"""Ends a run whose test hangs. The last it says is which test it was and where it stands: of a long output often only
the end is kept."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Generator, Iterator
from types import FrameType
from typing import Any

import pytest

HANG_S = 300.0
LATER_S = 30.0
"""If nothing was said by so much later, no Python thread can run any more: then `faulthandler` ends the run."""


class Watchdog:
    """A plugin; `out` is a file descriptor that nobody captures. One thread watches all tests."""

    def __init__(self, out: int) -> None:
        self._out = out
        self._running: tuple[str, float] | None = None
        """The test, and when it began."""
        threading.Thread(target=self._watch, daemon=True).start()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Fixtures included: what hangs is often their end."""
        self._running = item.nodeid, time.monotonic()
        try:
            return (yield)
        finally:
            self._running = None

    def _watch(self) -> None:
        while True:
            faulthandler.dump_traceback_later(HANG_S + LATER_S, exit=True, file=self._out)
            time.sleep(HANG_S / 20)
            if (running := self._running) is not None and time.monotonic() - running[1] > HANG_S:
                self._end(running[0])

    def _end(self, test: str) -> None:
        os.write(self._out, f"{report()}{test} took longer than {HANG_S:g} s, its fixtures included\n".encode())
        os._exit(1)


def report() -> str:
    """Where everything stands: other threads, the main thread, its tasks and what each of them waits for."""
    frames = sys._current_frames()
    main = frames.pop(threading.main_thread().ident or 0)
    frames.pop(threading.get_ident(), None)
    stacks = [stack(f"thread {number}", frame) for number, frame in frames.items()] + [stack("main thread", main)]
    tasks = [f"task {task.get_name()}: {' > '.join(awaited(task.get_coro()))}\n" for task in tasks_of(main)]
    return "\n" + "\n".join([*stacks, "".join(tasks)])


def stack(name: str, frame: FrameType) -> str:
    return f"{name}, the innermost call last:\n{''.join(traceback.format_stack(frame))}"


def tasks_of(frame: FrameType | None) -> list[asyncio.Task[Any]]:
    """Of the event loop that runs in this frame or one that called it."""
    while frame is not None:
        if isinstance(loop := frame.f_locals.get("self"), asyncio.AbstractEventLoop):
            return sorted(asyncio.all_tasks(loop), key=asyncio.Task.get_name)
        frame = frame.f_back
    return []


def awaited(coroutine: Any) -> Iterator[str]:
    """A coroutine, what it awaits, what that awaits and so on, each with the line it stands at."""
    while coroutine is not None:
        if (frame := getattr(coroutine, "cr_frame", None)) is not None:
            yield f"{frame.f_code.co_qualname}:{frame.f_lineno}"
        coroutine = getattr(coroutine, "cr_await", None)
