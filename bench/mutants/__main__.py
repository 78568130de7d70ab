"""`python -m bench.mutants`: would the test suite notice a mistake made by chance? Draws small changes of the product,
tries each in a copy of the tree with the tests that run the changed lines, and tells which were not noticed. A test
that fails without the change too has noticed nothing; copies without any change show how often that is overlooked.

Every run draws another sample, from a seed that is printed first; `--seed N` repeats a sample. Exits 1 if fewer are
noticed than are wanted; 2 if its tool is not there.
"""

from __future__ import annotations

import random
import subprocess
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec
from redis import Redis

from bench import program
from bench.mutants import lua
from bench.mutants.report import (
    Mutant,
    MutantTrial,
    as_document,
    killed_of,
    line,
    survivors,
    table,
    try_mutant,
)
from bench.penstock import start_redis
from bench.processes import Processes
from bench.program import BenchProgram, Option, ProgramRun, WrongArguments, side_by_side
from bench.reach.reach import NOTES, ROOMS, kept
from bench.report import RESULTS, goals, write
from bench.trials import Strayed, TreeCopies, check_origins, copy_tree

SOURCE = Path(__file__).parents[2]
TOOL = Path(".venv-audit/bin/python")
NULLS = 20


def _run(run: ProgramRun) -> int:
    args = run.args
    tool = TOOL.absolute()
    if not tool.exists():
        raise WrongArguments(f"{TOOL} is not there\nnext:  make mutants, which installs it")
    seed = random.SystemRandom().randrange(2**32) if args.seed is None else args.seed
    run.console.print(f"the sample: --seed {seed}")
    command = run.command if args.seed is not None else f"{run.command} --seed {seed}"
    with tempfile.TemporaryDirectory(prefix="penstock-sound-") as folder:
        sound = Path(folder) / "sound"
        copy_tree(SOURCE, sound)  # once: the tree may be edited meanwhile
        copies = TreeCopies(sound, Path(folder))
        check_origins(sound)
        reach = kept(sound, NOTES, args.jobs, run.console.print)
        mutants = _python(sound, tool, seed, args.sample) + _lua(sound, seed, args.lua)
        sample = _named(sound, mutants, args.only or "")
        trials: list[MutantTrial] = []
        tries = mixed(sample, args.null, seed)
        calls = [partial(try_mutant, copies, mutant, reach, null=null) for mutant, null in tries]
        for trial in side_by_side(calls, args.jobs):
            trials.append(trial)
            run.console.print(f"{len(trials)}/{len(tries)} {line(trial)}", soft_wrap=True)
        trials.sort(key=lambda trial: sample.index(trial.mutant))
        nulls, found = ([trial for trial in trials if trial.null is null] for null in (True, False))
    for each in survivors(found):
        run.console.print(f"survived: {each}", markup=False, soft_wrap=True)
    run.console.print(table(found, nulls))
    if args.out or not args.only:
        write(args.out or RESULTS / "mutants.json", as_document(found, nulls, {"seed": seed, "command": command}))
    return 0 if 100 * killed_of(found) >= goals()["mutants.noticed"].bound * len(found) else 1


def _named(tree: Path, mutants: Sequence[Mutant], only: str) -> list[Mutant]:
    """Those that are wanted, each name once."""
    befores = {file: (tree / file).read_text(encoding="utf-8") for file in {mutant.file for mutant in mutants}}
    by_name = {mutant.name(befores[mutant.file]): mutant for mutant in mutants}
    return [mutant for name, mutant in by_name.items() if only in name]


def mixed(mutants: Sequence[Mutant], nulls: int, seed: int) -> list[tuple[Mutant, bool]]:
    """What is tried, in which order, and whether without its change: so many by chance once more, among the others."""
    chance = random.Random(seed)  # noqa: S311 - to be repeated
    tries = [(mutant, False) for mutant in mutants]
    tries += [(mutant, True) for mutant in chance.sample(mutants, min(nulls, len(mutants)))]
    chance.shuffle(tries)
    return tries


def _python(tree: Path, tool: Path, seed: int, count: int) -> list[Mutant]:
    """So many by chance."""
    files = [path.relative_to(tree).as_posix() for room in ROOMS for path in sorted((tree / room).rglob("*.py"))]
    program_file = Path(__file__).with_name("drawn.py")
    command = [str(tool), "-P", str(program_file), str(seed), str(count), *files]
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
    Option("--null", type=int, default=NULLS, help=f"copies without any change (default: {NULLS})"),
    Option("--seed", type=int, help="of a sample, to repeat it (default: a new one)"),
    Option("--jobs", type=program.count, default=2, help="mutants tried at the same time (default: 2)"),
    Option("--only", metavar="TEXT", help="only mutants whose line has this in it"),
    Option("--out", type=Path, help="where the figures go (default: among bench/results, without --only)"),
)

if __name__ == "__main__":
    main.exit()
