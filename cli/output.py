"""Terminal output of the CLI: tables or JSON on stdout; notes, errors and a progress line on stderr; optional colour.

No information is in colour alone, and with colour off no escape sequences are written. Untrusted text (a model's
answer, a job's metadata, a process's name, a server's error) may contain sequences that move the cursor, write to the
clipboard, reverse the reading direction, or hide text. A terminal must show the text that is there, so control
characters in it are written as JSON escapes.

Also Problem, the error that ends a command with an exit code."""

from __future__ import annotations

import contextlib
import enum
import itertools
import json
import math
import os
import re
import shutil
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

if TYPE_CHECKING:
    from rich.console import Console

TEXTS = ("reason", "message", "last_error", "override", "by", "value", "what_it_is", "next_attempt_at", "url", "prompt")
"""Columns of free text, which wrap at words; if there is no room for them, they stand below their row."""
NAMES = ("model", "shape", "endpoint", "type", "host", "tenant", "custom_id", "worker", "lane")
"""Columns that are cut, but not below their header, if the table is too wide. No other column is ever cut or broken."""
STATES = ("status", "state")
COLOURS = {
    **dict.fromkeys(("completed", "ready", "delivered"), 32),
    **dict.fromkeys(("failed", "expired", "incomplete", "gave_up"), 31),
    **dict.fromkeys(("starting", "restarting", "draining", "cancelling", "paused", "pending"), 33),
    "cancelled": 90,
    **dict.fromkeys(("in_progress", "validating", "finalizing", "queued"), 36),
}
"""ANSI colour of each state; other words have none."""
GAP, BELOW = "  ", 4
"""Between two columns, and blanks before the second line of what stands below a row."""
MIN_NAME = 5
MIN_TEXT = 30
ID = re.compile(r"\b((?:job_|batch_|msg_|file-)[0-9a-f]{8})[0-9a-f]{24}\b")
JOINED = "\x00"
"""Stands for a blank at which a line must not end. No text that is shown contains it."""
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")
UNITS = ((86_400, "d"), (3_600, "h"), (60, "m"), (1, "s"))


def print_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table. On a terminal it has at most its width, short ids and relative times, and columns without room
    stand below their row; elsewhere every cell stays as it is. Colour is a matter of its own."""
    titles, *cells_of = [[visible(cell) for cell in row] for row in (header, *rows)]
    names = [title.lower().replace(" ", "_") for title in titles]
    width = terminal_width(sys.stdout) if sys.stdout.isatty() else math.inf
    if width < math.inf:
        now = time.time()
        titles = ["WHEN" if title == "AT" else title.removesuffix(" AT") for title in titles]
        cells_of = [[_shown(name, cell, now) for name, cell in zip(names, row, strict=True)] for row in cells_of]
    widths = [
        max(cells(line) for cell in column for line in cell.split("\n"))
        for column in zip(titles, *cells_of, strict=True)
    ]
    places = _fit(names, titles, widths, width)
    below = [place for place in range(len(names)) if place not in places]
    colour = styled(sys.stdout, os.environ)

    def row_lines(row: Sequence[str], *, painted: bool) -> Iterator[str]:
        """One row; its cells may have several lines."""
        columns = [_cell_lines(names[place], row[place], widths[place]) for place in places]
        for parts in itertools.zip_longest(*columns, fillvalue=""):
            line = ""
            for place, text in zip(places, parts, strict=True):
                line += _painted(names[place], text, row[0]) if painted else text
                line += " " * (widths[place] - cells(text)) + GAP
            yield line.rstrip()

    lines = [f"\x1b[1m{line}\x1b[0m" if colour else line for line in row_lines(titles, painted=False)]
    for row in cells_of:
        lines += row_lines(row, painted=colour)
        said = {place: f"{titles[place].lower()}: {row[place]}" for place in below if row[place] != "-"}
        figures = GAP.join(text for place, text in said.items() if names[place] not in TEXTS)
        for text in filter(None, (figures, *(said[place] for place in said if names[place] in TEXTS))):
            lines += wrapped(GAP + " ".join(text.split("\n")), int(width), BELOW, whole_words=False)
    sys.stdout.write("".join(f"{line}\n" for line in lines))


def shorten_ids(text: str) -> str:
    """A line with every id in it as short as commands take it, nearly always; they say so where several begin alike."""
    return ID.sub(r"\1", text)


def _ago(seconds: float) -> str:
    """A duration in its largest unit, as time past; as time to come if it is negative."""
    whole = round(abs(seconds))
    size, unit = next(((size, unit) for size, unit in UNITS if whole >= size), (1, "s"))
    return f"in {whole // size}{unit}" if seconds <= -1 else f"{whole // size}{unit} ago"


def _size(count: int) -> str:
    """A number of bytes with three digits at most: 999, 1.5k, 268M."""
    amount, unit = float(count), ""
    for following in "kMGTP":
        if amount < 999.5:
            break
        amount, unit = amount / 1000, following
    return f"{amount:.1f}{unit}" if unit and amount < 9.95 else f"{amount:.0f}{unit}"


def cells(text: str) -> int:
    """Columns of a terminal that a line takes."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len  # noqa: PLC0415 - rich takes 50 ms, and most lines are ASCII

    return cell_len(text)


