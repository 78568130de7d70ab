"""`python -m bench.recording`: records two terminals while the only worker is killed in mid-stream, as an animated SVG.

The first terminal runs `penstock chat` with the default model, the second one `penstock ps` and `kill -9`. They show
what they received, when they received it. The line below them is computed from that, and from the stored job.
"""

from __future__ import annotations

import argparse
import math
import os
import pty
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

import msgspec

from bench.penstock import own_environ
from workers.engines.llamacpp.weights import WeightsError, fetch

COLUMNS = 80
MODEL = """[models.smollm2-135m-instruct]
engine = "llamacpp"
options.path = "{path}"
options.threads = {threads}
"""
QUESTION = "Tell me a story about a river."
MAX_TOKENS = 100
CHARACTERS_BEFORE_KILL = 150
"""Of the answer; more than a progress line has."""
PROMPT = b"$ "
KEY_INTERVAL_S = 0.04
LIMIT_S = 60.0
TIME_DIGITS = 1
"""Of the seconds in the picture: what comes within a tenth appears together."""
END_S = 3.0
"""How long the end is shown before the picture begins again."""
CONTROL = re.compile(rb"\x1b\[([0-9;?]*)([A-Za-z])")
MOVES = {"A": (-1, 0), "B": (1, 0), "C": (0, 1), "D": (0, -1)}
"""Rows and columns by which a control moves the cursor."""
CHARACTER_PX, LINE_PX, MARGIN_PX, TITLE_PX = 8.43, 19, 14, 30


class Glyph(NamedTuple):
    """What one cell of a screen shows, and from when on until when."""

    row: int
    column: int
    text: str
    since: float
    until: float | None = None


class TerminalScreen:
    """The cells of a terminal over time. It knows the few controls that a shell and `penstock` send."""

    def __init__(self) -> None:
        self.glyphs: list[Glyph] = []
        self._shown: dict[tuple[int, int], Glyph] = {}
        self._row = self._column = 0
        self._rest = b""

    @property
    def rows(self) -> int:
        return 1 + max((glyph.row for glyph in self.glyphs), default=0)

    def feed(self, data: bytes, now: float) -> None:
        """What the terminal received. Raises ValueError for a control that it does not know."""
        data = self._rest + data
        whole = len(data) - len(data[data.rfind(b"\x1b") :]) if _is_cut(data) else len(data)
        text, self._rest = data[:whole], data[whole:]
        at = 0
        for control in CONTROL.finditer(text):
            self._print(text[at : control.start()].decode(errors="replace"), now)
            self._obey(control[1].decode(), control[2].decode(), now)
            at = control.end()
        self._print(text[at:].decode(errors="replace"), now)

    def _obey(self, numbers: str, letter: str, now: float) -> None:
        if letter == "K" and numbers in ("", "0", "2"):
            for column in range(0 if numbers == "2" else self._column, COLUMNS):
                self._hide((self._row, column), now)
        elif letter in MOVES:
            rows, columns = MOVES[letter]
            steps = int(numbers or 1)
            self._row, self._column = self._row + rows * steps, max(0, self._column + columns * steps)
        elif letter not in ("m", "h", "l"):
            raise ValueError(f"unknown control {numbers}{letter}")

    def _print(self, text: str, now: float) -> None:
        for character in text:
            if character == "\r":
                self._column = 0
            elif character == "\n":
                self._row += 1
            elif character == "\b":
                self._column -= 1
            elif character.isprintable():
                if self._column == COLUMNS:
                    self._row, self._column = self._row + 1, 0
                self._hide((self._row, self._column), now)
                self._shown[self._row, self._column] = glyph = Glyph(self._row, self._column, character, now)
                self.glyphs.append(glyph)
                self._column += 1

    def _hide(self, place: tuple[int, int], now: float) -> None:
        if (glyph := self._shown.pop(place, None)) is not None:
            self.glyphs[self.glyphs.index(glyph)] = glyph._replace(until=now)

    def runs(self) -> Iterator[Glyph]:
        """The cells, those that stand side by side and were shown together as one text."""

        def times(glyph: Glyph) -> tuple[int, float, float]:
            return glyph.row, glyph.since, math.inf if glyph.until is None else glyph.until

        shown = [glyph for glyph in self.glyphs if glyph.since != glyph.until]
        by_place = sorted(shown, key=lambda glyph: (*times(glyph), glyph.column))
        for (row, since, until), glyphs in groupby(by_place, key=times):
            cells = list(glyphs)
            for _, together in groupby(enumerate(cells), key=lambda pair: pair[1].column - pair[0]):
                side_by_side = [glyph for _, glyph in together]
                text = "".join(glyph.text for glyph in side_by_side)
                if text.strip():
                    yield Glyph(row, side_by_side[0].column, text, since, None if until == math.inf else until)


def _is_cut(data: bytes) -> bool:
    """Whether the data ends within a control sequence."""
    last = data.rfind(b"\x1b")
    return last >= 0 and not CONTROL.match(data, last)


