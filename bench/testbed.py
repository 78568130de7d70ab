"""Where a measurement takes place: a folder for logs, and a bar that shows how far it is."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class Testbed:
    """As a context: the folder is removed at the end, unless `keep` was called."""

    def __init__(self, console: Console, title: str, total: int) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
        )
        self._task = self._bar.add_task(title, total=total)
        self.folder = Path(tempfile.mkdtemp(prefix="penstock-gateway-"))
        self._kept = False

    def __enter__(self) -> Testbed:
        self._bar.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._bar.stop()
        if self._kept or kind is not None:
            self._console.print(f"logs: {self.folder}")
        else:
            shutil.rmtree(self.folder, ignore_errors=True)

    def room(self, *names: object) -> Path:
        """A new folder in it."""
        folder = self.folder / "-".join(map(str, names)).replace(" ", "-")
        folder.mkdir()
        return folder

    def say(self, what: str) -> None:
        """What is being done now."""
        self._bar.update(self._task, description=what)

    def done(self) -> None:
        """One measurement is over."""
        self._bar.advance(self._task)

    def keep(self) -> None:
        """Something went wrong: the logs are wanted."""
        self._kept = True