def cut(text: str, width: int) -> str:
    """The line, ended by an ellipsis if it is too wide."""
    if cells(text) <= width:
        return text
    kept = text[: max(0, width - 1)]
    while cells(kept) > width - 1 > 0:
        kept = kept[:-1]
    return f"{kept}…" if width > 0 else ""


def _fit(names: Sequence[str], titles: Sequence[str], widths: list[int], width: float) -> list[int]:
    """Narrow the columns in place. Returns the places of those with room, which are all, or not those of free text; if
    even that is too wide, the last ones have none."""
    places = list(range(len(names)))

    def excess() -> float:
        return sum(widths[place] for place in places) + len(GAP) * (len(places) - 1) - width

    if excess() <= 0:
        return places
    room = widths[-1] - excess()
    if [name for name in names if name in TEXTS] == [names[-1]] and room >= MIN_TEXT:
        widths[-1] = int(room)
    else:
        places = [place for place in places if names[place] not in TEXTS]
    least = {place: max(MIN_NAME, len(titles[place])) for place in places if names[place] in NAMES}
    while excess() > 0 and (wide := [place for place in least if widths[place] > least[place]]):
        widths[max(wide, key=widths.__getitem__)] -= 1
    while excess() > 0 and len(places) > 1:
        places.pop()
    return places


def _painted(name: str, text: str, first: str) -> str:
    """A cell of the column `name`, in the colour of its state if it is one; `first` is the first cell of its row."""
    is_state = name in STATES or (name == "value" and first in STATES)
    paint = COLOURS.get(text.partition(" (")[0], 0) if is_state else 0
    return f"\x1b[{paint}m{text}\x1b[0m" if paint else text


def _cell_lines(name: str, cell: str, width: int) -> list[str]:
    lines = cell.split("\n")
    if name in NAMES or name == "prompt":
        return [cut(line, width) for line in lines]
    return [part for line in lines for part in wrapped(line, width, whole_words=False)] if name in TEXTS else lines


def _shown(name: str, cell: str, now: float) -> str:
    if TIME.fullmatch(cell) and name != "value":
        return _ago(now - datetime.fromisoformat(cell).timestamp())
    if name.endswith("_bytes"):
        return "/".join(_size(int(part)) if part.isdecimal() else part for part in cell.split("/"))
    return (cell if name == "value" else shorten_ids(cell)).expandtabs()


COMMAND = re.compile(r"\S*penstock(?: [^\s,;]+)+")


def wrapped(text: str, width: int, indent: int = 0, *, whole_words: bool = True) -> list[str]:
    """The lines of one line of text, those after the first indented. A word or command without room stays whole: a
    terminal breaks it, but what is copied there has no line break. Not so in a column of a table."""
    if cells(text) <= width:
        return [text]
    glued = COMMAND.sub(lambda found: found[0].replace(" ", JOINED), text) if whole_words else text
    lines = textwrap.wrap(
        glued,
        width if cells(text) == len(text) else width // 2,
        subsequent_indent=" " * indent,
        break_long_words=not whole_words,
        break_on_hyphens=False,
        replace_whitespace=False,
    )
    return [line.replace(JOINED, " ") for line in lines] or [""]


