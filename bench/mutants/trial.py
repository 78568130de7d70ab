"""One mutant in a copy of the tree: the tests that run its lines, the likeliest to fail first, until one notices."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bench.mutants.mutant import Mutant
from bench.planted.trial import MAX_TESTS_S, PASSED, SLOWER, SuiteRun, run_changed
from bench.reach.change import tests_of
from bench.reach.reach import Reach, within

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