class RecordedTerminal:
    """A shell on a pseudo-terminal, and the screen of what it sent."""

    def __init__(self, title: str, folder: Path, environ: dict[str, str], began: float) -> None:
        self.title, self.screen, self.received = title, TerminalScreen(), b""
        self.arrivals: list[float] = []
        """When something came."""
        self._began = began
        self._pid, self.handle = pty.fork()
        if self._pid == 0:
            os.chdir(folder)
            os.execvpe("bash", ["bash", "--norc", "--noprofile"], environ)  # noqa: S606, S607 - a shell is what is recorded

    def read(self) -> None:
        """Take what has come."""
        try:
            data = os.read(self.handle, 65536)
        except OSError:  # the shell has ended
            return
        now = time.monotonic() - self._began
        self.received += data
        self.arrivals.append(now)
        self.screen.feed(data, round(now, TIME_DIGITS))

    def end(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self.handle)


class TerminalRecorder:
    """Both terminals and their clock."""

    def __init__(self, folder: Path, environ: dict[str, str]) -> None:
        self._began = time.monotonic()
        titles = ("terminal 1: the reader", "terminal 2: the same machine")
        self.terminals = [RecordedTerminal(title, folder, environ, self._began) for title in titles]
        for terminal in self.terminals:
            self.until(lambda terminal=terminal: terminal.received.endswith(PROMPT))  # type: ignore[misc]

    @property
    def now(self) -> float:
        return time.monotonic() - self._began

    def wait(self, seconds: float) -> None:
        """Take what comes for so long."""
        deadline = self.now + seconds
        while (left := deadline - self.now) > 0:
            ready, _, _ = select.select([terminal.handle for terminal in self.terminals], [], [], left)
            for terminal in self.terminals:
                if terminal.handle in ready:
                    terminal.read()

    def until(self, condition: Callable[[], bool]) -> None:
        """Raises TimeoutError."""
        deadline = self.now + LIMIT_S
        while not condition():
            if self.now > deadline:
                raise TimeoutError(f"this did not happen in {LIMIT_S:g} s: {[t.received for t in self.terminals]}")
            self.wait(0.02)

    def type(self, terminal: RecordedTerminal, command: str) -> None:
        """Type a command as a person does, and press Enter."""
        for key in command + "\r":
            os.write(terminal.handle, key.encode())
            self.wait(KEY_INTERVAL_S)

    def run(self, terminal: RecordedTerminal, command: str) -> None:
        """Type a command and wait for its end."""
        before = len(terminal.received)
        self.type(terminal, command)
        self.until(lambda: terminal.received[before:].count(b"\n") > 0 and terminal.received.endswith(b"\n" + PROMPT))


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0))


def record(weights: Path) -> tuple[TerminalRecorder, float]:
    """The recording, and the longest silence of the reader after the kill, in seconds."""
    with tempfile.TemporaryDirectory(prefix="penstock-recording-") as name:
        folder = Path(name)
        (folder / "penstock.toml").write_text(MODEL.format(path=weights.absolute(), threads=max(1, cores() - 1)))
        (folder / "inputrc").write_text("set enable-bracketed-paste off\n")
        scripts = Path(sys.executable).parent
        environ = own_environ() | {
            "PATH": f"{scripts}:{os.environ['PATH']}",
            "PYTHONPATH": str(Path.cwd()),
            "PS1": PROMPT.decode(),
            "TERM": "vt100",
            "NO_COLOR": "1",
            "COLUMNS": str(COLUMNS),
            "INPUTRC": str(folder / "inputrc"),
            "BASH_SILENCE_DEPRECATION_WARNING": "1",
        }
        penstock = (str(scripts / "penstock"),)
        subprocess.run([*penstock, "up", "--detach", "--port", "0"], cwd=folder, env=environ, check=True)
        recorder = None
        try:
            recorder = TerminalRecorder(folder, environ)
            killed = _play(recorder, _worker(penstock, folder, environ))
            _check(recorder.terminals[0], lambda *words: _found(penstock, words, folder, environ))
        finally:
            for terminal in recorder.terminals if recorder else ():
                terminal.end()
            subprocess.run([*penstock, "down", "--now"], cwd=folder, env=environ, check=True)
    times = [killed, *(at for at in recorder.terminals[0].arrivals if at > killed)]
    return recorder, max(later - sooner for sooner, later in pairwise(times))


def _found(penstock: Sequence[str], words: Sequence[str], folder: Path, environ: dict[str, str]) -> list[Any]:
    """What a command prints with --json: one object a line."""
    command = [*penstock, *words, "--json"]
    done = subprocess.run(command, cwd=folder, env=environ, check=True, capture_output=True)
    return [msgspec.json.decode(line) for line in done.stdout.splitlines()]


def _worker(penstock: Sequence[str], folder: Path, environ: dict[str, str]) -> int:
    """The process id of the only worker."""
    (worker,) = (each["pid"] for each in _found(penstock, ("ps",), folder, environ) if each["role"] == "worker")
    return int(worker)


