"""Burst estimator: how far the number of concurrent jobs may rise above its last peak within one cold start.

A worker ordered now is ready one cold start later. Jobs that may not wait so long are begun in time only if the pool
already has room for all that arrive until then: the last peak of concurrent jobs times the growth on top of such a
peak that recent history shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

BUCKET_S = 5.0
"""Time resolution of peaks."""
HISTORY_S = 3 * 3600.0
"""How far back bursts are remembered."""
MAX_SAMPLES = 1000
"""Maximum of windows remembered."""
SMOOTHING_JOBS = 8
"""Jobs added to both sides of a growth ratio, so that one job becoming three is no burst; at most one worker's jobs."""
PEAK_CAP = 1.25
"""A burst is expected to end at this factor of the highest peak in the history."""
INITIAL_GROWTH = 1.4
"""The growth assumed while there is no history."""
MIN_WINDOWS = 30
"""Windows from which on the history alone determines the growth."""

Peaks: TypeAlias = tuple[tuple[float, float], ...]
"""(time, value) pairs with falling values: the first is the maximum of the time looked back on."""


def with_peak(peaks: Peaks, value: float, now: float, while_s: float) -> Peaks:
    """Add a value to the peaks, and drop those older than `while_s` seconds."""
    begin = next((i for i, (at, _) in enumerate(peaks) if at > now - while_s), len(peaks))
    end = len(peaks)
    while end > begin and peaks[end - 1][1] <= value:
        end -= 1
    if end > begin and now - peaks[end - 1][0] < BUCKET_S and end == len(peaks):
        return peaks[begin:]  # a lower value within the resolution
    return (*peaks[begin:end], (now, value))


def highest(peaks: Peaks) -> float:
    """The highest peak; 0 if there is none."""
    return peaks[0][1] if peaks else 0.0


@dataclass(frozen=True, slots=True)
class BurstConfig:
    """Parameters of the estimator."""

    horizon_s: float
    """Length of a window: room is needed for the jobs that arrive within this time."""
    while_s: float
    """How long a peak is remembered."""
    cover: float
    """Share of the history, weighted by jobs, that stays within the growth."""
    each: int
    """Jobs that one worker runs at once."""


@dataclass(frozen=True, slots=True)
class Rush:
    """State of the estimator. Times in seconds of the caller's clock."""

    peaks: Peaks = ()
    """Recent peaks of concurrent jobs."""
    began: float | None = None
    """Start of the current window, which lasts one horizon."""
    base: float = 0.0
    """The highest peak at its start."""
    peak: float = 0.0
    """The maximum of concurrent jobs in it."""
    past: tuple[tuple[float, float], ...] = ()
    """(growth, base) of each past window."""
    heights: Peaks = ()
    """Peaks of the whole remembered history."""
    growth: float = INITIAL_GROWTH
    """The quantile `cover` of past growth."""
    smoothing: int = SMOOTHING_JOBS

    @property
    def usual(self) -> float:
        """The highest recent peak of concurrent jobs."""
        return highest(self.peaks)

    @property
    def room(self) -> float:
        """Jobs to have room for: the last peak and a burst on top of it, capped by the history once there is enough."""
        if self.usual <= 0:
            return 0.0
        grown = (self.usual + self.smoothing) * self.growth - self.smoothing
        return max(self.usual, min(grown, PEAK_CAP * highest(self.heights))) if len(self.past) >= MIN_WINDOWS else grown


def follow(rush: Rush, jobs: float, config: BurstConfig, now: float) -> Rush:
    """Add an observation: `jobs` concurrent jobs at `now`."""
    before, smoothing = rush.usual, max(1, min(SMOOTHING_JOBS, config.each))
    peaks = with_peak(rush.peaks, jobs, now, config.while_s)
    heights = with_peak(rush.heights, jobs, now, HISTORY_S)
    rush = replace(rush, peaks=peaks, heights=heights, peak=max(rush.peak, jobs), smoothing=smoothing)
    if rush.began is None:
        return replace(rush, began=now, base=jobs, peak=jobs)
    if now - rush.began < config.horizon_s:
        return rush
    past = rush.past
    if rush.base > 0:
        most = max(MIN_WINDOWS, min(MAX_SAMPLES, int(HISTORY_S / config.horizon_s)))
        past = (*past, ((rush.peak + smoothing) / (rush.base + smoothing), rush.base))[-most:]
    growth = max(1.0, quantile(past, config.cover))
    if len(past) < MIN_WINDOWS:
        growth = max(growth, INITIAL_GROWTH)
    return replace(rush, began=now, base=max(before, jobs), peak=jobs, past=past, growth=growth)


def quantile(past: Sequence[tuple[float, float]], share: float) -> float:
    """The weighted quantile of (value, weight) entries; 0 if there are none."""
    left = share * sum(weight for _, weight in past)
    for value, weight in sorted(past):
        left -= weight
        if left <= 1e-9:
            return value
    return 0.0
