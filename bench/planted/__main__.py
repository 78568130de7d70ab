"""`python -m bench.planted`: would the test suite notice? Plants known bugs, one at a time, each in a copy of the tree,
and runs tests there until one fails: those named with the bug, then those that run a line it touches, the likeliest
first, up to two minutes of them (`--named`: the former alone).

Exits 1 if a bug is missed, or if the tests fail without any; 2 if a bug no longer fits the tree.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from bench.planted.bug import Bug, Rotten
from bench.planted.bugs import BUGS
from bench.planted.tree import Strayed, copy_tree
from bench.planted.trial import PASSED, BugTrial, as_document, table, try_bug, try_none, why_missed
from bench.program import BenchProgram, Option, ProgramRun, WrongArguments, count, side_by_side
from bench.reach.reach import NOTES, kept
from bench.report import RESULTS, write

SOURCE = Path(__file__).parents[2]


def _run(run: ProgramRun) -> int:
    args = run.args
    bugs = [bug for bug in BUGS if args.only is None or args.only in bug.name]
    if not bugs:
        raise WrongArguments(
            f"no bug has {args.only!r} in its name\nnext:  choose from the names of the bugs in bench/planted"
        )
    try:
        return _judged(run, bugs, args.out or (None if args.only or args.named else RESULTS / "planted.json"))
    except (Rotten, Strayed) as error:
        raise WrongArguments(f"{error}\nnext:  bring bench/planted up to the tree") from error


def _judged(run: ProgramRun, bugs: Sequence[Bug], out: Path | None) -> int:
    began, console, jobs = time.monotonic(), run.console, run.args.jobs
    with tempfile.TemporaryDirectory(prefix="penstock-sound-") as folder:
        sound = Path(folder)
        copy_tree(SOURCE, sound)  # once: the tree may be edited meanwhile
        without = try_none(sound, bugs)
        if without.code != PASSED:
            console.print(f"error: the tests fail without any planted bug\n{without.output}", markup=False)
            return 1
        console.print(f"without a bug: all pass, {without.seconds:.1f} s")
        reach = None if run.args.named else kept(sound, run.args.notes, jobs, console.print)
        trials: list[BugTrial] = []
        for trial in side_by_side([partial(try_bug, sound, bug, reach) for bug in bugs], jobs):
            trials.append(trial)
            console.print(f"{len(trials)}/{len(bugs)} {_line(trial)}", markup=False)
    seconds = time.monotonic() - began
    trials.sort(key=lambda trial: bugs.index(trial.bug))
    console.print(table(trials, seconds))
    if out is not None:
        write(out, as_document(trials, seconds))
    return 0 if all(trial.caught for trial in trials) else 1


def _line(trial: BugTrial) -> str:
    said = trial.run.failure[1] if trial.run.failure else why_missed(trial)
    return f"{'caught' if trial.caught else 'MISSED'}  {trial.bug.name} ({trial.run.seconds:.1f} s): {said}"


main = BenchProgram("python -m bench.planted", __doc__, _run).taking(
    Option("--only", metavar="NAME", help="only bugs whose name has this in it"),
    Option("--named", action="store_true", help="only the tests named with each bug"),
    Option("--notes", type=Path, default=NOTES, help="where to keep which tests run which lines"),
    Option("--jobs", type=count, default=1, help="bugs tried at the same time (default: 1)"),
    Option("--out", type=Path, help="where the figures go (default: among bench/results, if all are tried)"),
)

if __name__ == "__main__":
    main.exit()
