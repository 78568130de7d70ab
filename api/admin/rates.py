"""Rates: jobs and latencies of the last minute, from two readings of the metrics' counters of this machine.

Workers count and report tokens per second themselves, so that those of other machines count too.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client import Metric

FIRST_TOKEN = "gen_ai_server_time_to_first_token_seconds"  # noqa: S105 - the name of a metric
PER_TOKEN = "gen_ai_server_time_per_output_token_seconds"  # noqa: S105
JOBS, LAPSED = "penstock_jobs", "penstock_lapsed_workers"
STREAMS = "penstock_open_streams"
WINDOW_S, SHORT_WINDOW_S = 60.0, 8.0
"""Windows of latencies, and of throughput, where readings reach so far back."""
MAX_READINGS = 64


@dataclass(frozen=True, slots=True)
class Reading:
    """Counters of all processes of this machine at one time."""

    at: float
    first_token: Mapping[float, float] = field(default_factory=dict)
    """Answers by upper bound (s), cumulative."""
    per_token: Mapping[float, float] = field(default_factory=dict)
    ended: Mapping[str, float] = field(default_factory=dict)
    """Jobs by final state."""
    lapsed: float = 0
    """Workers whose lease ran out."""
    streams: float = 0
    """Open event streams."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What came of the newest readings. Times in ms; None: no answer in that window."""

    window_s: float | None
    """Of the latencies; None: since the processes started."""
    first_token_ms: tuple[float, float] | None
    """Median and 95th percentile."""
    per_token_ms: tuple[float, float] | None
    ended_per_s: float | None
    """None until there are two readings."""
    failed: int
    """Jobs that failed in the window."""
    lapsed: int
    streams: int


class RateWindow:
    """The readings of the last minute. They are taken only while somebody asks."""

    def __init__(self) -> None:
        self._readings: deque[Reading] = deque(maxlen=MAX_READINGS)

    def add(self, now: Reading) -> Rates:
        """Keep a reading, and compare it with earlier ones."""
        long, short = self._base(now, WINDOW_S), self._base(now, SHORT_WINDOW_S)
        self._readings.append(now)
        since = long or Reading(0.0)
        seconds = now.at - short.at if short else None
        ended, before = sum(now.ended.values()), sum(short.ended.values()) if short else 0
        return Rates(
            window_s=now.at - long.at if long else None,
            first_token_ms=_median_and_95th(now.first_token, since.first_token),
            per_token_ms=_median_and_95th(now.per_token, since.per_token),
            ended_per_s=max(0.0, ended - before) / seconds if seconds else None,
            failed=_grown(now.ended.get("failed", 0), since.ended.get("failed", 0)) if long else 0,
            lapsed=_grown(now.lapsed, since.lapsed) if long else 0,
            streams=int(now.streams),
        )

    def _base(self, now: Reading, window_s: float) -> Reading | None:
        """Return the oldest reading in the window, or else the newest before it."""
        if not self._readings:
            return None
        times = [each.at for each in self._readings]
        return self._readings[min(bisect_left(times, now.at - window_s), len(times) - 1)]


def read(metrics: Iterable[Metric], at: float) -> Reading:
    """Take what is needed out of the metrics of all processes."""
    buckets: dict[str, defaultdict[float, float]] = {name: defaultdict(float) for name in (FIRST_TOKEN, PER_TOKEN)}
    lapsed = streams = 0.0
    ended: defaultdict[str, float] = defaultdict(float)
    for metric in metrics:
        for sample in metric.samples:
            if metric.name in buckets and sample.name.endswith("_bucket"):
                buckets[metric.name][float(sample.labels["le"])] += sample.value
            elif sample.name == JOBS + "_total":
                ended[sample.labels["state"]] += sample.value
            elif sample.name == LAPSED + "_total":
                lapsed += sample.value
            elif metric.name == STREAMS:
                streams += sample.value
    return Reading(at, buckets[FIRST_TOKEN], buckets[PER_TOKEN], ended, lapsed, streams)


def _grown(now: float, before: float) -> int:
    return max(0, round(now - before))


def _median_and_95th(now: Mapping[float, float], before: Mapping[float, float]) -> tuple[float, float] | None:
    """Percentiles in ms of what was counted between two readings of a histogram; None if nothing was."""
    grown = [(bound, count - before.get(bound, 0)) for bound, count in sorted(now.items())]
    if not grown or grown[-1][1] <= 0:
        return None
    return 1000 * _quantile(grown, 0.5), 1000 * _quantile(grown, 0.95)


def _quantile(cumulative: list[tuple[float, float]], share: float) -> float:
    """Interpolate within the bucket, as Prometheus' histogram_quantile does; the last bound if it is beyond that."""
    wanted = share * cumulative[-1][1]
    below, counted = 0.0, 0.0
    for bound, count in cumulative:
        if count >= wanted:
            if bound == float("inf"):
                return below
            return below + (bound - below) * (wanted - counted) / (count - counted) if count > counted else bound
        below, counted = bound, count
    return below
