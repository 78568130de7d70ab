"""Terminal output of the CLI: tables or JSON on stdout, notes and errors on stderr, with optional colour.

No information is in colour alone, and with colour off no escape sequences are written. Untrusted text (a model's
answer, a job's metadata, a process's name, a server's error) may contain sequences that move the cursor, write to the
clipboard, reverse the reading direction, or hide text. A terminal must show the text that is there, so control
characters in it are written as JSON escapes.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple, TextIO

from cli.errors import Problem
from cli.stream_wrapping import StreamWrapper
from cli.tables import plain_lines, table_lines
from cli.wrapping import wrapped

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


def emit(text: str) -> None:
    """Write untrusted text without styles to stdout: control characters escaped, and on a terminal its lines wrapped
    between words."""
    text = visible(text)
    if sys.stdout.isatty():
        wrapper = StreamWrapper(sys.stdout.write, lambda: terminal_width(sys.stdout))
        wrapper.feed(text)
        wrapper.flush()
    else:
        sys.stdout.write(text)


def print_json(value: Any) -> None:
    """Print one object as one line."""
    sys.stdout.write(visible(json.dumps(value, ensure_ascii=False)) + "\n")


def print_rows(rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> None:
    """Print a list as a table of `columns`."""
    print_table([name.upper().replace("_", " ") for name in columns], [_cells(row, columns) for row in rows])


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table: for people on a terminal, plain elsewhere, whatever is said of colour."""
    header, *rows = [[visible(cell) for cell in row] for row in (header, *rows)]
    colour = styled(sys.stdout, os.environ)
    if sys.stdout.isatty():
        lines = table_lines(header, rows, width=terminal_width(sys.stdout), colour=colour, now=time.time())
    else:
        lines = plain_lines(header, rows, colour=colour)
    sys.stdout.write("".join(f"{line}\n" for line in lines))


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
    """One object, of which people see one line."""
    return CommandResult(value, lambda: emit(line + "\n"))


def fields_result(value: Mapping[str, Any], pairs: Iterable[tuple[str, Any]]) -> CommandResult:
    """One object, of which people see these fields, without the empty ones and the name of its kind."""
    rows = ((name, str(field)) for name, field in pairs if field not in (None, "") and name != "object")
    return CommandResult(value, lambda: print_table(("FIELD", "VALUE"), list(rows)))


def list_result(
    values: Iterable[Mapping[str, Any]], columns: Sequence[str], if_none: str, rows: Iterable[Mapping[str, Any]] = ()
) -> CommandResult:
    """A list, of which people see a table of `rows` (default: `values`), or the note `if_none`."""

    def show() -> None:
        if shown := list(rows or values):
            print_rows(shown, columns)
        else:
            note(if_none)

    return CommandResult(iter(values), show)


def timed(found: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """The object with these Unix times as RFC 3339, the format of all JSON output."""
    return {**found, **{name: rfc3339(found[name]) for name in names if found.get(name) is not None}}


def note(text: str) -> None:
    """Print a message to stderr."""
    _write_note("\n".join(part for line in visible(text).split("\n") for part in fitted(sys.stderr, line)))


def fitted(stream: TextIO, line: str, indent: int = 0) -> list[str]:
    """A line for people, wrapped between words if the stream is a terminal."""
    return wrapped(line, terminal_width(stream), indent) if stream.isatty() else [line]


def _write_note(text: str) -> None:
    """Write trusted text, which may contain styles."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def complain(problem: Problem, *, as_json: bool) -> None:
    """Print the error block to stderr: at most four lines of text, or one JSON object."""
    if as_json:
        fields = {
            "code": problem.code,
            "message": problem.message,
            "cause": problem.cause,
            "next": problem.next_step,
            "request_id": problem.request_id,
        }
        _write_note(visible(json.dumps({"error": fields}, ensure_ascii=False)))
        return
    lines = [part for line in error_block(problem) for part in fitted(sys.stderr, line, ERROR_INDENT)]
    if styled(sys.stderr, os.environ):
        lines[0] = lines[0].replace("error:", "\x1b[31merror:\x1b[0m", 1)
    _write_note("\n".join(lines))


def error_block(problem: Problem) -> list[str]:
    """The lines `error:`, `cause:` and `next:`, without the empty ones."""
    lines = [f"error: {_one_line(problem.message)}"]
    if problem.cause:
        lines.append(f"cause: {_one_line(problem.cause)}")
    if problem.next_step:
        lines.append(f"next:  {_one_line(problem.next_step)}")
    return lines


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
    """Replace every such character by \\uXXXX (two of them beyond U+FFFF, as in JSON). JSON keeps its meaning."""
    return _UNSAFE.sub(_escaped, text)


def _escaped(found: re.Match[str]) -> str:
    units = found[0].encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))


class VisibleBytes:
    """Incremental `visible` for UTF-8 chunks, which may split a character."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, data: bytes) -> bytes:
        """Return the bytes that may be written now."""
        return visible(self._decoder.decode(data)).encode()
