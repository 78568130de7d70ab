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
    Named,
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
from bench.reach.reach import NOTES, ROOMS, by_words, kept
from bench.report import RESULTS, goals, write
from bench.trials import MAX_TESTS_S, Strayed, TreeCopies, check_origins, copy_tree

SOURCE = Path(__file__).parents[2]
TOOL = Path(".venv-audit/bin/python")
NULLS = 20


def _run(run: ProgramRun) -> int:
    args = run.args
    tool = args.tool.absolute()
    if not tool.exists():
        raise WrongArguments(f"{args.tool} is not there\nnext:  make mutants, which installs it")
    seed = random.SystemRandom().randrange(2**32) if args.seed is None else args.seed
    run.console.print(f"the sample: --seed {seed}")
    command = run.command if args.seed is not None else f"{run.command} --seed {seed}"
    with tempfile.TemporaryDirectory(prefix="penstock-sound-") as folder:
        sound = Path(folder) / "sound"
        copy_tree(SOURCE, sound)  # once: the tree may be edited meanwhile
        copies = TreeCopies(sound, Path(folder))
        check_origins(sound)
        reach = by_words(sound) if args.by_words else kept(sound, args.notes, args.jobs, run.console.print)
        mutants = _python(sound, tool, seed, args.sample) + _lua(sound, seed, args.lua)
        sample = _named(sound, mutants, args.only or "")
        trials: list[MutantTrial] = []
        tries = mixed(list(sample.values()), args.null, seed)
        told = {mutant: name for name, mutant in sample.items()}
        calls = [partial(try_mutant, copies, mutant, reach, args.max_seconds, null=null) for mutant, null in tries]
        for trial in side_by_side(calls, args.jobs):
            trials.append(trial)
            run.console.print(f"{len(trials)}/{len(tries)} {line(trial, told[trial.mutant])}", soft_wrap=True)
        order = list(told)
        trials.sort(key=lambda trial: order.index(trial.mutant))
        nulls = [trial for trial in trials if trial.null]
        found = [Named(trial, told[trial.mutant]) for trial in trials if not trial.null]
    for each in survivors(found):
        run.console.print(f"survived: {each}", markup=False, soft_wrap=True)
    run.console.print(table(found, nulls))
    if args.out or not args.only:
        write(args.out or RESULTS / "mutants.json", as_document(found, nulls, {"seed": seed, "command": command}))
    return 0 if 100 * killed_of(found) >= goals()["mutants.noticed"].bound * len(found) else 1


def _named(tree: Path, mutants: Sequence[Mutant], only: str) -> dict[str, Mutant]:
    """By name: those that are wanted."""
    befores = {file: (tree / file).read_text(encoding="utf-8") for file in {mutant.file for mutant in mutants}}
    return {name: mutant for mutant in mutants if only in (name := mutant.name(befores[mutant.file]))}


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
    Option(
        "--max-seconds",
        type=float,
        default=MAX_TESTS_S,
        help=f"seconds of tests against each, at most (default: {MAX_TESTS_S:.0f})",
    ),
    Option("--only", metavar="TEXT", help="only mutants whose line has this in it"),
    Option("--tool", type=Path, default=TOOL, help="a Python that has mutmut"),
    Option("--by-words", action="store_true", help="choose tests by their words alone, without notes of their lines"),
    Option("--notes", type=Path, default=NOTES, help="where to keep which tests run which lines"),
    Option("--out", type=Path, help="where the figures go (default: among bench/results, without --only)"),
)

if __name__ == "__main__":
    main.exit()
