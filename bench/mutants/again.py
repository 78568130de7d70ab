"""Survivors of an earlier sample, tried again on today's tree: its figures then say what was noticed at first, and what
is noticed now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from bench.mutants.report import Mutant, MutantVerdict, Named, killed_by, survivor, unsure_of
from bench.report import MachineInfo, commit

GONE = "its line is not in the tree any more"

Figures = dict[str, Any]


def survivors_of(figures: Figures) -> list[str]:
    """Names of mutants."""
    return [each["mutant"] for each in figures["survivors"]]


def found_again(mutants: Sequence[Mutant], befores: Mapping[str, str], names: Sequence[str]) -> dict[str, Mutant]:
    """By name, those of these mutants that have one of the names; `befores` are the files without a change."""
    found: dict[str, Mutant] = {}
    for mutant in mutants:
        name = mutant.name(befores[mutant.file])
        if name in names:
            found.setdefault(name, mutant)
    return found


def merged(
    figures: Figures,
    found: Sequence[Named],
    gone: Sequence[str],
    verdicts: Mapping[str, MutantVerdict],
    how: Mapping[str, Any],
) -> Figures:
    """The figures of a sample, with these trials of its survivors in the place of earlier ones. `before` keeps what was
    found at first, `again` counts what came of its survivors. A mutant whose line is `gone` still counts as not
    noticed."""
    tried = {each.name: each for each in found}
    rows = [_survivor(row, tried.get(row["mutant"]), gone, verdicts) for row in figures["survivors"]]
    left = [row for row in rows if row is not None]
    equivalent = sum(verdicts[row["mutant"]].equivalent for row in left if row["mutant"] in verdicts)
    killed = figures["mutants"] - len(left)
    counted = figures["mutants"] - equivalent
    first = {key: figures[key] for key in ("date", "commit", "equivalent", "killed", "percent") if key in figures}
    before = figures.get("before") or first | {"survivors": len(figures["survivors"])}
    now = {"noticed": before["survivors"] - len(left), "gone": sum(row["why"] == GONE for row in left)}
    return {
        **figures,
        "equivalent": equivalent,
        "killed": killed,
        "percent": round(100 * killed / max(counted, 1), 1),
        "unsure": sorted({*figures["unsure"], *unsure_of([each.trial for each in found])}),
        "survivors": left,
        "killed_by": figures["killed_by"] | killed_by(found),
        "before": before,
        "again": {**msgspec.to_builtins(MachineInfo()), "commit": commit(), **how, **now},
    }


def _survivor(
    row: dict[str, str], tried: Named | None, gone: Sequence[str], verdicts: Mapping[str, MutantVerdict]
) -> dict[str, str] | None:
    """None if it is noticed now."""
    if tried is not None:
        return None if tried.trial.killed and tried.counts else survivor(tried)
    if row["mutant"] in gone and row["mutant"] not in verdicts:
        return {**row, "why": GONE}
    return row
