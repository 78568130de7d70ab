"""Progress line on stderr: shows the current phase, its duration, and about how long it will take if that is known.

On a terminal the line is redrawn in place, and fits its width; elsewhere each phase is a plain line, repeated every ten
seconds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import TextIO

from cli.output import cells, cut, fitted, shorten_ids, terminal_width, visible

REDRAW_INTERVAL_S = 0.1
EXPLAIN_INTERVAL_S = 1.0
REPEAT_INTERVAL_S = 10.0
BAR_WIDTH = 24
MAX_STEPS = 10_000
MIN_MEASURED_S = 2.0
"""Of a phase, before it is said how long the rest takes."""


class ProgressLine:
    """A context manager that shows the line while it is entered. Thread-safe."""

    def __init__(
        self, stream: TextIO, environ: Mapping[str, str], *, quiet: bool = False, delay_s: float = 0.0
    ) -> None:
        """`delay_s`: where there is no terminal, phases that are over sooner are not mentioned."""
        self._stream = stream
        self._live = stream.isatty() and environ.get("TERM") != "dumb"
        self._quiet, self._delay_s = quiet, delay_s
        self._lock = threading.RLock()
        self._text, self._bar, self._amount, self._since = "", "", "", 0.0
        self._share, self._first_share = 0.0, 0.0
        self._width = 0
        self._why: Callable[[], str] = str
        self._looked = 0.0
        self._reason = ""
        self._printed = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._tick, name="progress", daemon=True)

    def __enter__(self) -> ProgressLine:
        if not self._quiet:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def phase(self, text: str) -> None:
        """Begin a new phase; the same text again changes nothing, "" is no phase."""
        text = visible(text)
        with self._lock:
            if text != self._text:
                self._text, self._bar, self._amount, self._since = text, "", "", time.monotonic()
                self._share = self._first_share = 0.0
                self._show(changed=True)

    def explain(self, why: Callable[[], str]) -> None:
        """Show behind the phase what `why` returns, which is called every second, in the thread of the line."""
        self._why = why

    def amount(self, text: str, done: int, total: int, detail: str | None = None) -> None:
        """Show the progress of a phase in bytes or steps; in steps, if a `detail` follows."""
        with self._lock:
            begins = visible(text) != self._text
            self.phase(text)
            self._share = done / total if total > 0 else 0.0
            self._first_share = self._share if begins else self._first_share
            steps = None if detail is None else f"{done}/{total}  {visible(detail)}".rstrip()
            self._bar, self._amount = bar(done, total), steps or amount(done, total)

    def say(self, text: str, indent: int = 0) -> None:
        """Print permanent lines; the phase continues below them. `indent`: of what has no room in its line."""
        with self._lock:
            self._clear()
            for line in visible(text).split("\n"):
                self._stream.write("\n".join(fitted(self._stream, line, indent)) + "\n")
            self._show(changed=False)
            self._stream.flush()

    def end(self) -> None:
        """Remove the line."""
        self._ended.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()
        with self._lock:
            self._text = ""
            self._clear()
            self._stream.flush()

    def _tick(self) -> None:
        while not self._ended.wait(REDRAW_INTERVAL_S):
            if time.monotonic() - self._looked >= EXPLAIN_INTERVAL_S:
                self._looked, self._reason = time.monotonic(), visible(self._why())
            with self._lock:
                self._show(changed=False)

    def _show(self, *, changed: bool) -> None:
        if self._quiet or self._ended.is_set():
            return
        if self._live:
            self._clear()
            if self._text:
                self._draw(self._fitted())
            return
        now, due = time.monotonic(), max(self._since + self._delay_s, self._printed + REPEAT_INTERVAL_S)
        if self._text and (now >= due or (changed and not self._delay_s)):
            self._stream.write((self._text if changed else self._line()) + "\n")
            self._stream.flush()
            self._printed = now

    def _line(self) -> str:
        measured = " ".join(filter(None, (self._bar, self._amount)))
        return "  ".join(filter(None, (self._said(), measured, self._clock())))

    def _said(self) -> str:
        return f"{self._text} ({self._reason})" if self._reason else self._text

    def _clock(self) -> str:
        spent = time.monotonic() - self._since
        rest = remaining_s(spent, self._first_share, self._share)
        return f"{spent:.1f} s" + ("" if rest is None else f", about {short(rest)} left")

    def _fitted(self) -> str:
        """The line for a terminal: without the bar if it is too long, then with less of the phase's text. One column
        stays free, because some terminals wrap a full line."""
        room = terminal_width(self._stream) - 1
        whole = "  " + shorten_ids(self._line())
        if cells(whole) <= room:
            return whole
        figures = "".join(f"  {each}" for each in (self._amount, self._clock()) if each)
        text = cut("  " + shorten_ids(self._said()), max(0, room - cells(figures)))
        return cut((text + figures).removeprefix("  "), room)

    def _draw(self, line: str) -> None:
        self._stream.write(line)
        self._stream.flush()
        self._width = cells(line)

    def _clear(self) -> None:
        if self._width:  # blanks instead of an escape sequence, which also works with styles off
            self._stream.write("\r" + " " * min(self._width, terminal_width(self._stream) - 1) + "\r")
            self._width = 0


def remaining_s(spent_s: float, first_share: float, share: float) -> float | None:
    """Seconds until a phase ends, by the pace of what was done since it began; None while that says too little.

    Args:
        first_share: what was done when it began, of 1: a download may go on where another one was cut.
    """
    if spent_s < MIN_MEASURED_S or share <= first_share or share >= 1.0:
        return None
    return spent_s * (1.0 - share) / (share - first_share)


def short(seconds: float) -> str:
    """A time in one unit, or in two."""
    whole = max(1, round(seconds))
    if whole < 100:
        return f"{whole} s"
    return f"{round(whole / 60)} min" if whole < 6000 else f"{whole // 3600} h {whole % 3600 // 60} min"


def amount(done: int, total: int) -> str:
    """Megabytes, of how many if the total is known; totals up to MAX_STEPS are steps, not bytes."""
    if total <= 0:
        return f"{done / 1e6:.1f} MB"
    return f"{done}/{total}" if total < MAX_STEPS else f"{done / 1e6:.1f}/{total / 1e6:.1f} MB"


def bar(done: int, total: int) -> str:
    """A progress bar; "" if the total is unknown."""
    if total <= 0:
        return ""
    filled = min(BAR_WIDTH, BAR_WIDTH * done // total)
    return f"[{'#' * filled}{'.' * (BAR_WIDTH - filled)}]"
