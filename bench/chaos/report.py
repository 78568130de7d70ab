"""Outcomes for people and for programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from rich.console import RenderableType

from bench import report
from bench.chaos.checker import DOUBLED, LOST, SPLICED, WRONG_ANSWER, WRONG_END
from bench.chaos.stage import RowOutcome
from bench.report import MachineInfo, columns, commit
from bench.stats import percentile

MAX_SHOWN = 12
UNKEPT = ("injected", "seconds", "stall_p99_leases")
"""Said by the row itself, or computed from what is kept."""
COLUMNS = columns("""
    fault: fault; injected: injected; trials: trials; missed: no effect; lost: lost; doubled: doubled; spliced: spliced;
    wrong_ends: wrong ends; wrong_answers: wrong answers; refused: refused; stall_p50_ms: stall p50 ms;
    stall_p99_ms: p99 ms; stall_p99_leases: p99 x lease; verdict: verdict
""")


def table(outcomes: Sequence[RowOutcome], seconds: float) -> RenderableType:
    """One row per fault."""
    failed = sum(not outcome.passed for outcome in outcomes)
    rows = [
        {"fault": f"{outcome.row.id} {outcome.row.title}", "injected": outcome.row.inject, **_figures(outcome)}
        | {"verdict": "pass" if outcome.passed else "FAIL"}
        for outcome in outcomes
    ]
    title = f"{len(outcomes)} faults, {failed} failed, {seconds:.0f} s"
    return report.table(report.Report(name="chaos", title=title, command="", columns=COLUMNS, rows=rows))


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
    """What the file keeps: of each row what is not 0 or empty, and not said by the row itself."""

    def kept(fault: Mapping[str, Any]) -> dict[str, Any]:
        before = [kept(play) for play in fault.get("before", ())]
        whole = {name: value for name, value in {**fault, "before": before}.items() if name not in UNKEPT}
        return {name: value for name, value in whole.items() if name == "passed" or value not in (0, None, [], {})}

    return {**found, "faults": [kept(fault) for fault in found["faults"]]}


def merged(before: Mapping[str, Any], found: Mapping[str, Any], *, whole: bool = False) -> dict[str, Any]:
    """A whole run that takes another's place, or some rows that were repeated in it. No row loses a failure that it
    ever showed."""
    old, new = ({fault["id"]: fault for fault in run["faults"]} for run in (before, found))
    order = [*new] if whole else [*old, *(row for row in new if row not in old)]
    faults = [_following(old.get(row), new.get(row)) for row in order]
    return {**(found if whole else before), "passed": all(fault["passed"] for fault in faults), "faults": faults}


def _following(old: Mapping[str, Any] | None, new: Mapping[str, Any] | None) -> dict[str, Any]:
    """A row as it was played last, with everything that it showed when it failed before, oldest first."""
    if old is None or new is None:
        return dict(new or old or {})
    failed = [] if old["passed"] else [{name: value for name, value in old.items() if name != "before"}]
    return {**new, "before": [*old.get("before", ()), *failed]}


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
