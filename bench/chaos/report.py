"""Outcomes for people and for programs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from rich.table import Table

from bench.chaos.checker import DOUBLED, LOST, WRONG_END
from bench.chaos.stage import Outcome
from bench.chaos.stalls import percentile
from bench.report import Machine

MOST_SHOWN = 12


def table(outcomes: Sequence[Outcome], seconds: float) -> Table:
    """One row per fault."""
    failed = sum(not outcome.passed for outcome in outcomes)
    title = f"{len(outcomes)} faults, {failed} failed, {seconds:.0f} s on {os.cpu_count()} cores"
    view = Table(title=title)
    view.add_column("fault")
    view.add_column("injected", max_width=44)
    for name in ("trials", "lost", "doubled", "wrong ends", "stall p50 ms", "p99 ms", "p99 x lease"):
        view.add_column(name, justify="right")
    view.add_column("", no_wrap=True)
    for outcome in outcomes:
        row = _figures(outcome)
        cells = ("lost", "doubled", "wrong_ends", "stall_p50_ms", "stall_p99_ms", "stall_p99_leases")
        numbers = ["-" if row[name] is None else str(row[name]) for name in cells]
        verdict = "[green]pass[/]" if outcome.passed else "[red]FAIL[/]"
        view.add_row(
            f"{outcome.row.id} {outcome.row.title}", outcome.row.inject, str(outcome.trials), *numbers, verdict
        )
    return view


def as_markdown(found: Mapping[str, Any]) -> str:
    """The table of a run that was written with `as_json`."""
    repeated = [fault["id"] for fault in found["faults"] if fault.get("wrong_before") and fault["passed"]]
    again = f" {', '.join(repeated)} failed at first and passed when repeated alone." if repeated else ""
    lines = [
        f"Run of {found['date']}, {found['cores']} cores, Python {found['python']}: {len(found['faults'])} rows in "
        f"{found['seconds']} s, {'every one passed' if found['passed'] else 'NOT ALL PASSED'}.{again}",
        "",
        "| row | fault | trials | lost | doubled | wrong ends | stall p50 / p99 ms | also measured |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for fault in found["faults"]:
        stall = "-" if fault["stall_p50_ms"] is None else f"{fault['stall_p50_ms']} / {fault['stall_p99_ms']}"
        also = ", ".join(f"{name} {value}" for name, value in fault["measured"].items())
        counts = " | ".join(str(fault[name]) for name in ("trials", "lost", "doubled", "wrong_ends"))
        verdict = "" if fault["passed"] else " **failed**"
        lines.append(
            f"| {fault['id']}{verdict} | {fault['title']}: {fault['injected']} | {counts} | {stall} | {also} |"
        )
    return "\n".join(lines)


def what_failed(outcome: Outcome) -> str:
    """Why, and where the history and logs are."""
    reasons = [*outcome.wrong, *(str(violation) for violation in outcome.violations)]
    more = f"\n  and {len(reasons) - MOST_SHOWN} more" if len(reasons) > MOST_SHOWN else ""
    shown = "\n  ".join(reasons[:MOST_SHOWN])
    return f"\n{outcome.row.id} failed:\n  {shown}{more}\n  history: {outcome.folder / 'history.jsonl'}, logs beside it"


def as_document(outcomes: Sequence[Outcome], seconds: float) -> dict[str, Any]:
    """The same figures for programs; nothing of this machine but its size."""
    return {
        **msgspec.to_builtins(Machine()),
        "seconds": round(seconds),
        "passed": all(outcome.passed for outcome in outcomes),
        "faults": [
            {
                "id": outcome.row.id,
                "title": outcome.row.title,
                "injected": outcome.row.inject,
                "passed": outcome.passed,
                **_figures(outcome),
                "lease_ms": outcome.lease_ms,
                "measured": outcome.figures,
                "wrong": [*outcome.wrong, *(str(violation) for violation in outcome.violations)][:MOST_SHOWN],
                "seconds": round(outcome.seconds),
            }
            for outcome in outcomes
        ],
    }


def failed_in(found: Mapping[str, Any]) -> list[str]:
    """The rows of a run that did not pass."""
    return [fault["id"] for fault in found["faults"] if not fault["passed"]]


def merged(before: Mapping[str, Any], again: Mapping[str, Any]) -> dict[str, Any]:
    """A run with some of its rows repeated; these say why they were."""
    rows = {fault["id"]: fault for fault in again["faults"]}
    faults = [
        {**rows[fault["id"]], "wrong_before": fault["wrong"]} if fault["id"] in rows else fault
        for fault in before["faults"]
    ]
    passed = all(fault["passed"] for fault in faults)
    return {**before, "seconds": before["seconds"] + again["seconds"], "passed": passed, "faults": faults}


def _figures(outcome: Outcome) -> dict[str, Any]:
    p50, p99 = (percentile(outcome.stalls, share) for share in (0.5, 0.99))
    return {
        "trials": outcome.trials,
        "lost": outcome.count(LOST),
        "doubled": outcome.count(DOUBLED),
        "wrong_ends": outcome.count(WRONG_END),
        "violations": len(outcome.violations),
        "readers_across_the_fault": len(outcome.stalls),
        "stall_p50_ms": None if p50 is None else round(p50),
        "stall_p99_ms": None if p99 is None else round(p99),
        "stall_p99_leases": None if p99 is None else round(p99 / outcome.lease_ms, 1),
    }
