"""Open loop: requests of a trace, or made to look like one, leave at their times; each class has its own target.

Conversations are of class interactive, API calls of class standard.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.http import JOB_ID
from bench.load.streams import StreamedAnswer
from bench.report import Ratio, columns
from bench.stats import spread
from bench.table1.client import HttpConnection, TargetServer, ask, seen
from planner.simulator.trace import TraceRow
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
