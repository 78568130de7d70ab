"""`python -m bench.replay`: a trace in BurstGPT's columns, or requests made to look like one, against a live endpoint.

An open loop: requests leave at their times. Conversations are of class interactive, API calls of class standard.
Without --base-url it is a Penstock started for it, with a simulated engine. PENSTOCK_API_KEY is sent as a bearer token.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from bench.http import JOB_ID
from bench.load.streams import StreamedAnswer
from bench.processes import Died
from bench.program import BenchProgram, Option, ProgramRun, Testbed
from bench.report import Ratio, columns
from bench.stats import spread
from bench.table1.client import HttpConnection, NotAServer, TargetServer, ask, seen, servers
from planner.simulator.trace import Malformed, Trace, TraceRow, WorkloadShape, cut, requests
from scheduler.policy.snapshot import TARGETS

MAX_OPEN = 2000
"""Requests at once; beyond that one is not sent, and counted as such."""
TOO_MANY = "not sent: too many are open"


@dataclass(frozen=True, slots=True)
class ReplayedRequest:
    """One request, and what followed it. `late_s`: it left so much after its time; None: it did not."""

    request: TraceRow
    answer: StreamedAnswer
    late_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayLimits:
    """No request leaves later than `limit_s`; each has `timeout_s` to be answered."""

    limit_s: float = 60.0
    timeout_s: float = 60.0


async def replay(
    server: TargetServer,
    requests: Iterable[TraceRow],
    bounds: ReplayLimits,
    sent: Callable[[], None],
    *,
    lanes: bool = True,
) -> list[ReplayedRequest]:
    """Ask for all of them at their times. `lanes`: say which lane; only Penstock understands that."""
    asking = _Asking(server, bounds, lanes=lanes)
    began = time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        for request in requests:
            if request.at > bounds.limit_s:
                break
            await asyncio.sleep(max(0.0, began + request.at - time.monotonic()))
            tasks.create_task(asking.ask(request, began + request.at))
            sent()
    asking.close()
    return asking.asked


class _Asking:
    def __init__(self, server: TargetServer, bounds: ReplayLimits, *, lanes: bool) -> None:
        self.asked: list[ReplayedRequest] = []
        self._server, self._bounds, self._lanes = server, bounds, lanes
        self._idle: list[HttpConnection] = []
        self._open = 0

    async def ask(self, request: TraceRow, due: float) -> None:
        if self._open >= MAX_OPEN:
            self.asked.append(ReplayedRequest(request, StreamedAnswer(request.answer, due, fault=TOO_MANY), None))
            return
        self._open += 1
        line = self._idle.pop() if self._idle else HttpConnection(self._server)
        answer = await ask(line, self._body(request), request.answer, self._bounds.timeout_s)
        self._open -= 1
        if answer.fault:  # what its connection may still bring belongs to no later answer
            line.close()
        else:
            self._idle.append(line)
        self.asked.append(ReplayedRequest(request, answer, answer.sent - due))

    def _body(self, request: TraceRow) -> bytes:
        """A prompt of one word a token: what a trace has is lengths."""
        messages = [{"role": "user", "content": "water " * request.prompt}]
        queue = {"queue": {"priority": request.lane}} if self._lanes else {}
        return self._server.chat(messages, request.answer, **queue)

    def close(self) -> None:
        """All connections."""
        for line in self._idle:
            line.close()


MAX_TIMINGS = 500
"""Of each class that the server is asked for."""

COLUMNS = columns("""
    lane: class; asked: asked; failed: failed; ttft_p50_ms: TTFT p50 ms; ttft_p99_ms: TTFT p99 ms;
    queue_p50_ms: queue p50 ms; queue_p99_ms: queue p99 ms; target_s: target, s .0; within: in time, % .2;
    tokens: tokens
""")


def job_of(asked: ReplayedRequest) -> str:
    """Penstock's name for it; "" if it has none."""
    head = b"".join(part for _, part in asked.answer.arrivals[:2])
    found = JOB_ID.search(head)
    return found[1].decode() if found else ""


