"""Wait calibration: compares predicted with measured waits, and turns a prediction into an estimate with a band.

An error is the ratio r = (measured + 1 s) / (predicted + 1 s). The second makes the ratio defined for a prediction of
zero, and keeps a few milliseconds from counting as a large error. The median of recent ratios corrects the next
prediction, and their 10 % and 90 % quantiles are its band; nothing is assumed about their distribution.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from typing import Literal, NamedTuple, TypeAlias

from api.openai.wait import Wait
from streaming.jobs.job import Job
from streaming.priority import Priority

WINDOW_S = 900.0
"""Older errors are forgotten."""
MAX_ERRORS = 256
"""Errors kept for each source."""
MIN_ERRORS = 20
"""With fewer errors there is no band: two of them lie outside it on average."""
OFFSET_S = 1.0
LOW, MIDDLE, HIGH = 0.1, 0.5, 0.9

Estimator: TypeAlias = Literal["plan", "rate"]
"""The scheduler's plan, or this process's completion rate."""


class Source(NamedTuple):
    """What a prediction is about and how it was made: errors are comparable only within one source."""

    model: str
    lane: Priority
    estimator: Estimator
    limited: bool = False
    """Of jobs with a time limit, which the order of the queue may prefer."""

    @classmethod
    def of(cls, job: Job, estimator: Estimator) -> Source:
        limited = job.max_queue_ms is not None or job.deadline_ms is not None
        return cls(job.model, job.priority, estimator, limited)


class Prediction(NamedTuple):
    """A wait as an estimator predicts it, not corrected."""

    source: Source
    seconds: float


class _Ratios:
    """The latest errors of one source."""

    def __init__(self) -> None:
        self._kept: deque[tuple[float, float]] = deque(maxlen=MAX_ERRORS)
        self._factors: tuple[float, float, float] | None = None

    def add(self, ratio: float, now: float) -> None:
        self._kept.append((now, ratio))
        while self._kept[0][0] < now - WINDOW_S:
            self._kept.popleft()
        ordered = sorted(ratio for _, ratio in self._kept)
        enough = len(ordered) >= MIN_ERRORS
        self._factors = (_at(ordered, LOW), _at(ordered, MIDDLE), _at(ordered, HIGH)) if enough else None

    def factors(self, now: float) -> tuple[float, float, float] | None:
        """The quantiles, low to high; None with too few errors, or none lately."""
        return self._factors if self._kept and self._kept[-1][0] >= now - WINDOW_S else None


class WaitErrors:
    """The recent errors of each source, in one process; bounded by models times lanes times four."""

    def __init__(self) -> None:
        self._ratios: defaultdict[Source, _Ratios] = defaultdict(_Ratios)

    def learn(self, prediction: Prediction, waited_s: float) -> None:
        """Add a measured wait."""
        ratio = (waited_s + OFFSET_S) / (prediction.seconds + OFFSET_S)
        self._ratios[prediction.source].add(ratio, time.monotonic())

    def wait(self, prediction: Prediction) -> Wait:
        """Correct a prediction, with its band if enough errors are known."""
        factors = self._ratios[prediction.source].factors(time.monotonic())
        if factors is None:
            return Wait(int(1000 * prediction.seconds))
        low, middle, high = (max(0.0, (prediction.seconds + OFFSET_S) * factor - OFFSET_S) for factor in factors)
        return Wait(int(1000 * middle), int(1000 * low), int(1000 * high))


def _at(ordered: list[float], share: float) -> float:
    """The quantile of sorted numbers, interpolated."""
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])