class StreamWrapper:
    """Writes a streamed text to stdout. On a terminal it ends lines between words: it holds a word back until its end
    is there. The caller adds colours and escapes control characters."""

    def __init__(self) -> None:
        self.wraps = sys.stdout.isatty()
        self._held = ""
        """The blanks before a word, and the word as far as it is there."""
        self._column = 0

    def feed(self, text: str) -> None:
        """Take a piece, and write what is complete."""
        if not self.wraps:
            sys.stdout.write(text)
            return
        for char in text:
            if char == "\n":
                self.begin_line()
                sys.stdout.write("\n")
                continue
            if char.isspace() and self._held.strip():
                self.flush()
            self._held += char
            # A wide character may stand at the end of a line, and a word without room is broken by the terminal.
            if cells(char) > 1 or cells(self._held) >= terminal_width(sys.stdout):
                self.flush()

    def flush(self) -> None:
        """Write what was held back."""
        held, self._held, width = self._held, "", terminal_width(sys.stdout)
        word, size = held.lstrip(), cells(held.expandtabs())
        # Without a blank before it, it is the rest of a word that has no room in any line.
        may_break = word and (word != held or cells(word[0]) > 1)
        if may_break and self._column and self._column + size > width:
            held, size, self._column = f"\n{word}", cells(word), 0
        if held:
            sys.stdout.write(held)
            self._column = (self._column + size - 1) % width + 1

    def begin_line(self) -> None:
        """Write what was held back; the text goes on in a new line."""
        self.flush()
        self._column = 0


class Exit(enum.IntEnum):
    """Exit codes (`penstock help exit-codes`)."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    UNREACHABLE = 3
    FORBIDDEN = 4
    ENDED_BADLY = 5
    STILL_RUNNING = 6
    INTERRUPTED = 130


EXIT_CODES = {
    **dict.fromkeys(("usage", "settings", "plan", "another_run", "ambiguous_id", "not_confirmed"), Exit.USAGE),
    **dict.fromkeys(
        ("unreachable", "not_running", "address_required", "redis_unreachable", "no_logs"), Exit.UNREACHABLE
    ),
    **dict.fromkeys(("key_exposed", "key_unreadable"), Exit.FORBIDDEN),
    "wait_timeout": Exit.STILL_RUNNING,
}
"""By the code of an error; with any other one a command has failed."""


class Problem(Exception):
    """Raised to end a command with an error block: what happened, its cause, the next step, and a code, which tells the
    exit code unless that is given."""

    def __init__(
        self,
        message: str,
        *,
        cause: str = "",
        next_step: str = "",
        exit_code: int | None = None,
        code: str = "failed",
        request_id: str = "",
    ) -> None:
        super().__init__(message)
        self.message, self.cause, self.next_step = message, cause, next_step
        self.exit_code = EXIT_CODES.get(code, Exit.FAILED) if exit_code is None else exit_code
        self.code, self.request_id = code, request_id


@contextlib.contextmanager
def explaining(what: str, *, next_step: str = "", code: str = "failed") -> Iterator[None]:
    """An OSError within the block ends the command with this message, and the system's words as its cause."""
    try:
        yield
    except OSError as error:
        raise Problem(what, cause=error.strerror or str(error), next_step=next_step, code=code) from None


WIDTH = 80
"""Columns of a terminal that does not say how many it has."""
ERROR_INDENT = len("error: ")


