"""Trials of the test suite: copies of the tree with a change, and the tests that run there until one notices it.

`bench.planted`, `bench.mutants` and `bench.gateway.base` use it. A copy is complete enough for the tests, and its
processes import nothing of the tree that is installed.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PACKAGES = ("penstock", "api", "workers", "scheduler", "offline", "planner", "streaming", "telemetry", "cli", "bench")
ORIGINS = "import importlib; print(*(importlib.import_module(name).__file__ for name in {!r}), sep='\\n')"


class Strayed(Exception):
    """Raised when a copy's processes would import another tree."""


def copy_tree(source: Path, target: Path) -> None:
    """Packages, tests and their settings, and the docs and the deployment files that tests hold against the code."""
    ignore = shutil.ignore_patterns("__pycache__", "results")
    for name in (*PACKAGES, "tests", "docs", "docker", "examples"):
        shutil.copytree(source / name, target / name, ignore=ignore)
    for path in source.iterdir():
        if path.is_file() and not path.name.startswith("."):
            shutil.copy2(path, target)


def environment(tree: Path) -> dict[str, str]:
    """For processes that are to import from this tree, and for the processes they start."""
    return {**os.environ, "PYTHONPATH": str(tree), "COLUMNS": "250"}


def check_origins(tree: Path, packages: Sequence[str] = PACKAGES) -> None:
    """These packages come from this tree. Raises Strayed, CalledProcessError if one cannot be imported."""
    command = [sys.executable, "-c", ORIGINS.format(tuple(packages))]
    ran = subprocess.run(command, cwd=tree, env=environment(tree), capture_output=True, text=True, check=True)
    strays = [origin for origin in ran.stdout.split() if tree.resolve() not in Path(origin).resolve().parents]
    if strays:
        raise Strayed(f"imported from outside the copy: {', '.join(strays)}")


FIRST_TIME_S = 1_000_000_000
"""The time of the first changed file. Python compiles a file anew if its time or its size is another: each changed file
has a time that no other has, whatever the clock says."""


class TreeCopies:
    """Copies of `tree` in `folder`: as many as are in use at a time. Each is put right after a change and kept for the
    next, with all that was compiled in it: to copy and compile the whole tree takes longer than most tests."""

    def __init__(self, tree: Path, folder: Path, copy: Callable[[Path, Path], object] = copy_tree) -> None:
        self.tree = tree
        self._folder, self._copy = folder, copy
        self._free: list[Path] = []
        self._numbers, self._times = itertools.count(), itertools.count(FIRST_TIME_S)

    @contextmanager
    def changed(self, texts: Mapping[str, str]) -> Iterator[Path]:
        """A copy with these files, whole, in place of its own; nobody else uses it meanwhile."""
        copy = self._take()
        try:
            for file, text in texts.items():
                self._write(copy / file, text)
            yield copy
        finally:
            for file in texts:
                self._put_right(copy, file)
            self._free.append(copy)

    def _take(self) -> Path:
        try:
            return self._free.pop()
        except IndexError:
            copy = self._folder / f"copy-{next(self._numbers)}"
            self._copy(self.tree, copy)
            return copy

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text, encoding="utf-8")
        time = next(self._times)
        os.utime(path, (time, time))

    def _put_right(self, copy: Path, file: str) -> None:
        if (self.tree / file).exists():
            shutil.copy2(self.tree / file, copy / file)
        else:
            (copy / file).unlink(missing_ok=True)


LIMIT_S = 90.0
"""A test that hangs has noticed nothing."""
PASSED, FAILED, NO_TESTS, TIMED_OUT = 0, 1, 5, -1
"""Exit codes of pytest (2 to 4: it could not run the tests), and ours for a run that was ended."""

FAILURE = re.compile(r"^FAILED (.+?)(?: - (.*))?$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class SuiteRun:
    """What a run of pytest came to."""

    code: int
    seconds: float
    output: str

    @property
    def failure(self) -> tuple[str, str] | None:
        """The first test that failed (a fixture that failed is none), and its last word."""
        match = FAILURE.search(self.output) if self.code == FAILED else None
        return (match[1], match[2] or "") if match else None


def run_tests(tree: Path, tests: Sequence[str], *options: str, limit_s: float = LIMIT_S) -> SuiteRun:
    """Run these tests of a tree; whatever they started ends with them."""
    command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-p", "no:cacheprovider", *options, *tests]
    began = time.monotonic()
    with subprocess.Popen(
        command,
        cwd=tree,
        env=environment(tree),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=limit_s)
            code = process.returncode
        except subprocess.TimeoutExpired:
            output, code = f"not done after {limit_s:.0f} s", TIMED_OUT
        finally:
            _end_group(process.pid)
    return SuiteRun(code, time.monotonic() - began, output)


def _end_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # all have ended by themselves
        os.killpg(leader, signal.SIGKILL)
