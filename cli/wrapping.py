"""Wrapping of messages at the width of a terminal: between words, and never inside a command that can be pasted."""

from __future__ import annotations

import re
import textwrap

from cli.tables import JOINED, cells

COMMAND = re.compile(r"\S*penstock(?: [^\s,;]+)+")


def wrapped(text: str, width: int, indent: int = 0) -> list[str]:
    """The lines of one line of text, those after the first indented. A word or command without room stays whole: a
    terminal breaks it, but what is copied there has no line break."""
    if cells(text) <= width:
        return [text]
    glued = COMMAND.sub(lambda found: found[0].replace(" ", JOINED), text)
    lines = textwrap.wrap(
        glued,
        width if cells(text) == len(text) else width // 2,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
        replace_whitespace=False,
    )
    return [line.replace(JOINED, " ") for line in lines] or [""]
