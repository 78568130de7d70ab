"""One mutant in a copy of the tree: the tests that run its lines, the likeliest to fail first, until one does."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from bench.mutants.mutant import Mutant
from bench.planted.tree import copy_tree
from bench.planted.trial import PASSED, Run, run_until_failure
from bench.reach.change import tests_of
from bench.reach.reach import Reach, within

MAX_TESTS_S = 120.0
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


def try_mutant(tree: Path, mutant: Mutant, reach: Reach, max_tests_s: float = MAX_TESTS_S) -> Trial:
    """Write it into a copy of the tree and run its tests there."""
    found = tests_of(tree, reach, {mutant.file: mutant.text})
    chosen = within(found, reach.seconds, max_tests_s)
    if not chosen:
        return Trial(mutant, 0, 0, None)
    with tempfile.TemporaryDirectory(prefix="penstock-mutant-") as folder:
        copy_tree(tree, Path(folder))
        (Path(folder) / mutant.file).write_text(mutant.text, encoding="utf-8")
        seconds = sum(reach.seconds.get(test, 0.0) for test in chosen)
        run = run_until_failure(Path(folder), chosen, HUNG_S + 2 * seconds)
    return Trial(mutant, len(found), len(chosen), run)
