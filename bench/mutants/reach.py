"""Which tests run a line of the product, in their own process or in one they start; found by one run of the suite."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from coverage import CoverageData

from bench.mutants.contexts import TIMES
from bench.planted.tree import environment

ROOMS = ("api", "workers", "scheduler", "offline", "streaming")
DATA, TOLD = ".coverage", "times.json"
RC = """[run]
branch = true
parallel = true
sigterm = true
patch = _exit
data_file = {folder}/.coverage
source = {rooms}
context = ${{PYTEST_CURRENT_TEST-start}}
disable_warnings = no-data-collected, module-not-measured, module-not-imported, no-sysmon
"""
PHASE = re.compile(r" \((?:setup|call|teardown)\)$")
ELSEWHERE = "start"
"""What ran while no test did: the import of a module, mostly."""


@dataclass(frozen=True, slots=True)
class Reach:
    """Tests by line of each file, and how long each test took."""

    seconds: Mapping[str, float]
    lines: Mapping[str, Mapping[int, frozenset[str]]]
    _all: dict[str, frozenset[str]] = field(default_factory=dict)

    def of(self, file: str, lines: Iterable[int]) -> frozenset[str]:
        """The tests that run one of these lines; none, where no test does. Those of the whole file, where a line runs
        only as it is imported. A line that begins no statement counts as the one before it."""
        by_line = self.lines.get(file, {})
        starts = {max((start for start in by_line if start <= line), default=0) for line in lines}
        found = frozenset[str]().union(*(by_line.get(start, frozenset()) for start in starts))
        return found or (self.of_file(file) if starts & by_line.keys() else frozenset())

    def of_file(self, file: str) -> frozenset[str]:
        """The tests that run any line of this file."""
        if file not in self._all:
            self._all[file] = frozenset[str]().union(*self.lines.get(file, {}).values())
        return self._all[file]

    def quickest(self, tests: Iterable[str], file: str) -> list[str]:
        """In the order in which to try them: those named after the file first, then by time."""
        own = Path(file).with_suffix("").as_posix().replace("/", "_")
        return sorted(tests, key=lambda test: (f"test_{own}" not in test, self.seconds.get(test, 0.0), test))


def collect(tree: Path, folder: Path, jobs: int, words: Sequence[str] = ()) -> int:
    """Run the suite of a tree once and leave in `folder` what `load` reads. Returns the exit code of pytest: a test may
    fail because it is measured, and still tells which lines it runs."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob(f"{DATA}*"):
        old.unlink()
    rc = folder / "coverage.ini"
    rc.write_text(RC.format(folder=folder, rooms=",".join(ROOMS)))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "bench.mutants.contexts", "-p", "no:cacheprovider"]
    command += ["--numprocesses", str(jobs), "--dist", "loadfile", "--no-loadscope-reorder", *words]
    environ = {**environment(tree), "COVERAGE_PROCESS_START": str(rc), TIMES: str(folder / TOLD)}
    code = subprocess.run(command, cwd=tree, env=environ, check=False).returncode
    combine = [sys.executable, "-m", "coverage", "combine", "-q", f"--rcfile={rc}", str(folder)]
    environ = {name: value for name, value in os.environ.items() if name != "COVERAGE_PROCESS_START"}
    subprocess.run(combine, cwd=tree, env=environ, check=True)
    return code


def load(folder: Path) -> Reach:
    """Raises FileNotFoundError if nothing was collected there."""
    seconds = msgspec.json.decode((folder / TOLD).read_bytes(), type=dict[str, float])
    data = CoverageData(str(folder / DATA))
    data.read()
    return Reach(
        seconds,
        {
            _short(file): {line: covering(told, seconds) for line, told in data.contexts_by_lineno(file).items()}
            for file in data.measured_files()
        },
    )


def covering(contexts: Iterable[str], known: Mapping[str, float]) -> frozenset[str]:
    """The tests among what coverage noted of a line: `where the process began|the test`, or one of them."""
    names = {PHASE.sub("", part) for told in contexts for part in told.split("|")}
    return frozenset(name for name in names if name in known)


def _short(file: str) -> str:
    """A file's name within the tree."""
    parts = Path(file).parts
    return Path(*parts[next(place for place, part in enumerate(parts) if part in ROOMS) :]).as_posix()
