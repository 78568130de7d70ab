"""Read by every interpreter that finds this folder on its path: counts the calls of functions in its main thread.

For each SIGUSR2, their number so far goes to the file that COUNTED_CALLS names.
"""

import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any


class Counter:
    """Counts calls of functions, those of C too: work that neighbours on the machine do not change."""

    def __init__(self, path: Path) -> None:
        self._path, self._calls = path, 0

    def note(self, _frame: FrameType, event: str, _argument: Any) -> None:
        if event in ("call", "c_call"):
            self._calls += 1

    def write(self, *_: object) -> None:
        whole = self._path.with_suffix(".new")
        whole.write_text(str(self._calls), encoding="utf-8")
        whole.rename(self._path)


if "COUNTED_CALLS" in os.environ:
    counter = Counter(Path(os.environ["COUNTED_CALLS"]))
    signal.signal(signal.SIGUSR2, counter.write)
    sys.setprofile(counter.note)
