"""`python -m bench.properties`: the property tests on examples drawn by chance, round after round until a time is over.

In `make test` they are tried on the same examples in every run. Here each round draws new ones from a seed that is
printed first: `--seed N` repeats a round. What fails is shown with a line to add above the test, so that `make test`
tries that example from then on. Exits with pytest's code after a failure.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.program import BenchProgram, Option, ProgramRun

SOURCE = Path(__file__).parents[1]
PROFILE = "PENSTOCK_TEST_PROPERTIES"
"""Variable: `random` has the tests draw their examples anew."""
SECONDS = 60


def _run(run: ProgramRun) -> int:
    began, rounds = time.monotonic(), 0
    for seed in _seeds(run.args):
        run.console.print(f"round {rounds + 1}: --seed {seed}")
        if code := _round(seed, run.args.words):
            run.console.print(f"failed with --seed {seed}: add the example that is shown above to its test")
            return code
        rounds += 1
    run.console.print(f"{rounds} rounds in {time.monotonic() - began:.0f} s, all passed")
    return 0


def _seeds(args: argparse.Namespace) -> Iterator[int]:
    """The one that was given; otherwise new ones until the time is over, at least one."""
    if args.seed is not None:
        yield args.seed
        return
    end = time.monotonic() + args.seconds
    yield random.SystemRandom().randrange(2**32)
    while time.monotonic() < end:
        yield random.SystemRandom().randrange(2**32)


def _round(seed: int, words: Sequence[str]) -> int:
    """One run of all property tests; the exit code of pytest."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "hypothesis", f"--hypothesis-seed={seed}", *words]
    return subprocess.run(command, cwd=SOURCE, env={**os.environ, PROFILE: "random"}, check=False).returncode


main = BenchProgram("python -m bench.properties", __doc__, _run).taking(
    Option("--seconds", type=float, default=SECONDS, help=f"a round begins only within them (default: {SECONDS})"),
    Option("--seed", type=int, help="of one round, to repeat it"),
    Option("words", nargs="*", metavar="FILE", help="only the tests of these files"),
)

if __name__ == "__main__":
    main.exit()
