"""Terminal output of the CLI: tables or JSON on stdout, notes and errors on stderr, with optional colour.

No information is in colour alone, and with colour off no escape sequences are written.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TextIO

from cli.errors import Problem
from cli.visible import visible


def styled(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """Whether to write styles: never to a dumb terminal; else by NO_COLOR or FORCE_COLOR; else only to a terminal."""
    if environ.get("TERM") == "dumb" or environ.get("NO_COLOR"):
        return False
    return bool(environ.get("FORCE_COLOR")) or stream.isatty()


def emit(text: str) -> None:
    """Write untrusted text to stdout, with control characters escaped."""
    sys.stdout.write(visible(text))


def print_json(value: Any) -> None:
    """Print one object as one line."""
    emit(json.dumps(value, ensure_ascii=False) + "\n")


def print_rows(rows: Iterable[Mapping[str, Any]], columns: Sequence[str], *, as_json: bool) -> None:
    """Print a list: as one JSON object per line, or as a table of `columns`."""
    if as_json:
        for row in rows:
            print_json(row)
    else:
        print_table([name.upper().replace("_", " ") for name in columns], [_cells(row, columns) for row in rows])


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; plain text unless the terminal takes styles."""
    header, *rows = [[visible(cell) for cell in row] for row in (header, *rows)]
    if styled(sys.stdout, os.environ):
        _rich_table(header, rows)
        return
    widths = [max(len(cell) for cell in column) for column in zip(header, *rows, strict=True)]
    for row in (header, *rows):
        sys.stdout.write("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() + "\n")


def note(text: str) -> None:
    """Print a message to stderr."""
    _write_note(visible(text))


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
        note(json.dumps({"error": fields}, ensure_ascii=False))
        return
    _write_note("\n".join(error_block(problem, red=styled(sys.stderr, os.environ))))


def error_block(problem: Problem, *, red: bool = False) -> list[str]:
    """The lines `error:`, `cause:` and `next:`, without the empty ones."""
    label = "\x1b[31merror:\x1b[0m" if red else "error:"
    lines = [f"{label} {_one_line(problem.message)}"]
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


def _rich_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console  # noqa: PLC0415 - 20 ms that a pipe need not pay
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in header:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    Console(file=sys.stdout, force_terminal=True).print(table)
