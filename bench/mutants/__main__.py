"""`python -m bench.mutants`: would the test suite notice a mistake made by chance? Draws small changes of the product,
tries each in a copy of the tree with the tests that run the changed lines, and tells which were not noticed. A test
that fails without the change too has noticed nothing; copies without any change show how often that is overlooked.

Every run draws another sample, from a seed that is printed first: `--seed N` repeats a sample. Exits 1 if fewer are
noticed than are wanted; 2 if its tool is not there. What people found of some stands in `bench/mutants/judged.toml`.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from redis import Redis

from bench import program
from bench.mutants import lua
from bench.mutants.report import (
    Mutant,
    MutantTrial,
    Named,
    as_document,
    judged,
    line,
    score,
    survivors,
    table,
    try_mutant,
)
from bench.penstock import start_redis
from bench.planted.tree import Strayed, check_origins, copy_tree
from bench.planted.trial import MAX_TESTS_S
from bench.processes import Processes
from bench.program import BenchProgram, Option, ProgramRun, WrongArguments, side_by_side
from bench.reach.reach import NOTES, ROOMS, kept
from bench.report import RESULTS, goals, write

SOURCE = Path(__file__).parents[2]
TOOL = Path(".venv-audit/bin/python")
NULLS = 20


def _run(run: ProgramRun) -> int:
    args = run.args
    tool = args.tool.absolute()
    if not tool.exists():
        raise WrongArguments(f"{args.tool} is not there\nnext:  make mutants, which installs it")
    seed = _seed(args)
    run.console.print(f"the sample: --seed {seed}")
    with tempfile.TemporaryDirectory(prefix="penstock-sound-") as folder:
        sound = Path(folder)
        copy_tree(SOURCE, sound)  # once: the tree may be edited meanwhile
        check_origins(sound)
        reach = kept(sound, args.notes, args.jobs, run.console.print)
        mutants = [*_python(sound, tool, seed, args.sample), *_lua(sound, seed, args.lua)]
        names = {mutant: mutant.name((sound / mutant.file).read_text(encoding="utf-8")) for mutant in mutants}
        again = {each["mutant"] for each in _figures(args.again)["survivors"]} if args.again else names.values()
        wanted = [each for each in mutants if (args.only or "") in names[each] and names[each] in again]
        trials: list[MutantTrial] = []
        tries = mixed(wanted, args.null, seed)
        calls = [partial(try_mutant, sound, mutant, reach, args.max_seconds, null=null) for mutant, null in tries]
        for trial in side_by_side(calls, args.jobs):
            trials.append(trial)
            run.console.print(f"{len(trials)}/{len(tries)} {line(trial, names[trial.mutant])}", soft_wrap=True)
        trials.sort(key=lambda trial: wanted.index(trial.mutant))
        verdicts, nulls = judged(), [trial for trial in trials if trial.null]
        found = [Named(trial, name := names[trial.mutant], verdicts.get(name)) for trial in trials if not trial.null]
    for each in survivors(found):
        run.console.print(f"survived: {each}", markup=False, soft_wrap=True)
    run.console.print(table(found, nulls))
    out = args.out or (None if args.only or args.again else RESULTS / "mutants.json")
    if out is not None:
        command = run.command if args.seed is not None else f"{run.command} --seed {seed}"
        write(out, as_document(found, nulls, {"seed": seed, "command": command}))
    killed, counted = score(found)
    return 0 if 100 * killed >= goals()["mutants.noticed"].bound * counted else 1


def mixed(mutants: Sequence[Mutant], nulls: int, seed: int) -> list[tuple[Mutant, bool]]:
    """What is tried, in which order, and whether without its change: so many by chance once more, among the others."""
    chance = random.Random(seed)  # noqa: S311 - to be repeated
    tries = [(mutant, False) for mutant in mutants]
    tries += [(mutant, True) for mutant in chance.sample(mutants, min(nulls, len(mutants)))]
    chance.shuffle(tries)
    return tries


def _seed(args: argparse.Namespace) -> int:
    """The one that was given, or that of the figures of an earlier run; otherwise a new one."""
    if args.seed is None and args.again:
        return int(_figures(args.again)["seed"])
    return random.SystemRandom().randrange(2**32) if args.seed is None else args.seed


def _figures(path: Path) -> dict[str, Any]:
    """Of an earlier run."""
    return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])


def _python(tree: Path, tool: Path, seed: int, count: int) -> Iterator[Mutant]:
    files = [path.relative_to(tree).as_posix() for room in ROOMS for path in sorted((tree / room).rglob("*.py"))]
    program_file = Path(__file__).with_name("drawn.py")
    command = [str(tool), "-P", str(program_file), str(seed), str(count), *files]
    drawn = subprocess.run(command, cwd=tree, stdout=subprocess.PIPE, check=True).stdout
    for each in drawn.splitlines():
        yield msgspec.json.decode(each, type=Mutant)


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
    Option("--seed", type=int, help="of a sample, to repeat it (default: a new one, or that of --again)"),
    Option("--jobs", type=program.count, default=2, help="mutants tried at the same time (default: 2)"),
    Option(
        "--max-seconds",
        type=float,
        default=MAX_TESTS_S,
        help=f"seconds of tests against each, at most (default: {MAX_TESTS_S:.0f})",
    ),
    Option("--only", metavar="TEXT", help="only mutants whose line has this in it"),
    Option("--again", type=Path, metavar="FILE", help="only those that survived in these figures"),
    Option("--tool", type=Path, default=TOOL, help="a Python that has mutmut"),
    Option("--notes", type=Path, default=NOTES, help="where to keep which tests run which lines"),
    Option("--out", type=Path, help="where the figures go (default: among bench/results, without --only)"),
)

if __name__ == "__main__":
    main.exit()
