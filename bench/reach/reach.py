"""The tests of a line, as coverage noted them: in the process of pytest, or in one that a test started."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from coverage import CoverageData

from bench.reach.contexts import passed

ROOMS = ("api", "workers", "scheduler", "offline", "streaming", "runtime")
DATA, TOLD = ".coverage", "times.json"
PHASE = re.compile(r" \((?:setup|call|teardown)\)$")


@dataclass(frozen=True, slots=True)
class Reach:
    """Tests by line of each file, and how long each test took."""

    seconds: Mapping[str, float]
    lines: Mapping[str, Mapping[int, frozenset[str]]]
    newer: frozenset[str] = frozenset()
    """Tests of which nothing was noted yet: they may run any line."""
    _all: dict[str, frozenset[str]] = field(default_factory=dict)

    def of(self, file: str, lines: Iterable[int]) -> frozenset[str]:
        """The tests that run one of these lines. Those of the whole file, where a line runs only as it is imported. A
        line of which nothing was noted counts as the noted line before it: the rest of a statement, but also code that
        no test runs. Newer tests always."""
        by_line = self.lines.get(file, {})
        starts = {max((start for start in by_line if start <= line), default=0) for line in lines}
        found = frozenset[str]().union(*(by_line.get(start, frozenset()) for start in starts))
        return self.newer | (found or (self.of_file(file) if starts & by_line.keys() else frozenset()))

    def of_file(self, file: str) -> frozenset[str]:
        """The tests that run any line of this file."""
        if file not in self._all:
            self._all[file] = frozenset[str]().union(*self.lines.get(file, {}).values())
        return self.newer | self._all[file]


def within(tests: Sequence[str], seconds: Mapping[str, float], max_s: float) -> list[str]:
    """The first ones that take no longer than this together; at least one."""
    chosen: list[str] = []
    spent = 0.0
    for test in tests:
        spent += seconds.get(test, 0.0)
        if chosen and spent > max_s:
            break
        chosen.append(test)
    return chosen


def load(folder: Path, tree: Path, there: Collection[str]) -> Reach:
    """What a run in that tree left in the folder, of the tests that are still there. Raises FileNotFoundError if none
    did."""
    seconds = {test: took for test, took in passed(folder / TOLD).items() if test in there}
    data = CoverageData(str(folder / DATA))
    data.read()
    tests = by_file(seconds)
    files = {Path(file): file for file in data.measured_files()}  # among them copies that tests made of the tree
    return Reach(
        seconds,
        {
            path.relative_to(tree).as_posix(): {
                line: covering(told, tests) for line, told in data.contexts_by_lineno(file).items()
            }
            for path, file in files.items()
            if path.is_relative_to(tree)
        },
    )


def by_file(tests: Iterable[str]) -> dict[str, frozenset[str]]:
    """The tests of each file."""
    found: dict[str, set[str]] = {}
    for test in tests:
        found.setdefault(test.partition("::")[0], set()).add(test)
    return {file: frozenset(names) for file, names in found.items()}


def covering(contexts: Iterable[str], known: Mapping[str, frozenset[str]]) -> frozenset[str]:
    """The tests among what coverage noted of a line: `where the process began|the test`, or one of them; `known` are
    the tests of each file. A process that began in a test's setup may serve every test of that file; what ran while a
    file was imported is for all of it."""
    found: set[str] = set()
    for part in {part for told in contexts for part in _parts(told)}:
        name = PHASE.sub("", part)
        tests = known.get(name.partition("::")[0], frozenset())
        found |= tests if part.endswith(" (setup)") or "::" not in name else tests & {name}
    return frozenset(found)


def _parts(context: str) -> set[str]:
    """The context, and each side of every bar in it: a test's parameters may hold bars too."""
    cuts = [at for at, char in enumerate(context) if char == "|"]
    return {context, *(context[:at] for at in cuts), *(context[at + 1 :] for at in cuts)}
