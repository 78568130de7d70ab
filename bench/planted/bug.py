"""One planted bug: what it changes in the tree, and which tests must notice."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from streaming.redis.scripts import SHARED


class Rotten(Exception):
    """Raised when the tree no longer has the text, exactly once, that a bug replaces."""


@dataclass(frozen=True, slots=True)
class Edit:
    """Replace the one place in a file that has this text."""

    file: str
    old: str
    new: str

    def applied(self, text: str) -> str:
        """Raises Rotten."""
        if (found := text.count(self.old)) != 1:
            raise Rotten(f"{self.file} has {found} times, not once: {self.old!r}")
        return text.replace(self.old, self.new)


@dataclass(frozen=True, slots=True)
class Bug:
    """A mistake somebody could make."""

    name: str
    breaks: str
    """What goes wrong with it, in a sentence."""
    edits: tuple[Edit, ...]
    tests: tuple[str, ...]
    """The narrowest selection that must notice: node ids of pytest."""

    def patched(self, tree: Path) -> dict[str, str]:
        """The text of every file it changes, by name; nothing is written. Raises Rotten."""
        texts: dict[str, str] = {}
        for edit in self.edits:
            text = texts.get(edit.file) or (tree / edit.file).read_text(encoding="utf-8")
            texts[edit.file] = edit.applied(text)
        return texts


def lua(script: str, old: str, new: str) -> Edit:
    """An edit of a Lua script, or of a file that scripts share, named without its folder and suffix."""
    folder = "streaming/lua/shared" if script in SHARED else "streaming/lua"
    return Edit(f"{folder}/{script}.lua", old, new)


def bug(name: str, breaks: str, *parts: Edit | str) -> Bug:
    """A planted bug. `parts`: its edits, and the tests that must notice."""
    edits = tuple(part for part in parts if isinstance(part, Edit))
    return Bug(name, breaks, edits, tuple(part for part in parts if isinstance(part, str)))
