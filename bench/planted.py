"""`python -m bench.planted`: plants the bugs of planted.toml, one at a time, each in a copy of the tree, and runs the
tests named with it: one of them must fail.

Exits 1 if a bug is missed, or if one of these tests fails without any bug; 2 if a bug no longer fits the tree.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import msgspec

from bench.program import BenchProgram, Option, ProgramRun, WrongArguments, count, side_by_side
from bench.report import Ratio, columns, table
from bench.trials import (
    PASSED,
    Strayed,
    SuiteRun,
    TreeCopies,
    check_origins,
    copy_tree,
    run_tests,
)

SOURCE = Path(__file__).parents[1]
SOUND_TIMEOUT_S = 600.0


class Rotten(Exception):
    """Raised when a file does not have the text that a bug replaces exactly once."""


class Edit(msgspec.Struct, frozen=True):
    """Replaces the one place in a file that has this text."""

    file: str
    old: str
    new: str


class Bug(msgspec.Struct, frozen=True):
    """A mistake that somebody could make."""

    name: str
    breaks: str
    """What goes wrong with it, in a sentence."""
    edits: tuple[Edit, ...]
    tests: tuple[str, ...]
    """Node ids of pytest; one of them must fail."""

    def patched(self, tree: Path) -> Mapping[str, str]:
        """The whole text of each file that it changes, by name; writes nothing. Raises Rotten."""
        texts: dict[str, str] = {}
        for edit in self.edits:
            text = texts.get(edit.file) or (tree / edit.file).read_text(encoding="utf-8")
            if (found := text.count(edit.old)) != 1:
                raise Rotten(f"{self.name}: {edit.file} has {found} times, not once: {edit.old!r}")
            texts[edit.file] = text.replace(edit.old, edit.new)
        return texts


class _File(msgspec.Struct, frozen=True):
    bug: tuple[Bug, ...]


TABLE = Path(__file__).with_name("planted.toml")


def planted_bugs() -> tuple[Bug, ...]:
    """Raises msgspec.ValidationError, OSError."""
    return msgspec.toml.decode(TABLE.read_bytes(), type=_File).bug


def try_bug(copies: TreeCopies, bug: Bug) -> tuple[Bug, SuiteRun]:
    """Raises Rotten."""
    with copies.changed(bug.patched(copies.tree)) as changed:
        return bug, run_tests(changed, bug.tests, "-x")


def _run(run: ProgramRun) -> int:
    args, console, began = run.args, run.console, time.monotonic()
    bugs = [bug for bug in planted_bugs() if args.only is None or args.only in bug.name]
    if not bugs:
        raise WrongArguments(f"no bug has {args.only!r} in its name\nnext:  choose a name from bench/planted.toml")
    with tempfile.TemporaryDirectory(prefix="penstock-sound-") as folder:
        sound = Path(folder) / "sound"
        copy_tree(SOURCE, sound)  # the tree may be edited during the run
        try:
            check_origins(sound)
            for bug in bugs:
                bug.patched(sound)
        except (Rotten, Strayed) as error:
            raise WrongArguments(f"{error}\nnext:  bring bench/planted.toml up to the tree") from error
        without = run_tests(sound, sorted({test for bug in bugs for test in bug.tests}), limit_s=SOUND_TIMEOUT_S)
        if without.code != PASSED:
            console.print(f"error: tests fail without any planted bug\n{without.output}", markup=False)
            return 1
        copies, tried = TreeCopies(sound, Path(folder)), list[tuple[Bug, SuiteRun]]()
        for bug, found in side_by_side([partial(try_bug, copies, bug) for bug in bugs], args.jobs):
            tried.append((bug, found))
            console.print(f"{len(tried)}/{len(bugs)} {bug.name}: {_verdict(found)}", markup=False)
    missed = Ratio.none("bugs that no test caught", sum(found.failure is None for _, found in tried))
    title = f"{len(tried)} planted bugs, {time.monotonic() - began:.0f} s"
    tried.sort(key=lambda each: each[0].name)
    rows = [{"bug": bug.name, "verdict": _verdict(found)} for bug, found in tried]
    told = run.result("planted", title, columns("bug: bug; verdict: verdict"), rows, [missed])
    console.print(table(told))
    return int(told.missed)


def _verdict(run: SuiteRun) -> str:
    return f"caught by {run.failure[0].removeprefix('tests/')}" if run.failure else f"MISSED (pytest: {run.code})"


main = BenchProgram("python -m bench.planted", __doc__, _run).taking(
    Option("--only", metavar="NAME", help="only bugs whose name has this in it"),
    Option("--jobs", type=count, default=1, help="test runs at the same time (default: 1)"),
)

if __name__ == "__main__":
    main.exit()
