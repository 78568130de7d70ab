"""One mutant in a copy of the tree: the tests that run its lines, the likeliest to fail first, until one fails."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

import msgspec

from bench.planted.trial import MAX_TESTS_S, PASSED, SLOWER, SuiteRun, run_changed
from bench.reach.reach import Reach, tests_of, within


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


HANG_TIMEOUT_S = 300.0
"""Beyond what the chosen tests take: a mutant that makes one wait for ever is noticed."""


@dataclass(frozen=True, slots=True)
class MutantTrial:
    """What the tests made of one mutant."""

    mutant: Mutant
    covering: int
    """How many tests run its lines."""
    tried: int
    run: SuiteRun | None
    """None if no test runs it."""
    null: bool = False
    """Nothing was changed: every kill is a false one."""

    @property
    def killed(self) -> bool:
        """What the sound tree shares is not in the run's exit code."""
        return self.run is not None and self.run.code != PASSED


def try_mutant(
    tree: Path, mutant: Mutant, reach: Reach, max_tests_s: float = MAX_TESTS_S, *, null: bool = False
) -> MutantTrial:
    """Write it into a copy of the tree and run its tests there; a null one is not written."""
    texts = {mutant.file: mutant.text}
    found = tests_of(tree, reach, texts)
    chosen = within(found, reach.seconds, max_tests_s)
    if not chosen:
        return MutantTrial(mutant, 0, 0, None, null)
    seconds = sum(reach.seconds.get(test, 0.0) for test in chosen)
    run = run_changed(tree, {} if null else texts, chosen, HANG_TIMEOUT_S + SLOWER * seconds)
    return MutantTrial(mutant, len(found), len(chosen), run, null)
