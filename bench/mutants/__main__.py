"""`python -m bench.mutants`: would the test suite notice a mistake made by chance? Draws small changes of the product,
tries each in a copy of the tree with the tests that run the changed lines, and tells which were not noticed. A test
that fails without the change too has noticed nothing.

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
from bench.mutants.reach import NOTES, ROOMS, Reach, kept, tests_of, within
from bench.penstock import start_redis
from bench.processes import Processes
from bench.program import OUT, BenchProgram, Option, ProgramRun, WrongArguments, side_by_side
from bench.report import Ratio, columns
from bench.trials import (
    MAX_TESTS_S,
    PASSED,
    SLOWER,
    Strayed,
    SuiteRun,
    TreeCopies,
    check_origins,
    copy_tree,
    run_changed,
    unsure,
)

SOURCE = Path(__file__).parents[2]
TOOL = Path(".venv-audit/bin/python")
HANG_TIMEOUT_S = 300.0
"""Beyond what the chosen tests take: a mutant that makes one wait for ever is noticed."""
COLUMNS = columns("room: room; mutants: mutants; killed: killed; percent: %")


@dataclass(frozen=True, slots=True)
class MutantTrial:
    """What the tests made of one mutant."""

    mutant: Mutant
    name: str
    covering: int
    """How many tests run its lines."""
    tried: int = 0
    run: SuiteRun | None = None
    """None if no test runs it."""

    @property
    def killed(self) -> bool:
        """What the sound tree shares is not in the run's exit code."""
        return self.run is not None and self.run.code != PASSED

    @property
    def told(self) -> str:
        """In one line."""
        left = unsure(self.run) if self.run else ""
        verdict = "killed" if self.killed else "SURVIVED"
        return f"{verdict}: {self.name} ({self.tried} of {self.covering} tests that run it tried{left})"


def try_mutant(copies: TreeCopies, mutant: Mutant, reach: Reach) -> MutantTrial:
    """Write it into a copy of the tree and run its tests there."""
    name = mutant.name((copies.tree / mutant.file).read_text(encoding="utf-8"))
    found = tests_of(copies.tree, reach, mutant.file, mutant.text)
    chosen = within(found, reach.seconds, MAX_TESTS_S)
    if not chosen:
        return MutantTrial(mutant, name, 0)
    seconds = sum(reach.seconds.get(test, 0.0) for test in chosen)
    run = run_changed(copies, {mutant.file: mutant.text}, chosen, HANG_TIMEOUT_S + SLOWER * seconds)
    return MutantTrial(mutant, name, len(found), len(chosen), run)


def rows(trials: Sequence[MutantTrial]) -> list[dict[str, Any]]:
    """One for each room, and one for all."""
    rooms = sorted({each.mutant.room for each in trials})
    found = []
    for room in (*rooms, "all"):
        of = [each for each in trials if room in ("all", each.mutant.room)]
        killed = sum(each.killed for each in of)
        found.append({"room": room, "mutants": len(of), "killed": killed, "percent": 100 * killed / max(len(of), 1)})
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
        reach = kept(sound, NOTES, args.jobs, run.console.print)
        sample = _named(sound, _python(sound, seed, args.sample) + _lua(sound, seed, args.lua), args.only or "")
        trials: list[MutantTrial] = []
        for trial in side_by_side([partial(try_mutant, copies, mutant, reach) for mutant in sample], args.jobs):
            trials.append(trial)
            run.console.print(f"{len(trials)}/{len(sample)} {trial.told}", soft_wrap=True, markup=False)
    trials.sort(key=lambda trial: sample.index(trial.mutant))
    found, survivors = rows(trials), [each.told for each in trials if not each.killed]
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
