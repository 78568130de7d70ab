"""Tests of a line, as coverage noted them, and the tests that would see a change of some files."""

from __future__ import annotations

import ast
import difflib
import hashlib
import math
import os
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import msgspec
from coverage import CoverageData

from bench.reach.contexts import TIMES, TimesFile, passed
from bench.trials import environment
from streaming.redis.scripts import Library, assemble

ROOMS = ("api", "workers", "scheduler", "offline", "streaming")
DATA, TOLD = ".coverage", "times.json"
CHECKSUM = "tests/streaming/store/test_identity.py::test_every_change_of_the_store_raises_its_format"
"""It fails at every change of what scripts read and write, right or wrong: it notices no mistake."""
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


_PARSING = threading.Lock()
"""Several trials run at a time, and Python 3.11 may fail to parse in two threads at once: "AST constructor recursion
depth mismatch"."""
FOLDER = "streaming/lua"
NO_CALLERS = ("scripts.py", "acl.py", "keys.py")
"""Files that name scripts and run none."""


def changed_scripts(tree: Path, texts: Mapping[str, str]) -> set[str]:
    """The scripts that these texts change, by file; a shared function is in many."""
    _, sound = _unchanged(tree)
    return {name for name, source in changed_library(tree, texts).sources.items() if source != sound[name]}


def changed_library(tree: Path, texts: Mapping[str, str]) -> Library:
    """What the server would be given with these texts instead, by file."""
    before, _ = _unchanged(tree)
    return assemble(before | {Path(file).name: text for file, text in texts.items()})


@cache
def _unchanged(tree: Path) -> tuple[dict[str, str], Mapping[str, str]]:
    """The files of a tree that holds still, and the source of each script."""
    files = {path.name: path.read_text(encoding="utf-8") for path in (tree / FOLDER).rglob("*.lua")}
    return files, assemble(files).sources


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


WORD = re.compile(r"[A-Za-z][A-Za-z0-9]{2,}")


def tests_of(tree: Path, reach: Reach, texts: Mapping[str, str]) -> list[str]:
    """The order in which to try them. `texts` are the changed files whole, by name; of a Lua script, the tests that run
    it."""
    scripts = {file: text for file, text in texts.items() if file.startswith(FOLDER)}
    found = frozenset[str]()
    words: set[str] = set()
    for file, calls in callers(tree, changed_scripts(tree, scripts)).items() if scripts else ():
        found |= reach.of(file, calls)
    for file, text in texts.items():
        before = (tree / file).read_text(encoding="utf-8")
        lines = touched(before, text)
        words |= words_of(file, *(before.splitlines()[line - 1] for line in lines))
        if file not in scripts:
            inside = lines & run_by_calls(before)
            found |= reach.of(file, inside) | (reach.of_file(file) if inside != lines else frozenset())
    return likeliest(found - {CHECKSUM}, words, said_by(tree), reach.seconds)


def likeliest(
    tests: Iterable[str], words: Iterable[str], said: Mapping[str, frozenset[str]], seconds: Mapping[str, float]
) -> list[str]:
    """Those that speak of what was changed come first, and the quick before the slow: a word counts for more the fewer
    tests have it."""
    known = Counter(word for each in said.values() for word in each)
    weights = {word: math.log(1 + len(said) / known[word]) for word in words if known[word]}

    def rank(test: str) -> tuple[float, str]:
        about = sum(weights[word] for word in said.get(test.partition("[")[0], frozenset()) & weights.keys())
        return (0.1 + seconds.get(test, 0.0)) / (1 + about) ** 2, test

    return sorted(tests, key=rank)