def styled(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """Whether to write styles: never to a dumb terminal; else by NO_COLOR or FORCE_COLOR; else only to a terminal."""
    if environ.get("TERM") == "dumb" or environ.get("NO_COLOR"):
        return False
    return bool(environ.get("FORCE_COLOR")) or stream.isatty()


def terminal_width(stream: TextIO) -> int:
    """Columns of the terminal behind a stream; 80 if it has none or does not say."""
    with contextlib.suppress(OSError, ValueError):  # ValueError: io.UnsupportedOperation, of a stream without a file
        return os.get_terminal_size(stream.fileno()).columns or WIDTH
    return WIDTH


def rich_console(width: int | None = None) -> Console:
    """A console of rich for stdout. `width`: None for that of the terminal, which may change."""
    from rich.console import Console  # noqa: PLC0415 - 50 ms that few commands need

    colour = styled(sys.stdout, os.environ)
    height = None if width is None else shutil.get_terminal_size().lines  # rich ignores a width alone if TERM=dumb
    return Console(width=width, height=height, color_system="standard" if colour else None, no_color=not colour,
                   force_terminal=colour or None, highlight=False, emoji=False, markup=False)  # fmt: skip


def emit(text: str) -> None:
    """Write untrusted text without styles to stdout: control characters escaped, and on a terminal its lines wrapped
    between words."""
    wrapper = StreamWrapper()
    wrapper.feed(visible(text))
    wrapper.flush()


def print_json(value: Any) -> None:
    """Print one object as one line."""
    sys.stdout.write(visible(json.dumps(value, ensure_ascii=False)) + "\n")


OPTIONAL = ("shape", "tenant", "prompt")
"""Columns that are left out where no row has a value."""


def print_rows(rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> None:
    """Print a list as a table of `columns`."""
    rows = list(rows)
    columns = [name for name in columns if name not in OPTIONAL or any(row.get(name) for row in rows)]
    print_table([name.upper().replace("_", " ") for name in columns], [_cells(row, columns) for row in rows])


class CommandResult(NamedTuple):
    """What a command has found: `value` is printed with --json, one line for each item of an iterator or list."""

    value: Any
    show: Callable[[], None]
    """Prints it for people."""

    def print(self, *, as_json: bool) -> None:
        if not as_json:
            self.show()
        else:
            for each in self.value if isinstance(self.value, Iterator | list) else (self.value,):
                print_json(each)


def line_result(value: Mapping[str, Any], line: str) -> CommandResult:
    """One object, of which people see one line, with {its fields} filled in. Times are `timed`, as in all results."""
    return CommandResult(timed(value), lambda: emit(line.format_map(value) + "\n"))


def fields_result(value: Mapping[str, Any], fields: Mapping[str, Any] | None = None) -> CommandResult:
    """One object, of which people see these fields (default: all), without the empty ones and the name of its kind."""
    shown = timed(value if fields is None else fields)
    rows = [(name, _field(each)) for name, each in shown.items() if each not in (None, "", {}) and name != "object"]
    return CommandResult(timed(value), lambda: print_table(("FIELD", "VALUE"), rows))


def _field(value: Any) -> str:
    match value:
        case {"message": message, "code": code}:
            return f"{code}: {message}"
        case dict():
            return ", ".join(f"{name} {each}" for name, each in value.items() if not isinstance(each, dict))
        case _:
            return str(value)


def list_result(
    values: Iterable[Mapping[str, Any]], columns: Sequence[str], if_none: str, rows: Iterable[Mapping[str, Any]] = ()
) -> CommandResult:
    """A list, of which people see a table of `rows` (default: `values`), or the note `if_none`."""

    def show() -> None:
        if shown := list(map(timed, rows or values)):
            print_rows(shown, columns)
        else:
            note(if_none)

    return CommandResult(map(timed, values), show)


NESTED = ("attempt_log", "job", "override", "workers")
"""Fields of the API's objects that hold objects with times."""


def timed(found: Mapping[str, Any]) -> dict[str, Any]:
    """The object, and those in it, with Unix times as RFC 3339, the format of all JSON output."""
    return {name: _timed(name, value) for name, value in found.items()}


def _timed(name: str, value: Any) -> Any:
    is_time = name in ("at", "since", "until") or name.endswith(("_at", "_since"))
    match value:
        case int() | float() if is_time:
            return rfc3339(value)
        case dict() if name in NESTED:
            return timed(value)
        case list() if name in NESTED:
            return [_timed(name, each) for each in value]
        case _:
            return value


def note(text: str) -> None:
    """Print a message to stderr."""
    from cli.options import completed  # noqa: PLC0415 - click, which the supervisor does not need

    write_or_drop(sys.stderr, fitted(sys.stderr, visible(completed(text))) + "\n")


def fitted(stream: TextIO, text: str, indent: int = 0) -> str:
    """A text for people, its lines wrapped between words if the stream is a terminal."""
    if not stream.isatty():
        return text
    width = terminal_width(stream)
    return "\n".join(part for line in text.split("\n") for part in wrapped(line, width, indent))


def write_or_drop(stream: TextIO, text: str) -> None:
    """Write and flush. If that fails (the terminal is closed, the reader of a pipe has exited, the disk is full), drop
    the stream: what cannot be shown must not end what runs."""
    try:
        stream.write(text)
        stream.flush()
    except OSError:
        drop(stream)


def drop(stream: TextIO) -> None:
    """Redirect a stream to nowhere, with what it has buffered: the interpreter flushes that when it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def complain(problem: Problem, *, as_json: bool) -> None:
    """Print the error block to stderr: at most four lines of text, or one JSON object."""
    if as_json:
        fields = {"code": problem.code, "message": problem.message, "cause": problem.cause}
        fields |= {"next": problem.next_step, "request_id": problem.request_id}
        text = visible(json.dumps({"error": fields}, ensure_ascii=False))
    else:
        text = fitted(sys.stderr, "\n".join(error_block(problem)), ERROR_INDENT)
        if styled(sys.stderr, os.environ):
            text = text.replace("error:", "\x1b[31merror:\x1b[0m", 1)
    write_or_drop(sys.stderr, text + "\n")


def error_block(problem: Problem) -> list[str]:
    """The lines `error:`, `cause:` and `next:`, without the empty ones."""
    said = (("error: ", problem.message), ("cause: ", problem.cause), ("next:  ", problem.next_step))
    return [label + _one_line(text) for label, text in said if text or label == "error: "]


def rfc3339(seconds: float) -> str:
    """A Unix time as RFC 3339 in UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _one_line(text: str) -> str:
    return visible(" ".join(text.split()))


def _cells(row: Mapping[str, Any], columns: Sequence[str]) -> list[str]:
    return ["-" if row.get(name) in (None, "") else _one_line(str(row[name])) for name in columns]


_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u180e\u200b\u200e\u200f"
    "\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\U000110bd\U000110cd\U00013430-\U0001343f\U0001bca0-\U0001bca3"
    "\U0001d173-\U0001d17a\U000e0000-\U000e007f\ud800-\udfff]"
)
"""C0 control codes except tab and newline, C1 control codes, line and paragraph separators, invisible format characters
except the two joiners (U+200C, U+200D) that Persian, Indic scripts and emoji need, and surrogates, which cannot be
encoded."""


def visible(text: str) -> str:
    """Replace every character of _UNSAFE by \\uXXXX (two of them beyond U+FFFF, as in JSON). JSON keeps its meaning."""
    return _UNSAFE.sub(_escaped, text)


def _escaped(found: re.Match[str]) -> str:
    units = found[0].encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))


