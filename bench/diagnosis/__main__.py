"""`python -m bench.diagnosis`: does `penstock report` find what is wrong? Records a load on real processes with the
simulated engine and a planted bottleneck (a slow worker, a starved lane, an API process that stands still, or none),
and reads the report of it. Also measures what a record costs on the event loop.

Each case takes --seconds, on processes of its own. With --recorded, one load of --seconds runs on the same processes:
the bottlenecks come one after the other, and the report is asked about the window of each.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import uvloop

from bench.diagnosis.cases import CASES, STEP_MS, WRITTEN_S, DiagnosisCase, judged, planted, unequal
from bench.diagnosis.cost import record_cost_us
from bench.diagnosis.load import Received, Streams, run_load
from bench.diagnosis.raw import raw
from bench.penstock import Penstock
from bench.processes import Died
from bench.program import OUT, BenchProgram, Option, ProgramRun, Testbed, WrongArguments, check_names
from bench.report import Column, Ratio
from telemetry.report.report import RequestReport, Scope, report_of

NAME = "diagnosis"
RECORDED_SLOTS = 4
SAMPLE_S = 10.0
"""As in a deployment: between two windows of a recorded load nothing is asked for a little longer, so that each sample
of a process belongs to one window."""
RECORDED = {
    "nothing": [Streams(4), Streams(2, "batch")],
    "slow worker": [Streams(12)],
    "starved lane": [Streams(16), Streams(4, "batch")],
    "gateway stall": [Streams(6)],
}
"""The phases of a recorded load."""

COLUMNS = (
    Column("case", "planted"),
    Column("requests", "requests"),
    Column("first", "what the report says first"),
    Column("found", "what it says of the bottleneck"),
    Column("named", "named"),
    Column("others", "other bottlenecks"),
    Column("equal", "numbers equal"),
)


Found = tuple[DiagnosisCase, Received, RequestReport, list[dict[str, Any]]]
"""A case, what its clients received, its report, and the raw lines of its requests."""


def settings_of(slots: int, records: Path, sample_s: float) -> dict[str, object]:
    """Of the processes."""
    return {
        "sim.step_ms": STEP_MS,
        "sim.prefill_ms": 10,
        "sim.slots": slots,
        "records.dir": records,
        "records.sample_s": sample_s,
    }


def run_for(port: int, loads: Sequence[Streams], seconds: float) -> Received:
    """Run a load; what its clients received."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run_load(port, loads, seconds))


def record(case: DiagnosisCase, folder: Path, seconds: float) -> Found:
    """Run the load of a case on processes of its own. Raises Died."""
    records, began = folder / "records", time.time()
    settings = settings_of(case.slots, records, min(SAMPLE_S, seconds / 4))
    with Penstock(folder, workers=2, settings=settings) as penstock, planted(case, penstock, records):
        received = run_for(penstock.port, case.loads, seconds)
    return case, received, report_of(records, Scope(began - 1, time.time() + 1), {}), raw(records)


def record_phases(folder: Path, seconds: float, stage: Testbed) -> Iterator[Found]:
    """Run one load whose phases have a bottleneck each, on the same processes. The reports are asked for afterwards.
    Raises Died."""
    records, windows = folder / "records", []
    pause_s = SAMPLE_S + 1.0
    phase_s = seconds / len(RECORDED) - pause_s
    with Penstock(folder, workers=2, settings=settings_of(RECORDED_SLOTS, records, SAMPLE_S)) as penstock:
        for name, loads in RECORDED.items():
            stage.say(name)
            time.sleep(pause_s)
            with planted(CASES[name], penstock, records):
                began = time.time()
                received = run_for(penstock.port, loads, phase_s)
            time.sleep(WRITTEN_S)
            windows.append((CASES[name], received, began, time.time()))
            stage.done()
    for case, received, since, until in windows:
        yield case, received, report_of(records, Scope(since, until), {}), raw(records, since, until)


def row_of(found: Found) -> dict[str, Any]:
    """What the report says of a case, judged."""
    case, received, report, lines = found
    named, others = judged(case, report.advice)
    own = [each for each in report.advice if each.kind == case.kind]
    return {
        "case": case.name,
        "requests": report.figures.whole.requests,
        "first": report.advice[0].title if report.advice else "nothing stands out",
        "found": f"{own[0].title}. {own[0].reason}" if own else "nothing",
        "named": "yes" if named else "no",
        "others": "; ".join(others) or "none",
        "equal": ", ".join(unequal(received, report, lines)) or "yes",
        "wrong": dict(received.wrong),
    }


def _is_good(row: dict[str, Any]) -> bool:
    return row["named"] == "yes" and row["others"] == "none" and row["equal"] == "yes" and not row["wrong"]


def _each(names: Sequence[str], seconds: float, stage: Testbed) -> Iterator[Found]:
    for name in names:
        stage.say(name)
        yield record(CASES[name], stage.room(name), seconds)
        stage.done()


def _run(run: ProgramRun) -> int:
    args, recorded = run.args, run.args.recorded
    names = args.cases.split(",") if args.cases else list(CASES)
    check_names("case", names, CASES)
    if recorded and args.cases:
        raise WrongArguments("--recorded has all cases: leave out --cases")
    if recorded and args.seconds < (least := len(RECORDED) * (SAMPLE_S + 6.0)):
        raise WrongArguments(f"--recorded needs --seconds {least:g} or more")
    with Testbed(run.console, "starting", len(names)) as stage:
        found = (
            record_phases(stage.room("recorded"), args.seconds, stage)
            if recorded
            else _each(names, args.seconds, stage)
        )
        rows = [row_of(each) for each in found]
        if not all(map(_is_good, rows)):
            stage.keep()
    costs = record_cost_us()
    cost = Ratio.held("diagnosis.record", "records on the event loop, us per request", median(costs), rounds=costs)
    share = sum(map(_is_good, rows)) / len(rows)
    named = Ratio.held("diagnosis.named", "share of cases that the report names, and no other", share)
    load = f"one load of {args.seconds:g} s" if recorded else f"{args.seconds:g} s of load each"
    title = f"What `penstock report` says of planted bottlenecks, {load}"
    notes = [f"{row['case']}: {number} x {what}" for row in rows for what, number in row["wrong"].items()]
    name = f"{NAME}-recorded" if recorded else NAME
    kept = run.keep(run.result(name, title, COLUMNS, rows, (named, cost), notes, seconds=args.seconds))
    return int(kept.missed or any(row["wrong"] for row in rows))


main = BenchProgram("penstock bench diagnosis", __doc__, _run, Died, OSError).taking(
    Option("--cases", default="", help=f"which of: {', '.join(CASES)} (separated by commas)"),
    Option("--seconds", type=float, default=12.0, help="load of each case, or of the one recorded load [12]"),
    Option("--recorded", action="store_true", help="one load whose phases have a bottleneck each"),
    OUT,
)

if __name__ == "__main__":
    main.exit()
