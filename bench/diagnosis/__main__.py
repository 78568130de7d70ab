"""`python -m bench.diagnosis`: does `penstock report` find what is wrong? Records a load on real processes with the
simulated engine and a planted bottleneck (a slow worker, a starved lane, an API process that stands still, or none),
and reads the report of it. Also measures what a record costs on the event loop.

Each case takes --seconds; `--seconds 600` is the ten-minute load.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from threading import Event, Thread
from typing import Any

import uvloop

from bench.diagnosis.cost import record_cost_us
from bench.diagnosis.load import Received, Streams, run_load
from bench.penstock import Penstock, start_worker, variables
from bench.processes import Died
from bench.program import OUT, BenchProgram, Option, ProgramRun, Testbed, check_names
from bench.report import Column, Ratio
from telemetry.report.advice import Advice
from telemetry.report.report import RequestReport, Scope, report_of

NAME = "diagnosis"
SLOW_WORKER = "worker-slow"
STALL_S, STALL_EVERY_S = 0.6, 2.5
BOTTLENECKS = ("slow_worker", "starved_lane", "gateway_stall", "full_pool", "idle_pool", "long_prompts")
"""Kinds of advice that a case must not give but for its own."""


@dataclass(frozen=True)
class DiagnosisCase:
    """A planted bottleneck, and the advice that names it."""

    name: str
    loads: Sequence[Streams]
    kind: str
    """Of the advice; "": none is expected."""
    named: str
    """What its title must name."""
    allowed: tuple[str, ...] = ()
    """Other kinds that are true as well."""
    slots: int = 16
    slow: bool = False
    stalled: bool = False


CASES = {
    case.name: case
    for case in (
        DiagnosisCase("nothing", [Streams(4), Streams(2, "batch")], "", ""),
        DiagnosisCase("slow worker", [Streams(48)], "slow_worker", SLOW_WORKER, slow=True),
        DiagnosisCase(
            "starved lane", [Streams(8), Streams(4, "batch")], "starved_lane", "Lane batch", ("full_pool",), slots=2
        ),
        DiagnosisCase("gateway stall", [Streams(6)], "gateway_stall", "api-1 stood still", stalled=True),
    )
}

COLUMNS = (
    Column("case", "planted"),
    Column("requests", "requests"),
    Column("found", "what the report says first"),
    Column("named", "named"),
    Column("others", "other bottlenecks"),
    Column("equal", "numbers equal"),
)


@contextmanager
def stalling(pid: int) -> Iterator[None]:
    """Stop a process for STALL_S, again and again, as a machine that is short of CPU does."""
    done = Event()

    def stall() -> None:
        while not done.wait(STALL_EVERY_S):
            os.kill(pid, signal.SIGSTOP)
            done.wait(STALL_S)
            os.kill(pid, signal.SIGCONT)

    thread = Thread(target=stall)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def record(case: DiagnosisCase, folder: Path, seconds: float) -> tuple[Received, RequestReport, Path]:
    """Run the load of a case on processes of its own; what its clients received, and the report. Raises Died."""
    records = folder / "records"
    settings = {
        "sim.step_ms": 10,
        "sim.prefill_ms": 10,
        "sim.slots": case.slots,
        "records.dir": records,
        "records.sample_s": min(10.0, seconds / 4),
    }
    began = time.time()
    with Penstock(folder, workers=2, settings=settings) as penstock:
        if case.slow:
            penstock.processes.environ |= variables({"sim.step_ms": 40})
            start_worker(penstock.processes, SLOW_WORKER)
            penstock.processes.until(lambda: _has_sample(records, SLOW_WORKER), f"{SLOW_WORKER} to be ready")
        stall: AbstractContextManager[None] = nullcontext()
        if case.stalled:
            stall = stalling(penstock.processes.pids()["api-1"])
        with stall, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            received = runner.run(run_load(penstock.port, case.loads, seconds))
    return received, report_of(records, Scope(began - 1, time.time() + 1), {}), records


def _has_sample(records: Path, process: str) -> bool:
    return any(f'"process":"{process}"' in path.read_text() for path in records.glob("*-worker-*.jsonl"))


def raw(records: Path) -> list[dict[str, Any]]:
    """The lines of requests, read without any code of the report."""
    rows = []
    for path in records.glob("*.jsonl"):
        for line in path.read_bytes().splitlines():
            with contextlib.suppress(ValueError):
                row = json.loads(line)
                rows += [row] if row["kind"] == "request" else []
    return rows


def unequal(received: Received, report: RequestReport, rows: Sequence[dict[str, Any]]) -> list[str]:
    """Figures of the report that differ from the raw lines, or these from what clients received."""
    whole, done = report.figures.whole, [row for row in rows if row["state"] == "completed"]
    waits = sorted((row["started_us"] - row["accepted_us"]) / 1000 for row in done)
    checks: Sequence[tuple[str, object, object]] = (
        ("requests", whole.requests, len(rows)),
        ("ids", {row["id"] for row in done}, received.answers),
        ("one record each", len({row["id"] for row in rows}), len(rows)),
        ("tokens", whole.completion_tokens, received.tokens),
        ("raw tokens", sum(row["completion_tokens"] for row in done), received.tokens),
        ("longest wait", whole.wait.max if whole.wait else None, max(0.0, waits[-1]) if waits else None),
    )
    return [name for name, one, two in checks if one != two]


def judged(case: DiagnosisCase, advice: Sequence[Advice]) -> tuple[bool, list[str]]:
    """Whether the report names what was planted, and which other bottlenecks it names."""
    own = [each for each in advice if each.kind == case.kind and case.named in each.title]
    others = [each.title for each in advice if each.kind in BOTTLENECKS and each not in own]
    wrong = [each.title for each in advice if each.title in others and each.kind not in case.allowed]
    return bool(own) or not case.kind, wrong


def _run(run: ProgramRun) -> int:
    args = run.args
    names = args.cases.split(",") if args.cases else list(CASES)
    check_names("case", names, CASES)
    rows: list[dict[str, Any]] = []
    with Testbed(run.console, "starting", len(names)) as stage:
        for name in names:
            case = CASES[name]
            stage.say(name)
            received, report, records = record(case, stage.room(name), args.seconds)
            named, others = judged(case, report.advice)
            unlike = unequal(received, report, raw(records))
            own = [each for each in report.advice if each.kind == case.kind]
            said = next(iter(own or report.advice), None)
            rows.append(
                {
                    "case": name,
                    "requests": report.figures.whole.requests,
                    "found": f"{said.title}. {said.reason}" if said else "nothing stands out",
                    "named": "yes" if named else "no",
                    "others": "; ".join(others) or "none",
                    "equal": ", ".join(unlike) or "yes",
                    "wrong": dict(received.wrong),
                }
            )
            if not named or others or unlike or received.wrong:
                stage.keep()
            stage.done()
    costs = record_cost_us()
    cost = Ratio.held("diagnosis.record", "records on the event loop, us per request", median(costs), rounds=costs)
    good = [row["named"] == "yes" and row["others"] == "none" and row["equal"] == "yes" for row in rows]
    found = Ratio.held("diagnosis.named", "share of cases that the report names, and no other", sum(good) / len(good))
    title = f"What `penstock report` says of planted bottlenecks, {args.seconds:g} s of load each"
    notes = [f"{row['case']}: {number} x {what}" for row in rows for what, number in row["wrong"].items()]
    kept = run.keep(run.result(NAME, title, COLUMNS, rows, (found, cost), notes, seconds=args.seconds))
    return int(kept.missed or any(row["wrong"] for row in rows))


main = BenchProgram("penstock bench diagnosis", __doc__, _run, Died, OSError).taking(
    Option("--cases", default="", help=f"which of: {', '.join(CASES)} (separated by commas)"),
    Option("--seconds", type=float, default=12.0, help="load of each case [12]"),
    OUT,
)

if __name__ == "__main__":
    main.exit()
