"""Tests that run a line of the product, as coverage noted them in one run of the suite; the likeliest come first."""

from __future__ import annotations

import ast
import difflib
import hashlib
import os
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from coverage import CoverageData

from bench.mutants.contexts import TIMES, passed
from bench.trials import environment
from streaming.redis.scripts import Library, assemble

ROOMS = ("api", "workers", "scheduler", "offline", "streaming")
FOLDER = "streaming/lua"
NO_CALLERS = ("scripts.py", "acl.py", "keys.py")
"""Files that name scripts and run none."""
CHECKSUM = "tests/streaming/store/test_identity.py::test_every_change_of_the_store_raises_its_format"
"""It fails at every change of what scripts read and write, right or wrong: it notices no mistake."""
PHASE = re.compile(r" \((?:setup|call|teardown)\)$")


@dataclass(frozen=True, slots=True)
class Reach:
    """Tests by line of each file, and how long each test that passes took."""

    seconds: Mapping[str, float]
    lines: Mapping[str, Mapping[int, frozenset[str]]]
    width: Mapping[str, int]
    """How many lines each test runs."""

    def of(self, file: str, lines: Iterable[int]) -> frozenset[str]:
        """The tests that run one of these lines. Those of the whole file, where a line runs only as it is imported. A
        line of which nothing was noted counts as the noted line before it: the rest of a statement, but also code that
        no test runs."""
        by_line = self.lines.get(file, {})
        starts = {max((start for start in by_line if start <= line), default=0) for line in lines}
        found = frozenset[str]().union(*(by_line.get(start, frozenset()) for start in starts))
        return found or (self.of_file(file) if starts & by_line.keys() else frozenset())

    def of_file(self, file: str) -> frozenset[str]:
        """The tests that run any line of this file."""
        return frozenset[str]().union(*self.lines.get(file, {}).values())

    def likeliest(self, tests: Iterable[str]) -> list[str]:
        """The quick ones before the slow, and those that run little else before those that run everything."""
        return sorted(tests, key=lambda test: ((0.1 + self.seconds.get(test, 0.0)) * self.width.get(test, 0), test))


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


def changed_scripts(tree: Path, texts: Mapping[str, str]) -> set[str]:
    """The scripts that these texts change, by file; a shared function is in many."""
    sound = assemble(_scripts(tree)).sources
    return {name for name, source in changed_library(tree, texts).sources.items() if source != sound[name]}


def changed_library(tree: Path, texts: Mapping[str, str]) -> Library:
    """What the server would be given with these texts instead, by file."""
    return assemble(_scripts(tree) | {Path(file).name: text for file, text in texts.items()})


@cache
def _scripts(tree: Path) -> dict[str, str]:
    """The files of a tree that holds still."""
    return {path.name: path.read_text(encoding="utf-8") for path in (tree / FOLDER).rglob("*.lua")}


def callers(tree: Path, names: Collection[str]) -> dict[str, list[int]]:
    """The lines of `streaming` that name one of these scripts as they run it, by file."""
    word = re.compile("|".join(rf'"{re.escape(name)}"' for name in names)) if names else None
    found: dict[str, list[int]] = {}
    for path in sorted((tree / "streaming").rglob("*.py")):
        if word is None or path.name in NO_CALLERS:
            continue
        lines = [number for number, line in enumerate(path.read_text("utf-8").splitlines(), 1) if word.search(line)]
        if lines:
            found[path.relative_to(tree).as_posix()] = lines
    return found


def tests_of(tree: Path, reach: Reach, file: str, text: str) -> list[str]:
    """The tests of a change, in the order in which to try them. `text` is the changed file; of a Lua script they are
    those that run it."""
    found = frozenset[str]()
    if file.startswith(FOLDER):
        for caller, lines in callers(tree, changed_scripts(tree, {file: text})).items():
            found |= reach.of(caller, lines)
    else:
        before = (tree / file).read_text(encoding="utf-8")
        changed = touched(before, text)
        inside = changed & run_by_calls(before)
        found = reach.of(file, inside) | (reach.of_file(file) if inside != changed else frozenset())
    return reach.likeliest(found - {CHECKSUM})


