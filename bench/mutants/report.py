"""Mutants for people and for programs: each is tried in a copy of the tree; the score, false kills and survivors."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from rich.markup import escape
from rich.table import Table

from bench.reach.reach import Reach, tests_of, within
from bench.report import MachineInfo, commit, cores
from bench.trials import MAX_TESTS_S, PASSED, SLOWER, TIMED_OUT, SuiteRun, TreeCopies, run_changed, unsure


class Mutant(msgspec.Struct, frozen=True):
    """A change drawn by chance."""

    file: str
    operator: str
    text: str
    """The whole file with the change."""

    def name(self, before: str) -> str:
        """What changed, in one line; the same for as long as the changed lines are. Where the file has the changed line
        several times, also which of them. `before` is the file without the change."""
        old, new = self.change(before)
        return f"{self.file}: {old or 'nothing'}{self._which(before)} -> {new or 'nothing'}"

    def _which(self, before: str) -> str:
        old, new = before.splitlines(), self.text.splitlines()
        at = next((place for place, (one, other) in enumerate(zip(old, new, strict=False)) if one != other), len(new))
        same = [place for place, line in enumerate(old) if line.strip() == old[min(at, len(old) - 1)].strip()]
        return f" ({same.index(at) + 1} of {len(same)})" if len(same) > 1 and at in same else ""

    def change(self, before: str) -> tuple[str, str]:
        """The lines that differ, without their indent, each side joined by a slash."""
        sides: tuple[list[str], list[str]] = ([], [])
        for line in difflib.ndiff(before.splitlines(), self.text.splitlines()):
            if line.startswith(("- ", "+ ")):
                sides[line.startswith("+ ")].append(line[2:].strip())
        return " / ".join(sides[0]), " / ".join(sides[1])


HANG_TIMEOUT_S = 300.0
"""Beyond what the chosen tests take: a mutant that makes one wait for ever is noticed."""


@dataclass(frozen=True, slots=True)
class MutantTrial:
    """What the tests made of one mutant."""

    mutant: Mutant
    name: str
    covering: int
    """How many tests run its lines."""
    tried: int
    run: SuiteRun | None
    """None if no test runs it."""
    null: bool = False
    """Nothing was changed: every kill is a false one."""

    @property
    def killed(self) -> bool:
        """What the sound tree shares is not in the run's exit code."""
        return self.run is not None and self.run.code != PASSED


def try_mutant(copies: TreeCopies, mutant: Mutant, reach: Reach, *, null: bool = False) -> MutantTrial:
    """Write it into a copy of the tree and run its tests there; a null one is not written."""
    texts = {mutant.file: mutant.text}
    name = mutant.name((copies.tree / mutant.file).read_text(encoding="utf-8"))
    found = tests_of(copies.tree, reach, texts)
    chosen = within(found, reach.seconds, MAX_TESTS_S)
    if not chosen:
        return MutantTrial(mutant, name, 0, 0, None, null)
    seconds = sum(reach.seconds.get(test, 0.0) for test in chosen)
    run = run_changed(copies, {} if null else texts, chosen, HANG_TIMEOUT_S + SLOWER * seconds)
    return MutantTrial(mutant, name, len(found), len(chosen), run, null)


def killed_of(found: Sequence[MutantTrial]) -> int:
    """How many were noticed."""
    return sum(each.killed for each in found)


def false_kills(nulls: Sequence[MutantTrial]) -> tuple[int, int]:
    """How many null mutants were killed, of how many that tests were run against."""
    return sum(trial.killed for trial in nulls), sum(trial.run is not None for trial in nulls)


def table(found: Sequence[MutantTrial], nulls: Sequence[MutantTrial]) -> Table:
    """One row a room; false kills below."""
    killed, tried = false_kills(nulls)
    caption = f"of {tried} copies without any change, {killed} were killed: each is a false kill"
    view = Table(title=f"{len(found)} mutants on {cores()} cores", caption=caption)
    for column in ("room", "mutants", "killed", "survived", "%"):
        view.add_column(column, justify="left" if column == "room" else "right")
    rooms = sorted({_room(each) for each in found})
    for room in (*rooms, "all"):
        rows = [each for each in found if room in ("all", _room(each))]
        killed = killed_of(rows)
        cells = (len(rows), killed, len(rows) - killed, f"{100 * killed / max(len(rows), 1):.1f}")
        view.add_row(room, *map(str, cells), end_section=room == rooms[-1])
    return view


def survivors(found: Sequence[MutantTrial]) -> list[str]:
    """A line each."""
    return [f"{each.name}\n    {_why(each)}" for each in found if not each.killed]


def line(trial: MutantTrial) -> str:
    """What is said when one is done."""
    seconds = trial.run.seconds if trial.run else 0.0
    verdict = "killed  " if trial.killed else "SURVIVED"
    name = f"nothing changed, tests of {trial.name}" if trial.null else trial.name
    return f"{verdict} {escape(name)} ({seconds:.0f} s, {trial.tried} of {trial.covering} tests): {escape(_by(trial))}"


def as_document(found: Sequence[MutantTrial], nulls: Sequence[MutantTrial], how: Mapping[str, Any]) -> dict[str, Any]:
    """The same for programs."""
    killed = killed_of(found)
    null_killed, null = false_kills(nulls)
    return {
        **msgspec.to_builtins(MachineInfo()),
        "commit": commit(),
        **how,
        "mutants": len(found),
        "killed": killed,
        "percent": round(100 * killed / max(len(found), 1), 1),
        "null": null,
        "null_killed": null_killed,
        "survivors": [each.name for each in found if not each.killed],
    }


def _room(each: MutantTrial) -> str:
    file = each.mutant.file
    return "streaming/lua" if file.endswith(".lua") else file.split("/", 1)[0]


def _why(each: MutantTrial) -> str:
    left = unsure(each.run) if each.run else ""
    return f"{each.tried} of {each.covering} tests that run it tried{left}"


def _by(trial: MutantTrial) -> str:
    if trial.run is None:
        return "no test runs it"
    if trial.run.failure:
        return trial.run.failure[0].removeprefix("tests/")
    if trial.run.code == TIMED_OUT:
        return "a test waits for ever"
    if trial.run.code == 0:
        return f"all pass{unsure(trial.run)}"
    return f"the tests cannot be run (pytest: {trial.run.code})"
