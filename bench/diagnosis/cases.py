"""Cases of a diagnosis: planted bottlenecks, how each is planted, and what counts as named and as equal."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Any

from bench.diagnosis.load import Received, Streams
from bench.diagnosis.raw import differing
from bench.penstock import Penstock, start_worker, variables
from telemetry.report.finding import Advice
from telemetry.report.report import RequestReport

SLOW_WORKER = "worker-slow"
STALL_S, STALL_EVERY_S = 0.6, 2.5
STEP_MS = 10
WRITTEN_S = 1.0
"""After so long a process has written the records of what has ended: it writes twice a second."""
BOTTLENECKS = (
    *("slow_worker", "starved_lane", "gateway_stall", "full_pool", "idle_pool", "long_prompts"),
    *("waiting", "retries", "short_requests", "prompts"),
)
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


@contextmanager
def planted(case: DiagnosisCase, penstock: Penstock, records: Path) -> Iterator[None]:
    """The bottleneck of a case, in processes that run. Raises Died."""
    if case.slow:
        penstock.processes.environ |= variables({"sim.step_ms": 4 * STEP_MS})
        start_worker(penstock.processes, SLOW_WORKER)
        penstock.processes.until(lambda: _has_sample(records, SLOW_WORKER), f"{SLOW_WORKER} to be ready")
    stall: AbstractContextManager[None] = nullcontext()
    if case.stalled:
        stall = stalling(penstock.processes.pids()["api-1"])
    with stall:
        yield
    if case.slow:
        time.sleep(WRITTEN_S)
        penstock.processes.kill(SLOW_WORKER)


def _has_sample(records: Path, process: str) -> bool:
    return any(f'"process":"{process}@' in path.read_text() for path in records.glob("*-worker-*.jsonl"))


def unequal(received: Received, report: RequestReport, rows: Sequence[dict[str, Any]]) -> list[str]:
    """Figures of the report that differ from the raw lines, or these from what clients received."""
    whole, done = report.figures.whole, [row for row in rows if row["state"] == "completed"]
    checks: Sequence[tuple[str, object, object]] = (
        ("requests", whole.requests, len(rows)),
        ("ids", {row["id"] for row in done}, received.answers),
        ("one record each", len({row["id"] for row in rows}), len(rows)),
        ("tokens", whole.completion_tokens, received.tokens),
        ("raw tokens", sum(row["completion_tokens"] for row in done), received.tokens),
    )
    return [*(name for name, one, two in checks if one != two), *differing(whole, rows)]


def judged(case: DiagnosisCase, advice: Sequence[Advice]) -> tuple[bool, list[str]]:
    """Whether the report names what was planted, and which other bottlenecks it names."""
    own = [each for each in advice if each.kind == case.kind and case.named in each.title]
    others = [each.title for each in advice if each.kind in BOTTLENECKS and each not in own]
    wrong = [each.title for each in advice if each.title in others and each.kind not in case.allowed]
    return bool(own) or not case.kind, wrong
