"""Report: everything that `penstock report` says of a time window, computed from a folder of records."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from telemetry.records.reader import OnRead, Skipped, read_records
from telemetry.report.energy import energy_of
from telemetry.report.figures import Figures, figures_of, percentile
from telemetry.report.finding import Advice, advise, verdict
from telemetry.report.ideal import ModelRunTime, run_times
from telemetry.report.requests import Evidence, ReportedRequest, evidence_of

MAX_MOMENTS = 60
"""Points of a plot over time."""


@dataclass(frozen=True, slots=True)
class Scope:
    """What a report is about. Times are Unix seconds; from 0 on: whatever there is. An empty name means all."""

    since: float
    until: float
    model: str = ""
    lane: str = ""
    tenant: str = ""

    def holds(self, request: ReportedRequest) -> bool:
        """Whether a request belongs to it."""
        record = request.record
        wanted = ((self.model, record.model), (self.lane, record.lane), (self.tenant, record.tenant))
        return all(not name or name == found for name, found in wanted)


class Moment(msgspec.Struct, frozen=True):
    """A slice of the window, for plots."""

    at: float
    """Its beginning, in Unix seconds."""
    seconds: float
    requests: int
    tokens: int
    wait_p90: float | None
    ttft_p90: float | None


class RequestReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a window of records says."""

    since: float
    until: float
    model: str = ""
    lane: str = ""
    tenant: str = ""
    verdict: str
    advice: Sequence[Advice]
    figures: Figures
    run_times: Sequence[ModelRunTime]
    timeline: Sequence[Moment] = ()
    curves: Mapping[str, Sequence[float]] = {}
    """By latency, its 1st to 100th percentile in milliseconds."""
    torn_lines: int = 0
    newer_lines: int = 0
    unreadable_files: Sequence[str] = ()
    interrupted: bool = False
    """Whether Ctrl-C ended the reading, so that records are missing."""


def report_of(
    folder: Path, scope: Scope, prices: Mapping[str, float], on_read: OnRead = lambda _done, _total: None
) -> RequestReport:
    """Compute a report. `prices`: cost of one worker in an hour, by model. Raises OSError."""
    skipped = Skipped()
    found = evidence_of(read_records(folder, scope.since, scope.until, skipped, on_read), keep_partial=True)
    evidence = Evidence([each for each in found.requests if scope.holds(each)], found.samples)
    shared = len(evidence.requests) < len(found.requests)
    figures = figures_of(evidence, prices, energy_of(found), shared=shared)
    last = max((each.record.ended_us / 1e6 for each in evidence.requests), default=scope.until)
    return RequestReport(
        since=scope.since or last - figures.usage.seconds,
        until=scope.until if scope.since else last,
        model=scope.model,
        lane=scope.lane,
        tenant=scope.tenant,
        verdict=verdict(figures),
        advice=advise(figures, evidence, everyone=found.requests),
        figures=figures,
        run_times=run_times(evidence.requests),
        timeline=timeline(evidence.requests),
        curves=curves(evidence.requests),
        torn_lines=skipped.torn,
        newer_lines=skipped.newer,
        unreadable_files=skipped.unreadable,
        interrupted=found.interrupted,
    )


LATENCIES: Mapping[str, Callable[[ReportedRequest], float | None]] = {
    "wait": lambda each: each.wait_ms,
    "ttft": lambda each: each.ttft_ms,
    "e2e": lambda each: each.e2e_ms,
}


def curves(requests: Sequence[ReportedRequest]) -> dict[str, list[float]]:
    """The percentiles of each latency; one without a value is left out."""
    found = {}
    for name, latency in LATENCIES.items():
        values = [latency(each) for each in requests if each.completed or name == "wait"]
        ordered = sorted(value for value in values if value is not None)
        if ordered:
            found[name] = [percentile(ordered, share / 100) for share in range(1, 101)]
    return found


def timeline(requests: Sequence[ReportedRequest]) -> list[Moment]:
    """Slices of equal length from the first end of a request to the last."""
    if not requests:
        return []
    first, last = requests[0].record.ended_us / 1e6, requests[-1].record.ended_us / 1e6
    seconds = max(1.0, (last - first) / (MAX_MOMENTS - 1))
    slices: list[list[ReportedRequest]] = [[] for _ in range(int((last - first) / seconds) + 1)]
    for each in requests:
        slices[int((each.record.ended_us / 1e6 - first) / seconds)].append(each)
    return [_moment(first + number * seconds, seconds, own) for number, own in enumerate(slices)]


def _moment(at: float, seconds: float, requests: Sequence[ReportedRequest]) -> Moment:
    def p90(latency: Callable[[ReportedRequest], float | None]) -> float | None:
        ordered = sorted(value for each in requests if (value := latency(each)) is not None)
        return percentile(ordered, 0.9) if ordered else None

    tokens = sum(each.record.completion_tokens for each in requests)
    return Moment(at, seconds, len(requests), tokens, p90(LATENCIES["wait"]), p90(LATENCIES["ttft"]))