_PARSING = threading.Lock()
"""Several trials run at a time, and Python 3.11 may fail to parse in two threads at once: "AST constructor recursion
depth mismatch"."""


def run_by_calls(text: str) -> set[int]:
    """The lines of a module's functions. All others run as it is imported, which coverage notes of one test alone."""
    with _PARSING:
        module = ast.parse(text)
    lines: set[int] = set()
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            lines |= set(range(node.body[0].lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def touched(before: str, after: str) -> set[int]:
    """The lines of a text, from 1, that a change replaces or takes away; where it only adds, those around it."""
    lines: set[int] = set()
    old = before.splitlines()
    matcher = difflib.SequenceMatcher(None, old, after.splitlines(), autojunk=False)
    for kind, first, last, _, _ in matcher.get_opcodes():
        if kind == "insert":
            lines |= {first, first + 1} & set(range(1, len(old) + 1))
        elif kind != "equal":
            lines |= set(range(first + 1, last + 1))
    return lines


NOTES = Path("build/reach")
DATA, TOLD, CONFIG = ".coverage", "times.json", "coverage.ini"
MARK = "tree"
"""A file: what the tree was like, and where it was."""
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


def kept(tree: Path, notes: Path, jobs: int, say: Callable[[str], None]) -> Reach:
    """What is known of this tree, a copy that holds still; the suite runs once if nothing is."""
    notes, mark = notes.absolute(), _mark(tree)
    file = notes / MARK
    if not file.exists() or file.read_text().splitlines()[0] != mark:
        file.unlink(missing_ok=True)  # the notes are of no tree until all are written
        say("running the suite once, to note which tests run which lines")
        say(f"pytest ended with {_collect(tree, notes, jobs)}")
        file.write_text(f"{mark}\n{tree.resolve()}\n")
    say(f"which tests run which lines: {notes}")
    return load(notes, Path(file.read_text().splitlines()[1]))


def _mark(tree: Path) -> str:
    """Changes with any file of the product and of its tests."""
    digest = hashlib.sha256()
    for path in sorted(path for room in (*ROOMS, "tests") for path in (tree / room).rglob("*") if path.is_file()):
        if "__pycache__" not in path.parts:
            digest.update(path.relative_to(tree).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _collect(tree: Path, folder: Path, jobs: int) -> int:
    """Returns the exit code of pytest: a test may fail because it is measured, and is chosen against nothing then."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob(f"{DATA}*"):
        old.unlink()
    rc = folder / CONFIG
    rc.write_text(RC.format(folder=folder, rooms=",".join(ROOMS)))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "bench.mutants.contexts", "-p", "no:cacheprovider"]
    command += ["--numprocesses", str(jobs), "--dist", "loadfile", "--no-loadscope-reorder"]
    environ = {**environment(tree), "COVERAGE_PROCESS_START": str(rc), TIMES: str(folder / TOLD)}
    code = subprocess.run(command, cwd=tree, env=environ, check=False).returncode
    combine = [sys.executable, "-m", "coverage", "combine", "-q", f"--rcfile={rc}", str(folder)]
    environ = {name: value for name, value in os.environ.items() if name != "COVERAGE_PROCESS_START"}
    subprocess.run(combine, cwd=tree, env=environ, check=True)
    return code


def load(folder: Path, tree: Path) -> Reach:
    """What a run in that tree left in the folder. Raises FileNotFoundError if none did."""
    seconds = passed(folder / TOLD)
    data = CoverageData(str(folder / DATA))
    data.read()
    tests = by_file(seconds)
    lines = {}
    for file in data.measured_files():
        if Path(file).is_relative_to(tree):  # tests make copies of the tree too
            noted = data.contexts_by_lineno(file).items()
            lines[Path(file).relative_to(tree).as_posix()] = {line: covering(told, tests) for line, told in noted}
    width = Counter(test for by_line in lines.values() for some in by_line.values() for test in some)
    return Reach(seconds, lines, width)
