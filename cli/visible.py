"""Text of others on a terminal: what a terminal would obey is shown instead, as JSON escapes it.

A model, a job's metadata, a process's name or a server's error may hold sequences that move the cursor, write to the
clipboard, turn the reading direction around or hide a line; what a terminal shows must be what is there.
"""

from __future__ import annotations

import codecs
import re

_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control codes but for tab and newline, ESC among them; C1; overrides and isolates of direction; halves of characters,
which cannot be written."""


def visible(text: str) -> str:
    """The same text with every such character as \\uXXXX. JSON stays the same JSON."""
    return _OBEYED.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


class VisibleBytes:
    """The same for UTF-8 that comes in pieces, whose borders may lie inside a character."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, data: bytes) -> bytes:
        """What may be written now."""
        return visible(self._decoder.decode(data)).encode()
