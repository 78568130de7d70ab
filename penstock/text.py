"""Text: decodes what users send or keep in files (UTF-8, maybe with a byte order mark), and writes numbers briefly."""

from __future__ import annotations

import codecs
import re
from pathlib import Path
from typing import TypeVar

MARK = codecs.BOM_UTF8
_FORMS = {
    "UTF-32": re.compile(rb"\xff\xfe\0\0|\0\0\xfe\xff|\0\0\0[^\0]|[^\0]\0\0\0", re.DOTALL),
    "UTF-16": re.compile(rb"\xff\xfe|\xfe\xff|\0[^\0]\0[^\0]|[^\0]\0[^\0]\0", re.DOTALL),
    "gzip": re.compile(rb"\x1f\x8b"),
    "zstd": re.compile(rb"\x28\xb5\x2f\xfd"),
}
"""The first bytes of what is often sent by mistake. The first characters of text are ASCII in nearly all formats."""


B = TypeVar("B", bytes, bytearray)


def without_mark(data: B) -> B:
    """Return the data without a UTF-8 byte order mark at its start."""
    return data[len(MARK) :] if data.startswith(MARK) else data


def form_of(data: bytes) -> str:
    """Return the name of another encoding or of a compression in which the data seems to be; "" for none."""
    return next((name for name, form in _FORMS.items() if form.match(data)), "")


def fault_of(data: bytes) -> str:
    """Return why the data is not UTF-8 text, as the end of a sentence that begins with "it is"; "" if it is."""
    if form := form_of(data):
        return f"{form} data, and must be UTF-8 text"
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return f"not UTF-8 text: byte {error.start + 1} is 0x{data[error.start]:02x}"
    return ""


def read_text(path: Path) -> str:
    """Read a text file without its byte order mark, with newlines as its line ends. Raises OSError; ValueError, which
    says why it is not UTF-8 text."""
    return decoded(path.read_bytes()).replace("\r\n", "\n").replace("\r", "\n")


def decoded(data: bytes) -> str:
    """Return text without its byte order mark. Raises ValueError, which says why it is not UTF-8 text."""
    try:
        return without_mark(data).decode()
    except UnicodeDecodeError:
        raise ValueError(f"it is {fault_of(data)}") from None


def counted(number: int, noun: str, plural: str = "") -> str:
    """A number with its noun: "1 job", "2 jobs"; `plural` if it is not the noun with an s."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


# --- numbers ----------------------------------------------------------------------------------------------------------


MINUTE_MS, HOUR_MS = 60_000, 3_600_000


def duration(ms: float | None) -> str:
    """Milliseconds as text with three digits and a unit: "0.42 ms", "17.3 ms", "2.50 s", "3.4 min", "2.1 h"."""
    if ms is None:
        return "–"
    if ms < 0:
        return f"-{duration(-ms)}"
    for limit, unit, name in ((1000, 1, "ms"), (MINUTE_MS, 1000, "s"), (HOUR_MS, MINUTE_MS, "min")):
        if ms < limit:
            return f"{three(ms / unit)} {name}"
    return f"{three(ms / HOUR_MS)} h"


def shared(ms: float) -> str:
    """The cost of sharing as text; a negative one is none: the fit expected more than was seen."""
    return duration(ms) if ms >= 0 else "– (faster than fitted)"


def three(value: float | None) -> str:
    """A number with about three digits."""
    if value is None:
        return "–"
    if value >= 1000:
        return f"{value:,.0f}"
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:.{digits}f}"


def percent(share: float) -> str:
    """A share of 1 as percent."""
    return f"{100 * share:.1f} %" if share < 0.1 else f"{100 * share:.0f} %"
