"""Report: everything that `penstock report` says of a time window, computed from a folder of records."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from telemetry.records.reader import Evidence, OnRead, ReportedRequest, Skipped, evidence_of, read_records
from telemetry.report.energy import energy_of
from telemetry.report.figures import Figures, figures_of
from telemetry.report.finding import Advice, advise, verdict
from telemetry.report.ideal import ModelRunTime, run_times


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
    last = max((each.record.ended_us / 1e6 for each in evidence.requests), default=min(scope.until, time.time()))
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
        torn_lines=skipped.torn,
        newer_lines=skipped.newer,
        unreadable_files=skipped.unreadable,
        interrupted=found.interrupted,
    )
