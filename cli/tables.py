"""Tables for a terminal: short ids, times relative to now, states in colour, and no line wider than the terminal.

A pipe gets none of this: whole ids, RFC 3339 times and plain columns (cli/output.py).
"""

from __future__ import annotations

import re
import textwrap
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime

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
GAP = "  "
MIN_NAME = 5
MIN_TEXT = 30
MIN_DIGITS = 8
"""Shortest id that is shown, in hexadecimal digits after its prefix."""
ID = re.compile(r"(job_|batch_|msg_|file-)([0-9a-f]{32})")
JOINED = "\x00"
"""Stands for a blank at which a line must not end. No text that is shown contains it."""
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")
UNITS = ((86_400, "d"), (3_600, "h"), (60, "m"), (1, "s"))


def table_lines(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, width: int, colour: bool, now: float
) -> list[str]:
    """The lines of a table that is at most `width` columns wide. Columns without room stand below their row.

    Args:
        now: Unix time that times are relative to.
    """
    names = column_names(header)
    short = shortener(cell for row in rows for cell in row)
    titles = [_title(name, title) for name, title in zip(names, header, strict=True)]
    body = [[_shown(name, cell, short, now) for name, cell in zip(names, row, strict=True)] for row in rows]
    widths = [max(map(_width, column)) for column in zip(titles, *body, strict=True)]
    if "endpoint" in names and names[-1] == "prompt" and _room(widths, width) < min(MIN_TEXT, widths[-1]):
        place = names.index("endpoint")  # says less than the prompt
        cut_out = [[*row[:place], *row[place + 1 :]] for row in (header, *rows)]
        return table_lines(cut_out[0], cut_out[1:], width=width, colour=colour, now=now)
    below = _fit(names, titles, widths, width)
    spilled = _spill(widths, below, width)
    apart = [*below, *spilled]
    lines = _row_lines(titles, names, widths, apart, "\x1b[1m" if colour else "")
    for row in body:
        lines += _row_lines(row, names, widths, apart, "", colour=colour)
        if spilled:
            figures = "  ".join(f"{titles[place].lower()}: {row[place]}".replace(" ", JOINED) for place in spilled)
            wrapped = textwrap.wrap(figures, width, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
            lines += [line.replace(JOINED, " ") for line in wrapped]
        for place in below:
            if row[place] != "-":
                indent = f"  {titles[place].lower()}: "
                if names[place] == "prompt":
                    lines.append(cut(f"{indent}{row[place]}", width))
                else:
                    lines += textwrap.wrap(row[place], width, initial_indent=indent, subsequent_indent="    ")
    return lines


def plain_lines(header: Sequence[str], rows: Sequence[Sequence[str]], *, colour: bool) -> list[str]:
    """The lines of a table for a pipe: every cell as it is."""
    names = column_names(header)
    widths = [max(len(cell) for cell in column) for column in zip(header, *rows, strict=True)]
    lines = []
    for row in (header, *rows):
        line = ""
        for name, cell, width in zip(names, row, widths, strict=True):
            line += (painted(name, cell, row[0]) if colour else cell) + " " * (width - len(cell)) + GAP
        lines.append(line.rstrip())
    return [f"\x1b[1m{lines[0]}\x1b[0m", *lines[1:]] if colour else lines


def column_names(header: Sequence[str]) -> list[str]:
    """The columns' names, as `print_rows` makes titles of them."""
    return [title.lower().replace(" ", "_") for title in header]


def shortener(texts: Iterable[str]) -> Callable[[str], str]:
    """A function that shortens an id, to as many digits as tell all ids among `texts` apart."""
    found = {match[0] for text in texts if (match := ID.fullmatch(text))}
    digits = MIN_DIGITS
    while len({_cut_id(each, digits) for each in found}) < len(found):
        digits += 1
    return lambda text: _cut_id(text, digits)


def shorten_ids(text: str) -> str:
    """A line with every id in it shortened."""
    return ID.sub(lambda match: _cut_id(match[0], MIN_DIGITS), text)


def ago(seconds: float) -> str:
    """A duration in its largest unit, as time past; as time to come if it is negative."""
    whole = round(abs(seconds))
    size, unit = next(((size, unit) for size, unit in UNITS if whole >= size), (1, "s"))
    words = f"{whole // size}{unit}"
    return f"in {words}" if seconds <= -1 else f"{words} ago"


def size(count: int) -> str:
    """A number of bytes with three digits at most: 999, 1.5k, 268M."""
    amount, units = float(count), iter("kMGTP")
    unit = ""
    while amount >= 999.5 and (following := next(units, "")):
        amount, unit = amount / 1000, following
    return f"{amount:.1f}{unit}" if unit and amount < 9.95 else f"{amount:.0f}{unit}"


def cells(text: str) -> int:
    """Columns of a terminal that a line takes."""
    if text.isascii():
        return len(text)
    return sum(_CELLS.get(unicodedata.east_asian_width(char), 1) for char in text if not unicodedata.combining(char))


_CELLS = {"W": 2, "F": 2}


def cut(text: str, width: int) -> str:
    """The line, ended by an ellipsis if it is too wide."""
    if cells(text) <= width:
        return text
    if width < 1:
        return ""
    kept = text[: width - 1]
    while cells(kept) > width - 1:
        kept = kept[:-1]
    return f"{kept}…"


def _fit(names: Sequence[str], titles: Sequence[str], widths: list[int], width: int) -> list[int]:
    """Narrow the columns in place. Returns the places of columns that stand below their row."""
    if _total(widths) <= width:
        return []
    texts = [place for place, name in enumerate(names) if name in TEXTS]
    below: list[int] = []
    room = _room(widths, width)
    if texts == [len(names) - 1] and room >= MIN_TEXT:
        widths[-1] = room
    else:
        below = texts
        for place in below:
            widths[place] = -len(GAP)  # takes no room, nor does the gap before it
    least = {place: max(MIN_NAME, len(titles[place])) for place, name in enumerate(names) if name in NAMES}
    while _total(widths) > width and (wide := [place for place in least if widths[place] > least[place]]):
        widths[max(wide, key=widths.__getitem__)] -= 1
    return below


def _spill(widths: list[int], below: Sequence[int], width: int) -> list[int]:
    """Take the last columns out of a table that is still too wide, all but the first. Returns their places."""
    spilled: list[int] = []
    for place in range(len(widths) - 1, 0, -1):
        if _total(widths) <= width:
            break
        if place not in below:
            widths[place] = -len(GAP)
            spilled.insert(0, place)
    return spilled


def _room(widths: Sequence[int], width: int) -> int:
    """What the columns before it leave to the last one."""
    return width - _total(widths[:-1]) - len(GAP)


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + len(GAP) * (len(widths) - 1)


def _row_lines(
    row: Sequence[str],
    names: Sequence[str],
    widths: Sequence[int],
    below: Sequence[int],
    style: str,
    *,
    colour: bool = False,
) -> list[str]:
    """One row; its cells may have several lines."""
    places = [place for place in range(len(names)) if place not in below]
    columns = [_cell_lines(names[place], row[place], widths[place]) for place in places]
    lines = []
    for number in range(max(map(len, columns), default=1)):
        line = ""
        for place, column in zip(places, columns, strict=True):
            text = column[number] if number < len(column) else ""
            end = "" if place == places[-1] else " " * (widths[place] - cells(text)) + GAP
            line += (painted(names[place], text, row[0]) if colour else text) + end
        lines.append(f"{style}{line.rstrip()}\x1b[0m" if style else line.rstrip())
    return lines


def painted(name: str, text: str, first: str) -> str:
    """A cell of the column `name`, in the colour of its state if it is one; `first` is the first cell of its row."""
    is_state = name in STATES or (name == "value" and first in STATES)
    paint = COLOURS.get(text.partition(" (")[0], 0) if is_state else 0
    return f"\x1b[{paint}m{text}\x1b[0m" if paint else text


def _cell_lines(name: str, cell: str, width: int) -> list[str]:
    if name == "prompt":
        return [cut(cell, width)]
    if name in TEXTS:
        return [part for line in cell.split("\n") for part in _wrapped(line, width)]
    return [cut(line, width) if name in NAMES else line for line in cell.split("\n")]


def _wrapped(line: str, width: int) -> list[str]:
    if cells(line) <= width:
        return [line]
    return textwrap.wrap(line, width if cells(line) == len(line) else width // 2, break_on_hyphens=False) or [""]


def _width(cell: str) -> int:
    return max(map(cells, cell.split("\n")))


def _title(name: str, title: str) -> str:
    if name == "at":
        return "WHEN"
    return title.removesuffix(" AT")


def _shown(name: str, cell: str, short: Callable[[str], str], now: float) -> str:
    if TIME.fullmatch(cell) and name != "value":
        return ago(now - datetime.fromisoformat(cell).timestamp())
    if name.endswith("_bytes"):
        return "/".join(size(int(part)) if part.isdecimal() else part for part in cell.split("/"))
    return (cell if name == "value" else short(cell)).expandtabs()


def _cut_id(text: str, digits: int) -> str:
    match = ID.fullmatch(text)
    return match[1] + match[2][:digits] if match else text
