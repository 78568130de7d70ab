"""Terminal output of `penstock up`: current phase, process failures, logs, and the ready block."""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path

from cli import banner
from cli.child import Child, message_of
from cli.errors import Problem
from cli.instance import Instance
from cli.output import error_block
from cli.progress import ProgressLine

MIN_CRASHES = 3
"""Consecutive failures after which a process counts as crash-looping."""
TAIL_INTERVAL_S = 0.2

log = logging.getLogger(__name__)


class Screen:
    """Prints the lines of one `up`, and logs every event, repeated ones included."""

    def __init__(self, progress: ProgressLine) -> None:
        self._progress = progress
        self._looping: set[str] = set()

    def phase(self, text: str) -> None:
        """Show the current phase; "" for none."""
        self._progress.phase(text)

    def say(self, line: str) -> None:
        """Print a permanent line."""
        self._progress.say(line)

    def ready(self, instance: Instance, *, keyed: bool) -> None:
        """Print the ready block to stdout."""
        self._progress.phase("")
        sys.stdout.write("\n".join(banner.ready_block(instance, keyed=keyed)) + "\n")
        sys.stdout.flush()

    def noticed(self, child: Child, *, starting: bool) -> None:
        """Report a process that exited by itself (once if it keeps doing so), and its recovery.

        While everything is `starting`, a crash loop is not reported here: it may end `up`, which then reports it.
        """
        status, name = child.status, child.program.id
        if status.state == "restarting" and status.pid is None:
            log.warning("%s ended (%s), failure %d in a row", name, status.cause, status.failures)
            if status.failures == 1:
                self.say(f"{name} ended ({status.cause}); starting it again")
            elif looping(child) and name not in self._looping and not starting:
                self._looping.add(name)
                self.say("\n".join(error_block(crash_loop(child))))
        elif status.state == "ready" and name in self._looping:
            self._looping.discard(name)
            self.say(f"{name} is ready again")

    async def tail(self, folder: Path) -> None:
        """Print new log lines of all processes, each with its process's name."""
        offsets: dict[Path, int] = {}
        while True:
            self._show_all_new(folder, offsets)
            await asyncio.sleep(TAIL_INTERVAL_S)

    def _show_all_new(self, folder: Path, offsets: dict[Path, int]) -> None:
        for path in sorted(folder.glob("*.log")):
            offsets[path] = self._show_new(path, offsets.get(path, 0))

    def _show_new(self, path: Path, offset: int) -> int:
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        for line in whole.decode(errors="replace").split("\n")[:-1]:
            self.say(f"{path.stem}: {message_of(line)}")
        return offset + len(whole)


def looping(child: Child) -> bool:
    """Whether a process is crash-looping."""
    return child.status.failures >= MIN_CRASHES


def crash_loop(child: Child) -> Problem:
    """The error for a crash-looping process."""
    program, status = child.program, child.status
    return Problem(
        f"{program.id} does not come up: it ended {status.failures} times in a row",
        cause=status.cause,
        next_step=f"penstock doctor; its log is {program.log}",
        code="crash_loop",
    )
