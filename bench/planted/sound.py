"""Sound run: the tests of all planted bugs in a copy of the tree without any bug, where each must pass."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.planted.bug import Bug
from bench.planted.tree import check_origins
from bench.planted.trial import FAILED, PASSED, SuiteRun, run_tests
from bench.program import side_by_side
from bench.reach.reach import by_file

CHUNK_TESTS = 20
"""Files are run together until they have so many tests: each run of pytest takes seconds to start."""
CHUNK_LIMIT_S = 300.0
NOT_PASSED = re.compile(r"^(?:FAILED|ERROR) .+$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class SoundRun:
    """What the chunks came to, in the order in which they ended."""

    seconds: float
    runs: tuple[SuiteRun, ...]

    @property
    def failures(self) -> list[str]:
        """Pytest's line about each test that did not pass."""
        return [line for run in self.runs if run.code == FAILED for line in NOT_PASSED.findall(run.output)]

    @property
    def broken(self) -> list[str]:
        """The output of each chunk that pytest could not run, or not to its end: its tests say nothing of a bug."""
        return [run.output for run in self.runs if run.code not in (PASSED, FAILED)]


def try_none(tree: Path, bugs: Sequence[Bug], jobs: int) -> SoundRun:
    """Run them, so many chunks at a time, once it is sure that the copy is what they test and that every bug fits it.
    Raises Rotten, Strayed."""
    check_origins(tree)
    for bug in bugs:
        bug.patched(tree)
    began = time.monotonic()
    parts = chunks(test for bug in bugs for test in bug.tests)
    runs = tuple(side_by_side([partial(run_tests, tree, part, limit_s=CHUNK_LIMIT_S) for part in parts], jobs))
    return SoundRun(time.monotonic() - began, runs)


def chunks(tests: Iterable[str]) -> Iterator[list[str]]:
    """Each test once, those of a file together."""
    chunk: list[str] = []
    for _, names in sorted(by_file(tests).items()):
        chunk += sorted(names)
        if len(chunk) >= CHUNK_TESTS:
            yield chunk
            chunk = []
    if chunk:
        yield chunk
