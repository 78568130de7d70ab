"""From answers to a row for each class: how long until the first token, how long in the queue, how many in time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bench.breakdown.ask import JOB_ID
from bench.breakdown.target import BreakdownTarget
from bench.load.stats import spread
from bench.replay.play import ReplayedRequest
from bench.report import Column, Ratio
from bench.table1.server import seen
from scheduler.policy.limits import TARGETS

MAX_TIMINGS = 500
"""Of each class that the server is asked for."""

COLUMNS = (
    Column("lane", "class"),
    Column("asked", "asked"),
    Column("failed", "failed"),
    Column("ttft_p50_ms", "TTFT p50 ms"),
    Column("ttft_p99_ms", "TTFT p99 ms"),
    Column("queue_p50_ms", "queue p50 ms"),
    Column("queue_p99_ms", "queue p99 ms"),
    Column("target_s", "target, s", 0),
    Column("within", "in time, %", 2),
    Column("tokens", "tokens"),
)


def job_of(asked: ReplayedRequest) -> str:
    """Penstock's name for it; "" if it has none."""
    head = b"".join(part for _, part in asked.answer.arrivals[:2])
    found = JOB_ID.search(head)
    return found[1].decode() if found else ""


def queue_times(target: BreakdownTarget, asked: Sequence[ReplayedRequest]) -> dict[str, list[float]]:
    """Milliseconds in the queue by class, by the server's clock, for at most so many. Raises Unsuitable, OSError."""
    found: dict[str, list[float]] = {}
    for lane, mine in by_lane(asked).items():
        jobs = [job for each in mine if not each.answer.fault and (job := job_of(each))]
        chosen = jobs[:: max(1, -(-len(jobs) // MAX_TIMINGS))]
        timings = target.get(f"/v1/jobs/{job}/timing" for job in chosen)
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
    ttft = spread([1e3 * answer.latency.ttft for answer in good])
    queue, target_ms = spread(queued_ms), 1e3 * TARGETS[lane]
    waits = queued_ms or [1e3 * answer.latency.ttft for answer in good]
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
    return Ratio.held("replay.late", what="requests left late by, p99, ms", value=value)
