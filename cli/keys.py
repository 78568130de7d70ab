"""Keys of a terminal: reads single key presses without waiting, and leaves the terminal as it was."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import tty
from types import TracebackType
from typing import Any, Self


class Keys:
    """A context manager. Where stdin is no terminal, no key is ever pressed."""

    def __init__(self) -> None:
        self._before: list[Any] | None = None

    def __enter__(self) -> Self:
        with contextlib.suppress(termios.error, OSError, ValueError):  # ValueError: a stream without a file
            fd = sys.stdin.fileno()
            before = termios.tcgetattr(fd)
            tty.setcbreak(fd)  # Ctrl-C stays a signal
            self._before = before
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self._before is not None:
            termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, self._before)

    def pressed(self, timeout_s: float) -> str:
        """The keys that were pressed, waiting at most so long for the first one; "" if none was."""
        fds = [sys.stdin.fileno()] if self._before is not None else []
        ready, _, _ = select.select(fds, [], [], max(0.0, timeout_s))
        return os.read(fds[0], 64).decode(errors="replace") if ready else ""