def queue_times(server: TargetServer, asked: Sequence[ReplayedRequest]) -> dict[str, list[float]]:
    """Milliseconds in the queue by class, by the server's clock, for at most so many; nothing where the server is not
    Penstock, or behind TLS. Raises NotAServer, OSError."""
    found: dict[str, list[float]] = {}
    if server.tls or not any(job_of(each) for each in asked):
        return found
    for lane, mine in by_lane(asked).items():
        jobs = [job for each in mine if not each.answer.fault and (job := job_of(each))]
        chosen = jobs[:: max(1, -(-len(jobs) // MAX_TIMINGS))]
        timings = server.get(f"/v1/jobs/{job}/timing" for job in chosen)
        found[lane] = [ms for timing in timings if (ms := timing["parts_ms"].get("queue")) is not None]
    return found


def by_lane(asked: Iterable[ReplayedRequest]) -> dict[str, list[ReplayedRequest]]:
    """In the order of the lanes."""
    found: dict[str, list[ReplayedRequest]] = {lane: [] for lane in TARGETS}
    for each in asked:
        found[each.request.lane].append(each)
    return {lane: mine for lane, mine in found.items() if mine}


def row(lane: str, asked: Sequence[ReplayedRequest], queued_ms: Sequence[float]) -> dict[str, Any]:
    """One class. In time is who was begun within the class's target: by the time in the queue where the server tells
    it, else by the first token; what failed was not."""
    answers = [seen(each.answer) for each in asked]
    good = [answer for answer in answers if not answer.fault]
    ttft = spread([1e3 * answer.ttft for answer in good])
    queue, target_ms = spread(queued_ms), 1e3 * TARGETS[lane]
    waits = queued_ms or [1e3 * answer.ttft for answer in good]
    share = sum(ms <= target_ms for ms in waits) / len(waits) if waits else 0.0
    return {
        "lane": lane,
        "asked": len(asked),
        "failed": len(asked) - len(good),
        "faults": dict(Counter(answer.fault for answer in answers if answer.fault).most_common(3)),
        "ttft_p50_ms": ttft.p50 if good else None,
        "ttft_p99_ms": ttft.p99 if good else None,
        "queue_p50_ms": queue.p50 if queued_ms else None,
        "queue_p99_ms": queue.p99 if queued_ms else None,
        "target_s": TARGETS[lane],
        "within": 100 * share * len(good) / len(asked),
        "tokens": sum(answer.tokens for answer in good),
    }


def rows(asked: Sequence[ReplayedRequest], queued_ms: Mapping[str, Sequence[float]]) -> list[dict[str, Any]]:
    """One for each class that was asked for."""
    return [row(lane, mine, queued_ms.get(lane, ())) for lane, mine in by_lane(asked).items()]


def lateness(asked: Sequence[ReplayedRequest]) -> Ratio:
    """How late requests left: else the replay, not the server, would be what is measured."""
    late = spread([1e3 * each.late_s for each in asked if each.late_s is not None])
    value = late.p99 if late.count else None
    return Ratio.held("replay.late", "requests left late by, p99, ms", value)


NAME = "replay"


def _run(run: ProgramRun) -> int:
    args = run.args
    trace = Trace(args.trace) if args.trace else None
    load = workload(args, trace)
    if not load:
        raise Malformed(f"{args.trace or 'the workload'}: no request in that time")
    with (
        Testbed(run.console, "starting", len(load)) as stage,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        servers([args.base_url] if args.base_url else [], args.model, stage.folder, {"sim.step_ms": 20.0}) as (server,),
    ):
        stage.say(f"asking {server.name}")
        bounds = ReplayLimits(limit_s=args.seconds, timeout_s=args.timeout)
        asked = runner.run(replay(server, load, bounds, stage.done, lanes=not args.plain))
        stage.say("reading the queue times")
        found = rows(asked, queue_times(server, asked))
    title = f"{len(asked)} requests in {load[-1].at:.0f} s, an open loop"
    settings = {name: getattr(args, name) for name in ("speed", "seconds", "seed", "rate", "cv")}
    told = run.result(NAME, title, COLUMNS, found, [lateness(asked)], _notes(found, trace), **settings)
    run.tell(told, args.out and args.out / told.file)
    return 0 if any(row["asked"] > row["failed"] for row in found) else 1


def workload(args: argparse.Namespace, trace: Trace | None) -> list[TraceRow]:
    """What leaves within the time there is, at its times of the replay."""
    end = args.begin + args.seconds * args.speed
    source = trace if trace else requests(WorkloadShape(rate=args.rate, cv=args.cv), args.seed, end)
    kept = cut(source, begin=args.begin, end=end, scale=args.speed, longest=args.longest)
    return sorted(kept, key=lambda request: request.at)


def _notes(found: Sequence[dict[str, object]], trace: Trace | None) -> Iterator[str]:
    by_queue = any(row["queue_p50_ms"] is not None for row in found)
    yield f"In time: {'begun' if by_queue else 'first token'} within the class's target; what failed was not."
    if trace and trace.failed:
        yield f"{trace.failed} rows of the trace had failed when it was recorded: they are not sent."
    yield from (f"{row['lane']}: {row['faults']}" for row in found if row["faults"])


def _positive(word: str) -> float:
    value = float(word)
    if value <= 0:
        raise argparse.ArgumentTypeError("must be more than 0")
    return value


main = BenchProgram("penstock bench replay", __doc__, _run, NotAServer, Malformed, Died, OSError).taking(
    Option("--base-url", help="e.g. http://127.0.0.1:8000/v1"),
    Option("--model", help="name of the model (default: the first one the server names)"),
    Option("--trace", type=Path, help="CSV with the columns of BurstGPT (default: made-up requests)"),
    Option("--begin", type=float, default=0.0, help="second of the trace to begin at (default 0)"),
    Option("--rate", type=float, default=2.0, help="made-up requests a second (default 2)"),
    Option("--cv", type=float, default=1.5, help="coefficient of variation of their gaps (default 1.5)"),
    Option("--seed", type=int, default=1, help="of made-up requests (default 1)"),
    Option("--speed", type=_positive, default=1.0, help="times as fast as the trace (default 1)"),
    Option("--seconds", type=_positive, default=60.0, help="no request leaves later (default 60)"),
    Option("--timeout", type=_positive, default=60.0, help="seconds for one answer (default 60)"),
    Option("--longest", type=int, default=4096, help="tokens of prompt and answer, at most (default 4096)"),
    Option("--plain", action="store_true", help="do not name classes: for servers that refuse `queue`"),
    Option("--out", type=Path, help="folder of the JSON file (default: none is written)"),
)

if __name__ == "__main__":
    main.exit()
