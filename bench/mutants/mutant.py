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
        """What changed, in one line; the same for as long as the changed lines are. Where the file has the changed line
        several times, also which of them. `before` is the file without the change."""
        old, new = self.change(before)
        return f"{self.file}: {old or 'nothing'}{self._which(before)} -> {new or 'nothing'}"

    def _which(self, before: str) -> str:
        old, new = before.splitlines(), self.text.splitlines()
        at = next((place for place, (one, other) in enumerate(zip(old, new, strict=False)) if one != other), len(new))
        same = [place for place, line in enumerate(old) if line.strip() == old[min(at, len(old) - 1)].strip()]
        return f" ({same.index(at) + 1} of {len(same)})" if len(same) > 1 and at in same else ""

    def change(self, before: str) -> tuple[str, str]:
        """The lines that differ, without their indent, each side joined by a slash."""
        sides: tuple[list[str], list[str]] = ([], [])
        for line in difflib.ndiff(before.splitlines(), self.text.splitlines()):
            if line.startswith(("- ", "+ ")):
                sides[line.startswith("+ ")].append(line[2:].strip())
        return " / ".join(sides[0]), " / ".join(sides[1])
