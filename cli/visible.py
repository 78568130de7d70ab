"""Text of others on a terminal: what a terminal would obey is shown instead, as JSON escapes it.

A model, a job's metadata, a process's name or a server's error may hold sequences that move the cursor, write to the
clipboard, turn the reading direction around, hide a line or
carry words that nobody sees; what a terminal shows must be what is there.
"""

from __future__ import annotations

import codecs
import re

_OBEYED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u180e\u200b\u200e\u200f"
    "\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\U000110bd\U000110cd\U00013430-\U0001343f\U0001bca0-\U0001bca3"
    "\U0001d173-\U0001d17a\U000e0000-\U000e007f\ud800-\udfff]"
)
"""Control codes but for tab and newline, ESC among them; C1; ends of lines; format characters, which are not seen and
turn, part or tag what is, but for the two joiners (U+200C, U+200D) that Persian, Indic scripts and emoji are written
with; halves of characters, which cannot be written."""


def visible(text: str) -> str:
    """The same text with every such character as \\uXXXX, or two of them as JSON does. JSON stays the same JSON."""
    return _OBEYED.sub(_escaped, text)


def _escaped(found: re.Match[str]) -> str:
    units = found[0].encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))


class VisibleBytes:
    """The same for UTF-8 that comes in pieces, whose borders may lie inside a character."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, data: bytes) -> bytes:
        """What may be written now."""
        return visible(self._decoder.decode(data)).encode()
