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
MACHINE = ("cores", "python", "busy")
"""What a play ran on: a row may be repeated on another machine than that of its run."""
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


def _failures_before(fault: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What a row that was repeated had shown before, oldest first: failures, and plays that passed before one."""
    if "before" in fault:
        return list(fault["before"])
    # A run of an older form kept only the reasons of a failure.
    unknown = dict.fromkeys((*COUNTS, "refused", "unanswered", "broken"), "-")
    why: dict[str, Any] = {"measured": {}, "stall_p50_ms": None, "wrong": fault.get("wrong_before")}
    return [unknown | why] if fault.get("wrong_before") else []


def what_failed(outcome: RowOutcome) -> str:
    """Why, and where the history and logs are."""
    reasons = [*outcome.wrong, *(str(violation) for violation in outcome.violations)]
    more = f"\n  and {len(reasons) - MAX_SHOWN} more" if len(reasons) > MAX_SHOWN else ""
    shown = "\n  ".join(reasons[:MAX_SHOWN])
    return f"\n{outcome.row.id} failed:\n  {shown}{more}\n  history: {outcome.folder / 'history.jsonl'}, logs beside it"


def as_document(outcomes: Sequence[RowOutcome], seconds: float, busy: int = 0) -> dict[str, Any]:
    """The same figures for programs; nothing of this machine but its size."""
    machine = {**msgspec.to_builtins(MachineInfo()), "busy": busy}
    return {
        **machine,
        "seconds": round(seconds),
        "passed": all(outcome.passed for outcome in outcomes),
        "faults": [
            {
                "id": outcome.row.id,
                "date": machine["date"],
                "commit": commit(),
                **{name: machine[name] for name in MACHINE},
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


def merged(before: Mapping[str, Any], found: Mapping[str, Any], *, whole: bool = False) -> dict[str, Any]:
    """A whole run that takes another's place, or some rows that were repeated in it. No row loses a failure that it
    ever showed."""
    rows = {fault["id"]: fault for fault in found["faults"]}
    old = {fault["id"]: fault for fault in before["faults"]}
    seconds = found["seconds"] + (0 if whole else before["seconds"])
    order = [*rows] if whole else [*old, *(row for row in rows if row not in old)]
    faults = [_following(old.get(row), rows.get(row), before["date"], whole) for row in order]
    passed = all(fault["passed"] for fault in faults)
    return {**(found if whole else before), "seconds": seconds, "passed": passed, "faults": faults}


def _following(old: Mapping[str, Any] | None, new: Mapping[str, Any] | None, day: str, whole: bool) -> dict[str, Any]:
    """A row as it was played last, with everything that it showed when it failed before; a row of an older file has no
    day of its own but that of its run."""
    if old is None or new is None:
        return dict(new or old or {})
    failures = _failures_before(old)
    if not old["passed"]:
        play = {name: value for name, value in old.items() if name not in ("before", "wrong_before")}
        failures.append({"date": day, **play})
    wrong = None if whole else old.get("wrong_before") if old["passed"] else old["wrong"]
    return {**new, **({"wrong_before": wrong} if wrong else {}), **({"before": failures} if failures else {})}


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
