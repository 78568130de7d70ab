"""Terminals: a stream that says that it is one, and a process of Python on one of its own."""

from __future__ import annotations

import io
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


class OnTerminal:
    """A process of Python on a terminal, and all that it has written there."""

    _hung_up = False

    def __init__(
        self, words: Sequence[str], folder: Path | None = None, *, columns: int = 80, environ: Mapping[str, str]
    ) -> None:
        """`environ` is added to the variables of this process that do not begin with PENSTOCK_."""
        self._ours, self._theirs = pty.openpty()
        termios.tcsetwinsize(self._theirs, (40, columns))
        self._written = b""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
        self.process = subprocess.Popen(
            [sys.executable, *words], cwd=folder, env=kept | environ, start_new_session=True,
            stdin=self._theirs, stdout=self._theirs, stderr=self._theirs,
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        if not self._hung_up:
            self.hang_up()

    @property
    def seen(self) -> str:
        return self._written.decode(errors="replace")

    @property
    def settings(self) -> list[Any]:
        return termios.tcgetattr(self._theirs)

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def until(self, condition: Callable[[str], object], seconds: float = 120) -> None:
        """Read until what was seen is enough, or the process has ended and all is read."""
        deadline = time.monotonic() + seconds
        while not condition(self.seen):
            assert time.monotonic() < deadline, self.seen[-3000:]
            has_ended = self.process.poll() is not None
            if select.select([self._ours], [], [], 0 if has_ended else 0.05)[0]:
                self._written += os.read(self._ours, 65_536)
            elif has_ended:
                return

    def hang_up(self) -> None:
        """Close the terminal, as its window does: what is written to it fails from now on."""
        os.close(self._theirs)
        os.close(self._ours)
        self._hung_up = True

    def interrupt(self, number: signal.Signals = signal.SIGINT) -> None:
        self.process.send_signal(number)

    def end(self) -> int:
        """Read all that is still written. Returns the exit code."""
        self.until(lambda _: False)
        return self.process.wait()
