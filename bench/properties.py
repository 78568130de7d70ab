"""`python -m bench.properties`: the property tests on examples drawn by chance, round after round until a time is over.

In `make test` they are tried on the same examples in every run. Here each round draws new ones from a seed that is
printed first: `--seed N` repeats a round. What fails is shown with a line to add above the test, so that `make test`
tries that example from then on. Exits 1 after a failure.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench import program
from bench.program import Run

SOURCE = Path(__file__).parents[1]
PROFILE = "PENSTOCK_TEST_PROPERTIES"
"""Variable: `random` has the tests draw their examples anew."""
SECONDS = 60


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    return program.play(_parser(), argv, _run)


def _run(run: Run) -> int:
    began, seed, rounds = time.monotonic(), run.args.seed, 0
    while seed is not None or not rounds or time.monotonic() - began < run.args.seconds:
        drawn = random.SystemRandom().randrange(2**32) if seed is None else seed
        run.console.print(f"round {rounds + 1}: --seed {drawn}")
        rounds += 1
        if code := _round(drawn, run.args.words):
            run.console.print(f"failed with --seed {drawn}: add the example that is shown above to its test")
            return 1 if code == 1 else code
        if seed is not None:
            break
    run.console.print(f"{rounds} rounds in {time.monotonic() - began:.0f} s, all passed")
    return 0


def _round(seed: int, words: Sequence[str]) -> int:
    """One run of all property tests; the exit code of pytest."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "hypothesis", f"--hypothesis-seed={seed}", *words]
    return subprocess.run(command, cwd=SOURCE, env={**os.environ, PROFILE: "random"}, check=False).returncode


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.properties", description=__doc__)
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help=f"a round begins only within them (default: {SECONDS})"
    )
    parser.add_argument("--seed", type=int, help="of one round, to repeat it")
    parser.add_argument("words", nargs="*", metavar="FILE", help="only the tests of these files")
    return parser


if __name__ == "__main__":
    sys.exit(main())
