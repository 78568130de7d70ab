"""Escapes control characters in untrusted text before it reaches a terminal, in the form of JSON escapes.

A model's answer, a job's metadata, a process's name or a server's error may contain sequences that move the cursor,
write to the clipboard, reverse the reading direction, or hide text. A terminal must show the text that is there.
"""

from __future__ import annotations

import codecs
import re

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
