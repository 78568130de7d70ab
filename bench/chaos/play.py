"""Playing rows: a few at a time, each within its time limit, each judged from its history."""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from bench.chaos.checker import check
from bench.chaos.history import of_kind
from bench.chaos.stage import FaultRow, FaultTestbed, RowOutcome
from bench.chaos.stalls import stalls_ms


async def play_all(
    rows: Sequence[FaultRow], folder: Path, times: float, jobs: int, console: Console
) -> tuple[list[RowOutcome], float]:
    """Outcomes in the order of `rows`, and seconds taken. Rows that measure latency come last, one by one."""
    began = time.monotonic()
    room = asyncio.Semaphore(jobs)

    async def play(row: FaultRow) -> RowOutcome:
        async with room:
            return _told(console, await play_row(row, folder, times), began)

    together = [row for row in rows if not row.alone]
    # The longest first, so that none is left to run by itself at the end.
    together.sort(key=lambda row: -row.limit_s)
    outcomes = list(await asyncio.gather(*(play(row) for row in together)))
    for row in rows:
        if row.alone:
            outcomes.append(await play(row))
    order = {row.id: number for number, row in enumerate(rows)}
    return sorted(outcomes, key=lambda outcome: order[outcome.row.id]), time.monotonic() - began


async def play_row(row: FaultRow, folder: Path, times: float = 1) -> RowOutcome:
    """Play one row and judge it."""
    stage = FaultTestbed(row, folder / row.id, times)
    began = time.monotonic()
    try:
        async with asyncio.timeout(row.limit_s * max(1, times)) as limit:
            await row.play(stage)
    except Exception as error:  # noqa: BLE001 - a row that breaks is a row that failed; the others are still played
        over = f"not over within {row.limit_s * max(1, times):.0f} s"
        stage.wrong.append(over if limit.expired() else f"broke off: {error!r}")
        (stage.folder / "traceback.txt").write_text(traceback.format_exc())
    stage.history.close()
    if stage.trials < stage.wanted:
        stage.wrong.append(f"{stage.trials} trials instead of {stage.wanted}; {stage.missed} faults did not bite")
    events = stage.history.events
    return RowOutcome(
        row=row,
        trials=stage.trials,
        missed=stage.missed,
        violations=check(
            events,
            resets_allowed=row.resets_allowed,
            budget=row.budget,
            trials=stage.trials,
            houses=stage.houses,
        ),
        answers={
            "refused": len(of_kind(events, "refused", "answered")),
            "unanswered": len(of_kind(events, "unknown")),
            "broken": len(of_kind(events, "cut")),
        },
        wrong=stage.wrong,
        stalls=stalls_ms(events),
        lease_ms=stage.lease_ms,
        figures=stage.figures,
        seconds=time.monotonic() - began,
        folder=stage.folder,
    )


def _told(console: Console, outcome: RowOutcome, began: float) -> RowOutcome:
    verdict = "[green]pass[/]" if outcome.passed else "[red]FAIL[/]"
    elapsed = time.monotonic() - began
    console.print(f"{elapsed:5.0f} s  {outcome.row.id:5} {verdict}  {outcome.row.title} ({outcome.seconds:.0f} s)")
    return outcome
