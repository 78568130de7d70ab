"""How far demand rises above its last peak within one cold start: what must be there before it is asked for.

A worker ordered now is of use one cold start later. Jobs that may not wait so long are begun in time only if the pool
already has room for whatever comes until then: for the most jobs at once of the last while, times the growth on top of
such a peak that the recent past has shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

BUCKET_S = 5.0
"""Peaks are kept to this."""
PAST_S = 3 * 3600.0
"""How far back rushes are remembered."""
MAX_SAMPLES = 1000
"""Windows remembered, at the most."""
SMOOTHING_JOBS = 8
"""Jobs added to both sides of a growth, so that one job becoming three is no rush; no more than a worker runs."""
PEAK_CAP = 1.25
"""Times the highest of the past is where a rush is expected to end: what has risen will not rise as much again."""
ASSUMED = 1.4
"""The growth before there is a past."""
TRUSTED = 30
"""Windows after which the past alone is believed."""

Peaks: TypeAlias = tuple[tuple[float, float], ...]
"""(time, value), each value lower than those before it: the first is the highest of the while looked back on."""


def noted(peaks: Peaks, value: float, now: float, while_s: float) -> Peaks:
    """Peaks with one more value, without those longer ago than `while_s`."""
    begin = next((i for i, (at, _) in enumerate(peaks) if at > now - while_s), len(peaks))
    end = len(peaks)
    while end > begin and peaks[end - 1][1] <= value:
        end -= 1
    if end > begin and now - peaks[end - 1][0] < BUCKET_S and end == len(peaks):
        return peaks[begin:]  # a lower value of the same moment
    return (*peaks[begin:end], (now, value))


def highest(peaks: Peaks) -> float:
    """0 when there is none."""
    return peaks[0][1] if peaks else 0.0


@dataclass(frozen=True, slots=True)
class BurstConfig:
    """How a rush is looked at."""

    horizon_s: float
    """Jobs must be met that come within this time."""
    while_s: float
    """How long a peak is remembered."""
    cover: float
    """Share of the past, by jobs, that is to stay within the growth."""
    each: int
    """Jobs that one worker runs."""


@dataclass(frozen=True, slots=True)
class Rush:
    """Times in seconds of the caller's clock."""

    peaks: Peaks = ()
    """Of the jobs at once."""
    began: float | None = None
    """Of the window under way, which lasts one horizon."""
    base: float = 0.0
    """The highest peak at its beginning."""
    peak: float = 0.0
    """The most jobs at once in it."""
    past: tuple[tuple[float, float], ...] = ()
    """(growth, base) of each window."""
    heights: Peaks = ()
    """Peaks of all the past that is remembered."""
    growth: float = ASSUMED
    """What the wished share of the past stayed within."""
    few: int = SMOOTHING_JOBS

    @property
    def usual(self) -> float:
        """The most jobs at once of the last while."""
        return highest(self.peaks)

    @property
    def room(self) -> float:
        """Jobs to have room for: the last peak and a rush on top of it. Once there is a past, a rush is not expected to
        go far beyond the highest in it."""
        if self.usual <= 0:
            return 0.0
        grown = (self.usual + self.few) * self.growth - self.few
        return max(self.usual, min(grown, PEAK_CAP * highest(self.heights))) if len(self.past) >= TRUSTED else grown


def follow(rush: Rush, jobs: float, lens: BurstConfig, now: float) -> Rush:
    """Take note of `jobs` at once, seen at `now`."""
    before, few = rush.usual, max(1, min(SMOOTHING_JOBS, lens.each))
    peaks = noted(rush.peaks, jobs, now, lens.while_s)
    heights = noted(rush.heights, jobs, now, PAST_S)
    rush = replace(rush, peaks=peaks, heights=heights, peak=max(rush.peak, jobs), few=few)
    if rush.began is None:
        return replace(rush, began=now, base=jobs, peak=jobs)
    if now - rush.began < lens.horizon_s:
        return rush
    past = rush.past
    if rush.base > 0:
        most = max(TRUSTED, min(MAX_SAMPLES, int(PAST_S / lens.horizon_s)))
        past = (*past, ((rush.peak + few) / (rush.base + few), rush.base))[-most:]
    growth = max(1.0, quantile(past, lens.cover))
    if len(past) < TRUSTED:
        growth = max(growth, ASSUMED)
    return replace(rush, began=now, base=max(before, jobs), peak=jobs, past=past, growth=growth)


def quantile(past: Sequence[tuple[float, float]], share: float) -> float:
    """The least value that entries with `share` of all weight stay within; 0 of nothing."""
    left = share * sum(weight for _, weight in past)
    for value, weight in sorted(past):
        left -= weight
        if left <= 1e-9:
            return value
    return 0.0