@cache
def said_by(tree: Path) -> Mapping[str, frozenset[str]]:
    """The words of each test, without its parameters, and of the name of its file."""
    said: dict[str, frozenset[str]] = {}
    for path in sorted((tree / "tests").rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        lines = text.splitlines()
        for node in _parsed(text).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
                place = path.relative_to(tree)
                said[f"{place.as_posix()}::{node.name}"] = words_of(
                    *place.with_suffix("").parts[1:], *lines[first - 1 : node.end_lineno]
                )
    return said


def run_by_calls(text: str) -> set[int]:
    """The lines of a module's functions. All others run as it is imported, which coverage notes of one test alone."""
    lines: set[int] = set()
    for node in ast.walk(_parsed(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            lines |= set(range(node.body[0].lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def _parsed(text: str) -> ast.Module:
    with _PARSING:
        return ast.parse(text)


def words_of(*texts: str) -> frozenset[str]:
    """In lower case, the parts of a name each by themselves."""
    return frozenset(word.lower() for text in texts for word in WORD.findall(text))


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
CONFIG = "coverage.ini"
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
        say(f"lines and branches of the product that it runs: {covered(tree, notes)} %")
        file.write_text(f"{mark}\n{tree.resolve()}\n")
    say(f"which tests run which lines: {notes}")
    there = _tests(tree)
    known = load(notes, Path(file.read_text().splitlines()[1]), there)
    told = msgspec.json.decode((notes / TOLD).read_bytes(), type=TimesFile)
    came = sorted(there - told.seconds.keys())
    newer = _passed(tree, notes, came) if came else {}
    if newer:
        say(f"{len(newer)} tests have come since; they are tried against everything")
    return replace(known, seconds={**known.seconds, **newer}, newer=frozenset(newer))


def _tests(tree: Path) -> frozenset[str]:
    """Those that the tree has now: pytest refuses a run that names one which is gone, and that would look noticed."""
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider"]
    ran = subprocess.run(command, cwd=tree, env=environment(tree), capture_output=True, text=True, check=True)
    return frozenset(line for line in ran.stdout.splitlines() if line.startswith("tests/") and "::" in line)


def _passed(tree: Path, notes: Path, tests: Sequence[str]) -> dict[str, float]:
    """Those of these tests that pass, and how long each takes."""
    told = notes / "newer.json"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "bench.reach.contexts", "-p", "no:cacheprovider", *tests]
    subprocess.run(command, cwd=tree, env={**environment(tree), TIMES: str(told)}, check=False)
    return passed(told)


def _mark(tree: Path) -> str:
    """Changes with any file of the product."""
    digest = hashlib.sha256()
    for path in sorted(path for room in ROOMS for path in (tree / room).rglob("*") if path.is_file()):
        if "__pycache__" not in path.parts:
            digest.update(path.relative_to(tree).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def covered(tree: Path, folder: Path) -> str:
    """Per cent, with one digit behind the point, by the notes of a run in that tree."""
    command = [sys.executable, "-m", "coverage", "report", f"--rcfile={folder / CONFIG}", "--format=total"]
    command += ["--precision=1", f"--include={tree.resolve()}/*"]  # tests run copies of the tree as well
    ran = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=True)
    return ran.stdout.strip()


def _collect(tree: Path, folder: Path, jobs: int) -> int:
    """Returns the exit code of pytest: a test may fail because it is measured, and is chosen against nothing then."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob(f"{DATA}*"):
        old.unlink()
    rc = folder / CONFIG
    rc.write_text(RC.format(folder=folder, rooms=",".join(ROOMS)))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "bench.reach.contexts", "-p", "no:cacheprovider"]
    command += ["--numprocesses", str(jobs), "--dist", "loadfile", "--no-loadscope-reorder"]
    environ = {**environment(tree), "COVERAGE_PROCESS_START": str(rc), TIMES: str(folder / TOLD)}
    code = subprocess.run(command, cwd=tree, env=environ, check=False).returncode
    combine = [sys.executable, "-m", "coverage", "combine", "-q", f"--rcfile={rc}", str(folder)]
    environ = {name: value for name, value in os.environ.items() if name != "COVERAGE_PROCESS_START"}
    subprocess.run(combine, cwd=tree, env=environ, check=True)
    return code
