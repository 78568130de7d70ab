"""`python -m bench.planted`: would the test suite notice? Plants known bugs, one at a time, each in a copy of the tree,
and runs tests there until one fails: those named with the bug, then those that run a line it touches, the likeliest
first, up to two minutes of them (`--named`: the former alone).

Exits 1 if a bug is missed, or if a test fails without any; 2 if a bug no longer fits the tree.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from bench.planted.bug import Bug, Rotten
from bench.planted.bugs import BUGS
from bench.planted.copies import TreeCopies
from bench.planted.since import bugs_since
from bench.planted.sound import SoundRun, try_none
from bench.planted.tree import Strayed, copy_tree
from bench.planted.trial import BugTrial, as_document, table, try_bug, why_missed
from bench.program import BenchProgram, Option, ProgramRun, WrongArguments, count, side_by_side
from bench.reach.reach import NOTES, kept
from bench.report import RESULTS, commit, write

SOURCE = Path(__file__).parents[2]


def _run(run: ProgramRun) -> int:
    args = run.args
    bugs = [bug for bug in BUGS if args.only is None or args.only in bug.name]
    if not bugs:
        raise WrongArguments(
            f"no bug has {args.only!r} in its name\nnext:  choose from the names of the bugs in bench/planted"
        )
    if args.since is not None:
        bugs = bugs_since(SOURCE, args.since, bugs)
        run.console.print(f"{len(bugs)} bugs are concerned since {args.since}", markup=False)
    whole = args.only is None and args.since is None and not args.named
    try:
        return _judged(run, bugs, args.out or (RESULTS / "planted.json" if whole else None)) if bugs else 0
    except (Rotten, Strayed) as error:
        raise WrongArguments(f"{error}\nnext:  bring bench/planted up to the tree") from error


def _judged(run: ProgramRun, bugs: Sequence[Bug], out: Path | None) -> int:
    began, console, jobs, tree = time.monotonic(), run.console, run.args.jobs, commit(SOURCE)
    with tempfile.TemporaryDirectory(prefix="penstock-sound-") as folder:
        sound = Path(folder) / "sound"
        copy_tree(SOURCE, sound)  # once: the tree may be edited meanwhile
        copies = TreeCopies(sound, Path(folder))
        without = try_none(sound, bugs, jobs)
        console.print(_without(without), markup=False)
        if without.broken:
            return 1
        reach = None if run.args.named else kept(sound, run.args.notes, jobs, console.print)
        trials: list[BugTrial] = []
        for trial in side_by_side([partial(try_bug, copies, bug, reach) for bug in bugs], jobs):
            trials.append(trial)
            console.print(f"{len(trials)}/{len(bugs)} {_line(trial)}", markup=False)
    seconds = time.monotonic() - began
    trials.sort(key=lambda trial: bugs.index(trial.bug))
    console.print(table(trials, seconds))
    document = as_document(trials, seconds, without.failures, tree)
    if out is not None:
        write(out, document)
    return 0 if document["passed"] else 1


def _without(run: SoundRun) -> str:
    """What the tests say of the tree without a bug. A test that fails there is no obstacle: a bug that names it is
    judged by the tests that pass."""
    if not run.broken and not run.failures:
        return f"without a bug: all pass, {run.seconds:.1f} s"
    said = "\n".join(run.broken or run.failures)
    return f"error: tests fail without any planted bug, {run.seconds:.1f} s\n{said}"


def _line(trial: BugTrial) -> str:
    said = trial.run.failure[1] if trial.run.failure else why_missed(trial)
    return f"{'caught' if trial.caught else 'MISSED'}  {trial.bug.name} ({trial.run.seconds:.1f} s): {said}"


main = BenchProgram("python -m bench.planted", __doc__, _run).taking(
    Option("--only", metavar="NAME", help="only bugs whose name has this in it"),
    Option("--since", metavar="REF", help="only bugs whose files or tests differ from this commit, and newer bugs"),
    Option("--named", action="store_true", help="only the tests named with each bug"),
    Option("--notes", type=Path, default=NOTES, help="where to keep which tests run which lines"),
    Option("--jobs", type=count, default=1, help="test runs at the same time (default: 1)"),
    Option("--out", type=Path, help="where the figures go (default: among bench/results, if all are tried)"),
)

if __name__ == "__main__":
    main.exit()
