"""Outcomes for people and for programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from rich.table import Table

from bench.chaos.checker import DOUBLED, LOST, SPLICED, WRONG_ANSWER, WRONG_END
from bench.chaos.stage import RowOutcome
from bench.report import MachineInfo, commit, cores
from bench.stats import percentile

MAX_SHOWN = 12
RUN = ("date", "commit", "cores", "python", "busy")
"""When, of which tree and on what a row was played: it may be repeated on another day and machine than those of its
run."""
UNKEPT = ("injected", "seconds", "stall_p99_leases")
"""Said by the row itself, or computed from what is kept."""
COUNTS = ("trials", "missed", "lost", "doubled", "spliced", "wrong_ends", "wrong_answers")


def table(outcomes: Sequence[RowOutcome], seconds: float) -> Table:
    """One row per fault."""
    failed = sum(not outcome.passed for outcome in outcomes)
    title = f"{len(outcomes)} faults, {failed} failed, {seconds:.0f} s on {cores()} cores"
    view = Table(title=title)
    view.add_column("fault")
    view.add_column("injected", max_width=44)
    counts = ("trials", "no effect", "lost", "doubled", "spliced", "wrong ends", "wrong answers", "refused")
    for name in (*counts, "stall p50 ms", "p99 ms", "p99 x lease"):
        view.add_column(name, justify="right")
    view.add_column("", no_wrap=True)
    for outcome in outcomes:
        row = _figures(outcome)
        cells = (*COUNTS[1:], "refused", "stall_p50_ms", "stall_p99_ms", "stall_p99_leases")
        numbers = ["-" if row[name] is None else str(row[name]) for name in cells]
        verdict = "[green]pass[/]" if outcome.passed else "[red]FAIL[/]"
        view.add_row(
            f"{outcome.row.id} {outcome.row.title}", outcome.row.inject, str(outcome.trials), *numbers, verdict
        )
    return view


def what_failed(outcome: RowOutcome) -> str:
    """Why, and where the history and logs are."""
    reasons = [*outcome.wrong, *(str(violation) for violation in outcome.violations)]
    more = f"\n  and {len(reasons) - MAX_SHOWN} more" if len(reasons) > MAX_SHOWN else ""
    shown = "\n  ".join(reasons[:MAX_SHOWN])
    return f"\n{outcome.row.id} failed:\n  {shown}{more}\n  history: {outcome.folder / 'history.jsonl'}, logs beside it"


def as_document(outcomes: Sequence[RowOutcome], seconds: float, busy: int = 0) -> dict[str, Any]:
    """The same figures for programs; nothing of this machine but its size."""
    run = {**msgspec.to_builtins(MachineInfo()), "commit": commit(), "busy": busy}
    return {
        **run,
        "seconds": round(seconds),
        "passed": all(outcome.passed for outcome in outcomes),
        "faults": [
            {
                "id": outcome.row.id,
                **run,
                "title": outcome.row.title,
                "injected": outcome.row.inject,
                "passed": outcome.passed,
                **_figures(outcome),
                "lease_ms": outcome.lease_ms,
                "measured": outcome.figures,
                "wrong": [*outcome.wrong, *(str(violation) for violation in outcome.violations)][:MAX_SHOWN],
                "seconds": round(outcome.seconds),
            }
            for outcome in outcomes
        ],
    }


def failed_in(found: Mapping[str, Any]) -> list[str]:
    """The rows of a run that did not pass."""
    return [fault["id"] for fault in found["faults"] if not fault["passed"]]


def small(found: Mapping[str, Any]) -> dict[str, Any]:
    """What the file keeps: of each row its title and what is not 0, empty, or the same as of the whole run."""

    def is_kept(name: str, value: Any) -> bool:
        if name in RUN:
            return name not in found or value != found[name]
        return name == "passed" or (name not in UNKEPT and value not in (0, None, [], {}))

    def kept(fault: Mapping[str, Any]) -> dict[str, Any]:
        before = [kept(play) for play in fault.get("before", ())]
        return {name: value for name, value in {**fault, "before": before}.items() if is_kept(name, value)}

    return {**found, "faults": [kept(fault) for fault in found["faults"]]}


def merged(before: Mapping[str, Any], found: Mapping[str, Any], *, whole: bool = False) -> dict[str, Any]:
    """A whole run that takes another's place, or some rows that were repeated in it. No row loses a failure that it
    ever showed."""
    rows, old = _rows(found), _rows(before)
    seconds = found["seconds"] + (0 if whole else before["seconds"])
    order = [*rows] if whole else [*old, *(row for row in rows if row not in old)]
    faults = [_following(old.get(row), rows.get(row)) for row in order]
    passed = all(fault["passed"] for fault in faults)
    return {**(found if whole else before), "seconds": seconds, "passed": passed, "faults": faults}


def _rows(run: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """By id, each with the day, tree and machine of its run where it has none of its own."""
    own = {name: run[name] for name in RUN if name in run}
    return {
        fault["id"]: {**own, **fault, "before": [{**own, **play} for play in fault.get("before", ())]}
        for fault in run["faults"]
    }


def _following(old: Mapping[str, Any] | None, new: Mapping[str, Any] | None) -> dict[str, Any]:
    """A row as it was played last, with everything that it showed when it failed before, oldest first."""
    if old is None or new is None:
        return dict(new or old or {})
    failed = [] if old["passed"] else [{name: value for name, value in old.items() if name != "before"}]
    return {**new, "before": [*old["before"], *failed]}


def _figures(outcome: RowOutcome) -> dict[str, Any]:
    p50, p99 = (percentile(outcome.stalls, share) for share in (0.5, 0.99))
    return {
        "trials": outcome.trials,
        "missed": outcome.missed,
        "lost": outcome.count(LOST),
        "doubled": outcome.count(DOUBLED),
        "spliced": outcome.count(SPLICED),
        "wrong_ends": outcome.count(WRONG_END),
        "wrong_answers": outcome.count(WRONG_ANSWER),
        **outcome.answers,
        "violations": len(outcome.violations),
        "readers_across_the_fault": len(outcome.stalls),
        "stall_p50_ms": None if p50 is None else round(p50),
        "stall_p99_ms": None if p99 is None else round(p99),
        "stall_p99_leases": None if p99 is None else round(p99 / outcome.lease_ms, 1),
    }