def _check(reader: RecordedTerminal, ask: Callable[..., list[Any]]) -> None:
    """The reader has the stored text, which more than one worker wrote. Raises ValueError."""
    (listed,) = ask("jobs", "ls")
    (job,) = ask("jobs", "show", listed["id"])
    stored = job["result"]["choices"][0]["message"]["content"].replace("\n", "\r\n")
    if job["attempts"] < 2 or stored.encode() not in reader.received:
        raise ValueError(f"the reader's text is not that of the job, or no second worker wrote it: {reader.received!r}")


def _play(recorder: TerminalRecorder, worker: int) -> float:
    """What is typed. Returns when the worker was killed."""
    reader, other = recorder.terminals
    recorder.run(other, "penstock ps")
    for key in f"kill -9 {worker}":
        os.write(other.handle, key.encode())
    question = f"penstock chat --max-tokens {MAX_TOKENS} {shlex.quote(QUESTION)}"
    recorder.type(reader, question)
    begun = len(reader.received)

    def answered() -> int:
        """Characters of the answer: what came since the progress line was last drawn."""
        return len(reader.received[begun:].replace(b"\r\n", b"").rpartition(b"\r")[2])

    recorder.until(lambda: answered() > CHARACTERS_BEFORE_KILL)
    os.write(other.handle, b"\r")
    killed = recorder.now
    recorder.until(lambda: reader.received.endswith(b"\n" + PROMPT))
    recorder.wait(0.5)
    return killed


# --- the picture ----------------------------------------------------------------------------------------------------


def as_svg(terminals: Sequence[RecordedTerminal], note: str, seconds: float) -> str:
    """The terminals one below the other; each text appears, and disappears, when it did. It plays again and again; a
    viewer who asks for less motion sees the end."""
    width = round(COLUMNS * CHARACTER_PX + 2 * MARGIN_PX)
    styles: dict[str, str] = {}
    body: list[str] = []
    top = 0
    for terminal in terminals:
        height = TITLE_PX + terminal.screen.rows * LINE_PX + MARGIN_PX
        body.append(f'<rect y="{top}" width="{width}" height="{height}" class="pane"/>')
        body.append(f'<text x="{MARGIN_PX}" y="{top + 20}" class="title">{escape(terminal.title)}</text>')
        body += [_text(run, top + TITLE_PX, styles, seconds) for run in terminal.screen.runs()]
        top += height + 6
    body.append(f'<rect y="{top}" width="{width}" height="{TITLE_PX}" class="pane"/>')
    body.append(f'<text x="{MARGIN_PX}" y="{top + 20}" class="note">{escape(note)}</text>')
    height = top + TITLE_PX
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{escape(note)}">\n<style>text{{font:14px ui-monospace,Menlo,Consolas,monospace;'
        "fill:#e6edf3;white-space:pre}.pane{fill:#0d1117}.title,.note{font:12px system-ui,sans-serif;fill:#8b949e}"
        f".gone{{opacity:0}}\n@media (prefers-reduced-motion:no-preference){{{''.join(styles.values())}}}</style>\n"
        + "\n".join(body)
        + "\n</svg>\n"
    )


def _text(run: Glyph, top: int, styles: dict[str, str], seconds: float) -> str:
    """One text. `styles` gains the animation of its times."""
    since, until = (min(100 * (each or 0) / seconds, 100) for each in (run.since, run.until))
    name = f"a{run.since * 1000:.0f}" + ("" if run.until is None else f"-{run.until * 1000:.0f}")
    frames = f"0%{{opacity:0}}{since:.2f}%{{opacity:1}}" + ("" if run.until is None else f"{until:.2f}%{{opacity:0}}")
    styles[name] = f".{name}{{animation:{name} {seconds:.1f}s step-end infinite}}@keyframes {name}{{{frames}}}"
    kind = name if run.until is None else f"gone {name}"
    x, y = MARGIN_PX + run.column * CHARACTER_PX, top + run.row * LINE_PX + 14
    wide = f' textLength="{len(run.text) * CHARACTER_PX:.1f}"' if len(run.text) > 1 else ""
    return f'<text x="{x:.1f}" y="{y}" class="{kind}"{wide}>{escape(run.text)}</text>'


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.recording", description=__doc__)
    parser.add_argument("--weights", type=Path, default=Path(".penstock/weights"), help="folder of the default model")
    parser.add_argument("--out", type=Path, default=Path("docs/kill.svg"))
    args = parser.parse_args(argv)
    if shutil.which("bash") is None:
        sys.stderr.write("error: this records bash, and there is none\n")
        return 1
    try:
        weights = fetch(args.weights, lambda *_: None)
    except WeightsError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    recorder, silence = record(weights)
    conditions = f"{datetime.now(UTC).date()}, default model, {cores()} cores"
    note = f"{conditions}: {silence:.1f} s of silence, and then the reader has exactly the stored text."
    args.out.write_text(as_svg(recorder.terminals, note, recorder.now + END_S), encoding="utf-8")
    sys.stdout.write(f"{args.out}: {args.out.stat().st_size / 1024:.0f} KiB. {note}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
