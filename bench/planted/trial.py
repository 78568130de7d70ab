"""One run of pytest in a copy of the tree, and what it says about the bug that was planted there."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
from rich.markup import escape
from rich.table import Table

from bench.planted.bug import Bug
from bench.planted.copies import TreeCopies
from bench.planted.tree import environment
from bench.reach.reach import Reach, tests_of, within
from bench.report import MachineInfo, cores

LIMIT_S = 90.0
"""A test that hangs has noticed nothing."""
MAX_TESTS_S = 120.0
"""Tests are chosen against a change until they take so long together, as measured when their lines were noted."""
SLOWER = 4
"""So many times longer may tests take than when their lines were noted: several trials run at a time."""
FIRST_TESTS = 6
"""Tests that run in a pytest of their own, before the files of the others are collected."""
PASSED, FAILED, TIMED_OUT = 0, 1, -1
"""Exit codes of pytest (2 to 5: it could not run the tests), and ours for a run that was ended."""

FAILURE = re.compile(r"^FAILED (.+?)(?: - (.*))?$", re.MULTILINE)
GONE = re.compile(r"^ERROR: not found: (.+)$", re.MULTILINE)
UNREADABLE = "ERROR: found no collectors for"
"""What pytest says of a test whose file has none of that name, and of one whose file cannot be imported."""


@dataclass(frozen=True, slots=True)
class SuiteRun:
    """What a run of pytest came to."""

    code: int
    seconds: float
    output: str
    unsure: tuple[str, ...] = ()
    """Tests that say nothing of a change: they do not pass without it either, or are not there with it."""

    @property
    def failure(self) -> tuple[str, str] | None:
        """The first test that failed (a fixture that failed is none), and its last word."""
        match = FAILURE.search(self.output) if self.code == FAILED else None
        return (match[1], match[2] or "") if match else None


@dataclass(frozen=True, slots=True)
class Chosen:
    """The tests that are run against a bug until one fails."""

    tests: tuple[str, ...]
    covering: int = 0
    """How many run a line it touches; 0 where they are those named with the bug."""
    limit_s: float = LIMIT_S


@dataclass(frozen=True, slots=True)
class BugTrial:
    """What the tests made of one bug."""

    bug: Bug
    run: SuiteRun
    chosen: Chosen

    @property
    def caught(self) -> bool:
        return self.run.failure is not None


def choose(tree: Path, bug: Bug, reach: Reach | None) -> Chosen:
    """Those named with it, then those that run a line it touches, the likeliest to fail first, as many as `MAX_TESTS_S`
    allows; where nothing is known the former alone. Raises Rotten."""
    covering = tests_of(tree, reach, bug.patched(tree)) if reach else []
    if reach is None or not covering:
        return Chosen(bug.tests)
    others = [test for test in within(covering, reach.seconds, MAX_TESTS_S) if test not in bug.tests]
    seconds = sum(reach.seconds[test] for test in others)
    return Chosen((*bug.tests, *others), len(covering), LIMIT_S + SLOWER * seconds)


def try_bug(copies: TreeCopies, bug: Bug, reach: Reach | None) -> BugTrial:
    """Plant it in a copy and run its tests there. Raises Rotten."""
    chosen = choose(copies.tree, bug, reach)
    return BugTrial(bug, run_changed(copies, bug.patched(copies.tree), chosen.tests, chosen.limit_s), chosen)


def run_changed(copies: TreeCopies, texts: Mapping[str, str], tests: Sequence[str], limit_s: float) -> SuiteRun:
    """Write these files, whole, into a copy of the tree, and run its tests there until one notices."""

    def sound(some: Sequence[str]) -> SuiteRun:
        with copies.changed({}) as folder:
            return run_tests(folder, some, "-x", limit_s=limit_s)

    with copies.changed(texts) as changed:
        return run_until_noticed(lambda some: run_tests(changed, some, "-x", limit_s=limit_s), sound, tests)


def run_until_noticed(
    changed: Callable[[Sequence[str]], SuiteRun], sound: Callable[[Sequence[str]], SuiteRun], tests: Sequence[str]
) -> SuiteRun:
    """Run these tests in the changed tree until one fails that passes in the sound one; those that do not are left out,
    and the others go on. The first few run by themselves: most bugs fail one of them, and pytest takes longer to read
    the files of all the others."""
    seconds, unsure = 0.0, list[str]()
    for part in (tests[:FIRST_TESTS], tests[FIRST_TESTS:]):
        left = list(part)
        while left:
            run = changed(left)
            seconds += run.seconds
            if run.code == PASSED:
                break
            out = vanished(run, left)
            if not out:
                out = accused(run, left)
                if sound(out).code == PASSED:
                    return replace(run, seconds=seconds, unsure=tuple(unsure))
            unsure += out
            left = [test for test in left if test not in out]
    return SuiteRun(PASSED, seconds, "", tuple(unsure))


def accused(run: SuiteRun, tests: Sequence[str]) -> list[str]:
    """Those that may have noticed something: the one that failed; all, where pytest ended without one."""
    name = run.failure[0] if run.failure else ""
    return [test for test in tests if test in (name, name.partition("[")[0])] or list(tests)


def vanished(run: SuiteRun, tests: Sequence[str]) -> list[str]:
    """Those that the tree does not have, as where a parameter has another name: nobody would miss them."""
    gone = () if UNREADABLE in run.output else tuple(GONE.findall(run.output))
    return [test for test in tests if any(name.endswith(f"/{test.partition('[')[0]}") for name in gone)]


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


def table(trials: Sequence[BugTrial], seconds: float) -> Table:
    """One row per bug."""
    missed = sum(not trial.caught for trial in trials)
    view = Table(title=f"{len(trials)} planted bugs, {missed} missed, {seconds:.0f} s on {cores()} cores")
    view.add_column("bug")
    view.add_column("caught by")
    view.add_column("s", justify="right")
    view.add_column("", no_wrap=True)
    for trial in trials:
        verdict = "[green]caught[/]" if trial.caught else "[red]MISSED[/]"
        view.add_row(trial.bug.name, escape(_test(trial) or why_missed(trial)), f"{trial.run.seconds:.1f}", verdict)
    return view


def why_missed(trial: BugTrial) -> str:
    """Why a run counts as having noticed nothing."""
    if trial.run.code == 0:
        return f"its tests pass{unsure(trial.run)}"
    if trial.run.code == TIMED_OUT:
        return trial.run.output
    return f"pytest ended with {trial.run.code} and no test failed"


def unsure(run: SuiteRun) -> str:
    """What is added where tests had to be left out."""
    return f"; {len(run.unsure)} left out as unsure" if run.unsure else ""


def as_document(
    trials: Sequence[BugTrial], seconds: float, without: Sequence[str] = (), tree: str = ""
) -> dict[str, Any]:
    """The same for programs; nothing of this machine but its size. `without`: what pytest said of each test that fails
    without a bug. `tree`: the commit that was copied."""
    return {
        **msgspec.to_builtins(MachineInfo()),
        "commit": tree,
        "seconds": round(seconds),
        "passed": not without and all(trial.caught for trial in trials),
        "fail_without_a_bug": [_without_folders(line) for line in without],
        "bugs": [_row(trial) for trial in trials],
    }


def _row(trial: BugTrial) -> dict[str, Any]:
    return {
        "name": trial.bug.name,
        "breaks": trial.bug.breaks,
        "files": sorted({edit.file for edit in trial.bug.edits}),
        "caught": trial.caught,
        "by": _test(trial),
        "tests": f"{len(trial.chosen.tests)} of {trial.chosen.covering}" if trial.chosen.covering else "named with it",
        "said": _without_folders(trial.run.failure[1] if trial.run.failure else why_missed(trial)),
        "seconds": round(trial.run.seconds, 1),
    }


def _test(trial: BugTrial) -> str:
    """File and test, without the folder."""
    return trial.run.failure[0].removeprefix("tests/") if trial.run.failure else ""


def _without_folders(text: str) -> str:
    """Where a file lies on this machine says nothing about a bug: its name alone is kept."""
    tops = {Path(folder).parts[1] for folder in (sys.prefix, tempfile.gettempdir(), Path.home())}
    return re.sub(rf"/(?:{'|'.join(map(re.escape, tops))})/(?:[^\s'\"/]+/)*", "…/", text)
