"""One mutant in a copy of the tree: the tests that run its lines, the quickest first, until one fails."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.mutants import lua
from bench.mutants.mutant import Mutant
from bench.mutants.reach import Reach
from bench.planted.tree import copy_tree
from bench.planted.trial import PASSED, Run, run_tests

MOST_S = 120.0
"""Tests are chosen until they take so long together, as measured when their lines were noted."""
HUNG_S = 300.0
"""Beyond what the chosen tests take: a mutant that makes one wait for ever is noticed."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What the tests made of one mutant."""

    mutant: Mutant
    covering: int
    """How many tests run its lines."""
    tried: int
    run: Run | None
    """None if no test runs it."""

    @property
    def killed(self) -> bool:
        return self.run is not None and self.run.code != PASSED


def try_mutant(tree: Path, mutant: Mutant, reach: Reach, most_s: float = MOST_S) -> Trial:
    """Write it into a copy of the tree and run its tests there."""
    found = covering(tree, mutant, reach)
    chosen = within(found, reach.seconds, most_s)
    if not chosen:
        return Trial(mutant, 0, 0, None)
    with tempfile.TemporaryDirectory(prefix="penstock-mutant-") as folder:
        copy_tree(tree, Path(folder))
        (Path(folder) / mutant.file).write_text(mutant.text, encoding="utf-8")
        seconds = sum(reach.seconds.get(test, 0.0) for test in chosen)
        run = run_tests(Path(folder), chosen, "-x", limit_s=HUNG_S + 2 * seconds)
    return Trial(mutant, len(found), len(chosen), run)


def covering(tree: Path, mutant: Mutant, reach: Reach) -> list[str]:
    """The quickest first. Of a Lua script: the tests of the lines that run it."""
    if not mutant.file.endswith(".lua"):
        return reach.quickest(reach.of(mutant.file, range(mutant.first, mutant.last + 1)), mutant.file)
    places = lua.callers(tree, lua.scripts_with(tree, mutant))
    found = frozenset[str]().union(*(reach.of(file, lines) for file, lines in places.items()))
    return reach.quickest(found, mutant.file)


def within(tests: Sequence[str], seconds: Mapping[str, float], most_s: float) -> list[str]:
    """The first ones that take no longer than this together; at least one."""
    chosen: list[str] = []
    spent = 0.0
    for test in tests:
        spent += seconds.get(test, 0.0)
        if chosen and spent > most_s:
            break
        chosen.append(test)
    return chosen
