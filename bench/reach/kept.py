"""Notes of which tests run which lines, by one run of the suite; kept until a file of the product changes.

A test added since is tried against every change. A test edited since counts with the lines it ran before: delete the
notes to have them made again.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from bench.planted.tree import environment
from bench.reach.contexts import TIMES, TimesFile, passed
from bench.reach.reach import DATA, ROOMS, TOLD, Reach, load

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
