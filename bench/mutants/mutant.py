"""One mutant: a file of the product with one small change, and where the change stands."""

from __future__ import annotations

import difflib

import msgspec


class Mutant(msgspec.Struct, frozen=True):
    """A change drawn by chance."""

    file: str
    operator: str
    text: str
    """The whole file with the change."""

    def name(self, before: str) -> str:
        """What changed, in one line; the same for as long as the changed lines are. `before` is the file without it."""
        old, new = self.change(before)
        return f"{self.file}: {old or 'nothing'} -> {new or 'nothing'}"

    def change(self, before: str) -> tuple[str, str]:
        """The lines that differ, without their indent, each side joined by a slash."""
        sides: tuple[list[str], list[str]] = ([], [])
        for line in difflib.ndiff(before.splitlines(), self.text.splitlines()):
            if line.startswith(("- ", "+ ")):
                sides[line.startswith("+ ")].append(line[2:].strip())
        return " / ".join(sides[0]), " / ".join(sides[1])