REDRAW_INTERVAL_S = 0.1
EXPLAIN_INTERVAL_S = 1.0
REPEAT_INTERVAL_S = 10.0
MAX_STEPS = 10_000
MIN_MEASURED_S = 2.0
"""Time that a phase must have lasted before its remaining time is shown."""


class ProgressLine:
    """A context manager that shows the current phase on stderr while it is entered: for how long it has gone on, and
    about how long it will take if that is known. Thread-safe.

    On a terminal the line is redrawn in place, and fits its width; elsewhere each phase is a plain line, repeated every
    ten seconds.
    """

    def __init__(
        self, stream: TextIO | None = None, environ: Mapping[str, str] = os.environ, *, quiet: bool = False
    ) -> None:
        self._stream, self._quiet = stream or sys.stderr, quiet
        self._live = self._stream.isatty() and environ.get("TERM") != "dumb"
        self._lock = threading.RLock()
        self._text, self._amount, self._since = "", "", 0.0
        self._share, self._first_share = 0.0, 0.0
        """What is done, and what was done when the phase began, of 1: a download may go on where another was cut."""
        self._width = 0
        self._why: Callable[[], str] = str
        self._reason, self._looked, self._printed = "", 0.0, 0.0
        self._ended = False  # an Event's inner lock stays held for ever if a signal handler raises within `set`

    def __enter__(self) -> ProgressLine:
        if not self._quiet:
            threading.Thread(target=self._tick, name="progress", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def phase(self, text: str) -> None:
        """Begin a new phase; the same text again changes nothing, "" is no phase."""
        text = visible(text)
        with self._lock:
            if text != self._text:
                self._text, self._amount, self._since = text, "", time.monotonic()
                self._share = self._first_share = 0.0
                self._show(changed=True)

    def explain(self, why: Callable[[], str]) -> None:
        """Show behind the phase what `why` returns, which is called every second, in the thread of the line."""
        self._why = why

    def amount(self, text: str, done: int, total: int, detail: str | None = None) -> None:
        """Show the progress of a phase: in steps if a `detail` follows or they are fewer than MAX_STEPS, else in bytes.
        `total`: 0 if it is not known."""
        with self._lock:
            begins = visible(text) != self._text
            self.phase(text)
            self._share = done / total if total > 0 else 0.0
            self._first_share = self._share if begins else self._first_share
            if detail is not None:
                self._amount = f"{done}/{total}  {visible(detail)}".rstrip()
            elif 0 < total < MAX_STEPS:
                self._amount = f"{done}/{total}"
            else:
                self._amount = f"{done / 1e6:.1f}{f'/{total / 1e6:.1f}' if total > 0 else ''} MB"

    def say(self, text: str, indent: int = 0) -> None:
        """Print permanent lines; the phase continues below them. `indent`: of what has no room in its line."""
        with self._lock:
            self._clear()
            write_or_drop(self._stream, fitted(self._stream, visible(text), indent) + "\n")
            self._show(changed=False)

    def end(self) -> None:
        """Remove the line."""
        with self._lock:
            self._ended, self._text = True, ""
            self._clear()

    def _tick(self) -> None:
        while not self._ended:
            time.sleep(REDRAW_INTERVAL_S)
            if time.monotonic() - self._looked >= EXPLAIN_INTERVAL_S:
                self._looked, self._reason = time.monotonic(), visible(self._why())
            with self._lock:
                self._show(changed=False)

    def _show(self, *, changed: bool) -> None:
        if self._quiet or self._ended:
            return
        if self._live:
            self._clear()
            if self._text:  # one column stays free, because some terminals wrap a full line
                room = terminal_width(self._stream) - 1
                whole = f"  {shorten_ids(self._line())}"
                line = whole if cells(whole) <= room else cut(f"  {shorten_ids(self._line(bar_width=0))}", room)
                write_or_drop(self._stream, line)
                self._width = cells(line)
        elif self._text and (changed or time.monotonic() >= self._printed + REPEAT_INTERVAL_S):
            write_or_drop(self._stream, (self._text if changed else self._line()) + "\n")
            self._printed = time.monotonic()

    def _line(self, bar_width: int = 24) -> str:
        """The phase and why nothing happens, how much is done, how long it has taken and will take at this pace."""
        bar = f"[{'#' * int(bar_width * min(1.0, self._share)):.<{bar_width}}]" if bar_width and self._share else ""
        spent = time.monotonic() - self._since
        clock, done = f"{spent:.1f} s", self._share - self._first_share
        if spent >= MIN_MEASURED_S and done > 0 and self._share < 1:
            clock += f", about {short(spent * (1 - self._share) / done)} left"
        text = f"{self._text} ({self._reason})" if self._reason else self._text
        return "  ".join(filter(None, (text, bar, self._amount, clock)))

    def _clear(self) -> None:
        if self._width:  # blanks instead of an escape sequence, which also works with styles off
            write_or_drop(self._stream, "\r" + " " * min(self._width, terminal_width(self._stream) - 1) + "\r")
            self._width = 0


def short(seconds: float) -> str:
    """A time in one unit, or in two."""
    whole = max(1, round(seconds))
    if whole < 100:
        return f"{whole} s"
    return f"{round(whole / 60)} min" if whole < 6000 else f"{whole // 3600} h {whole % 3600 // 60} min"


class Leaving(KeyboardInterrupt):
    """Raised by signals that end a process, so that a command first undoes what would outlast it: a chat ends its job,
    a live screen gives the terminal back."""


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Raise Leaving at the signals that end a process within the block, unless they are ignored (nohup)."""

    def leave(number: int, _frame: object) -> None:
        if number == signal.SIGHUP:  # a closed terminal may send two; the second must not end what the first began
            signal.signal(number, signal.SIG_IGN)
        raise Leaving

    taken = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) is signal.SIG_DFL]
    for each in taken:
        signal.signal(each, leave)
    try:
        yield
    finally:
        for each in taken:
            signal.signal(each, signal.SIG_DFL)
