"""`python -m bench.mutants`: would the test suite notice a mistake made by chance? Draws small changes of the product,
runs in a copy of the tree the tests of the changed file's folder, then of its room, then of all rooms (those that take
no seconds), and tells which changes no test noticed. One that fails without the change too has noticed nothing.

Every run draws another sample, from a seed that is printed first; `--seed N` repeats a sample. Exits 1 if fewer are
noticed than are wanted; 2 if its tool is not there.
"""

from __future__ import annotations

import random
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from redis import Redis

from bench import program
from bench.mutants import lua
from bench.mutants.lua import Mutant
from bench.penstock import start_redis
from bench.processes import Processes
from bench.program import OUT, BenchProgram, Option, ProgramRun, WrongArguments, side_by_side
from bench.report import Ratio, columns
from bench.trials import NO_TESTS, PASSED, Strayed, TreeCopies, check_origins, copy_tree, run_tests

SOURCE = Path(__file__).parents[2]
TOOL = Path(".venv-audit/bin/python")
ROOMS = ("api", "workers", "scheduler", "offline", "streaming")
CHECKSUM = "tests/streaming/store/test_identity.py::test_every_change_of_the_store_raises_its_format"
"""It fails at every change of what scripts read and write, right or wrong: it notices no mistake."""
HANG_TIMEOUT_S = 900.0
"""Longer than the tests of all rooms take: a mutant that makes one wait for ever is noticed."""
COLUMNS = columns("room: room; mutants: mutants; noticed: noticed; percent: %")


@dataclass(frozen=True, slots=True)
class MutantTrial:
    """What the tests made of one mutant."""

    mutant: Mutant
    name: str
    noticed: str
    """By which test; "" if all pass."""


def try_mutant(copies: TreeCopies, mutant: Mutant) -> MutantTrial:
    """Write it into a copy of the tree and run its tests there, the nearest first."""
    name = mutant.name((copies.tree / mutant.file).read_text(encoding="utf-8"))
    with copies.changed({mutant.file: mutant.text}) as changed:
        found = (_noticed(copies, changed, folders) for folders in folders_of(copies.tree, mutant.file))
        return MutantTrial(mutant, name, next(filter(None, found), ""))


def folders_of(tree: Path, file: str) -> list[tuple[str, ...]]:
    """The tests of a file, which mirror the folders: of its own folder, of its room, and of all others."""
    own = Path("tests", file).parent
    while not (tree / own).is_dir():
        own = own.parent
    room = f"tests/{Path(file).parts[0]}"
    others = tuple(each for each in (f"tests/{name}" for name in ROOMS) if each != room and (tree / each).is_dir())
    return [folders for folders in dict.fromkeys([(own.as_posix(),), (room,), others]) if folders]


def _noticed(copies: TreeCopies, changed: Path, folders: tuple[str, ...]) -> str:
    """The test of these folders that fails in the changed tree and passes in the sound one; what else ended the tests
    of the changed tree alone."""
    left_out = [CHECKSUM]
    while True:
        options = [f"--deselect={test}" for test in left_out]
        options += ["-x", "-m", "not slow"]
        run = run_tests(changed, folders, *options, limit_s=HANG_TIMEOUT_S)
        if run.code in (PASSED, NO_TESTS):
            return ""
        with copies.changed({}) as sound:
            if run.failure is None:  # a fixture, an import, a test that waits for ever
                same = run_tests(sound, folders, *options, limit_s=HANG_TIMEOUT_S)
                is_same = (same.code, same.failure) == (run.code, None)
                return "" if is_same else f"no test that could be run (pytest: {run.code})"
            test, _ = run.failure
            if run_tests(sound, [test]).code == PASSED:
                return test
        left_out.append(test)


def rows(trials: Sequence[MutantTrial]) -> list[dict[str, Any]]:
    """One for each room, and one for all."""
    found = []
    for room in (*sorted({each.mutant.room for each in trials}), "all"):
        of = [each for each in trials if room in ("all", each.mutant.room)]
        noticed = sum(bool(each.noticed) for each in of)
        found.append({"room": room, "mutants": len(of), "noticed": noticed, "percent": 100 * noticed / max(len(of), 1)})
    return found


def _run(run: ProgramRun) -> int:
    args = run.args
    if not TOOL.exists():
        raise WrongArguments(f"{TOOL} is not there\nnext:  make mutants, which installs it")
    seed = random.SystemRandom().randrange(2**32) if args.seed is None else args.seed
    run.console.print(f"the sample: --seed {seed}")
    with tempfile.TemporaryDirectory(prefix="penstock-sound-") as folder:
        sound = Path(folder) / "sound"
        copy_tree(SOURCE, sound)  # once: the tree may be edited meanwhile
        copies = TreeCopies(sound, Path(folder))
        check_origins(sound)
        sample = _named(sound, _python(sound, seed, args.sample) + _lua(sound, seed, args.lua), args.only or "")
        trials: list[MutantTrial] = []
        for trial in side_by_side([partial(try_mutant, copies, mutant) for mutant in sample], args.jobs):
            trials.append(trial)
            verdict = f"noticed by {trial.noticed}" if trial.noticed else "SURVIVED"
            run.console.print(f"{len(trials)}/{len(sample)} {trial.name}: {verdict}", soft_wrap=True, markup=False)
    found, survivors = rows(trials), sorted(each.name for each in trials if not each.noticed)
    noticed = Ratio.held("mutants.noticed", "mutants noticed, %", found[-1]["percent"], digits=1)
    name, title = "mutants-some" if args.only else "mutants", "Mistakes made by chance"
    return run.keep(run.result(name, title, COLUMNS, found, [noticed], survivors, seed=seed))


def _named(tree: Path, mutants: Sequence[Mutant], only: str) -> list[Mutant]:
    """Those that are wanted, each name once."""
    befores = {file: (tree / file).read_text(encoding="utf-8") for file in {mutant.file for mutant in mutants}}
    by_name = {mutant.name(befores[mutant.file]): mutant for mutant in mutants}
    return [mutant for name, mutant in by_name.items() if only in name]


def _python(tree: Path, seed: int, count: int) -> list[Mutant]:
    """So many by chance."""
    files = [path.relative_to(tree).as_posix() for room in ROOMS for path in sorted((tree / room).rglob("*.py"))]
    command = [str(TOOL.absolute()), "-P", str(Path(__file__).with_name("drawn.py")), str(seed), str(count), *files]
    drawn = subprocess.run(command, cwd=tree, stdout=subprocess.PIPE, check=True).stdout
    return [msgspec.json.decode(each, type=Mutant) for each in drawn.splitlines()]


def _lua(tree: Path, seed: int, count: int) -> list[Mutant]:
    with (
        tempfile.TemporaryDirectory(prefix="penstock-mutants-") as folder,
        Processes(Path(folder)) as processes,
        Redis.from_url(start_redis(processes)) as server,
    ):
        return lua.draw(server, tree, seed, count)


main = BenchProgram("python -m bench.mutants", __doc__, _run, Strayed).taking(
    Option("--sample", type=int, default=400, help="mutants of Python files (default: 400)"),
    Option("--lua", type=int, default=60, help="mutants of Lua scripts (default: 60)"),
    Option("--seed", type=int, help="of a sample, to repeat it (default: a new one)"),
    Option("--jobs", type=program.count, default=2, help="mutants tried at the same time (default: 2)"),
    Option("--only", metavar="TEXT", help="only mutants whose line has this in it"),
    OUT,
)

if __name__ == "__main__":
    main.exit()
