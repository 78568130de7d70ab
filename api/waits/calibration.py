"""Wait calibration: compares predicted with measured waits, and turns a prediction into an estimate with a band.

Waits are compared as ratios, r(a, b) = (a + 1 s) / (b + 1 s): the second makes the ratio defined for a prediction of
zero, and keeps a few milliseconds from counting as a large error. The median of the latest r(measured, predicted)
corrects the next prediction. The 10 % and 90 % quantiles of r(measured, told) are its band: they are of what clients
were told, so a correction that lags behind a changing load widens the band.

A job that expires in the queue gives a bound: it would have waited longer. A bound takes part as in the estimator of
Kaplan and Meier (1958): its share goes to the waits above it. Where too many are bounds for a quantile, the prediction
is trusted within TRUSTED_FACTOR, and the largest bound is one.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from typing import Literal, NamedTuple, TypeAlias

from api.openai.wait import Wait
from streaming.jobs.job import Job
from streaming.order import Priority

WINDOW_S = 900.0
"""Older errors are forgotten."""
MAX_ERRORS = 128
"""Errors kept for each source."""
LATEST = 16
"""Of these, the ones that correct a prediction: few, to follow a changing load."""
MIN_ERRORS = 20
"""With fewer errors there is no band: two of them lie outside it on average."""
OFFSET_S = 1.0
TRUSTED_FACTOR = 10
"""A wait that no measured one contradicts is at least the predicted one divided by this. The plan is made of the
mean size of jobs and the mean pace of slots; allowing each to be wrong by three, it is wrong by about ten."""
LOW, HIGH = 0.1, 0.9

Estimator: TypeAlias = Literal["plan", "rate"]
"""The scheduler's plan, or this process's completion rate."""


class EstimateSource(NamedTuple):
    """What a prediction is about and how it was made: errors are comparable only within one source."""

    model: str
    lane: Priority
    estimator: Estimator
    limited: bool = False
    """Of jobs with a time limit, which the order of the queue may prefer."""

    @classmethod
    def of(cls, job: Job, estimator: Estimator) -> EstimateSource:
        limited = job.max_queue_ms is not None or job.deadline_ms is not None
        return cls(job.model, job.priority, estimator, limited)


class Prediction(NamedTuple):
    """A wait as an estimator predicts it, not corrected."""

    source: EstimateSource
    seconds: float


class _Factors(NamedTuple):
    """What a prediction is multiplied by, and then its ends."""

    middle: float
    low: float | None = None
    high: float | None = None


class _Error(NamedTuple):
    """How one prediction held."""

    learned: float
    of_predicted: float
    """The measured wait over the predicted one."""
    of_told: float
    bound: bool
    """It ended in the queue: both ratios would be larger."""


class _Errors:
    """The latest errors of one source."""

    def __init__(self) -> None:
        self._kept: deque[_Error] = deque(maxlen=MAX_ERRORS)
        self._factors = _Factors(1.0)

    def add(self, error: _Error) -> None:
        self._kept.append(error)
        while self._kept[0].learned < error.learned - WINDOW_S:
            self._kept.popleft()
        latest = sorted((each.of_predicted, each.bound) for each in list(self._kept)[-LATEST:])
        middle = _quantile(latest, 0.5)
        if middle is None:
            middle = max(1.0, latest[-1][0])
        if len(self._kept) < MIN_ERRORS:
            self._factors = _Factors(middle)
            return
        ordered = sorted((each.of_told, each.bound) for each in self._kept)
        low, high = _quantile(ordered, LOW), _quantile(ordered, HIGH)
        if low is None:
            low = max(1 / TRUSTED_FACTOR, ordered[-1][0])
        self._factors = _Factors(middle, low, high)

    def factors(self, now: float) -> _Factors:
        """Those that hold now; without errors lately, none is known."""
        return self._factors if self._kept and self._kept[-1].learned >= now - WINDOW_S else _Factors(1.0)


class WaitErrors:
    """The recent errors of each source, in one process; bounded by models times lanes times four."""

    def __init__(self) -> None:
        self._errors: defaultdict[EstimateSource, _Errors] = defaultdict(_Errors)

    def learn(self, prediction: Prediction, told: Wait, waited_s: float, *, bound: bool = False) -> None:
        """Add a measured wait, and what its client was told. `bound`: the job would have waited longer."""
        of_predicted = (waited_s + OFFSET_S) / (prediction.seconds + OFFSET_S)
        of_told = (waited_s + OFFSET_S) / (told.eta_ms / 1000 + OFFSET_S)
        self._errors[prediction.source].add(_Error(time.monotonic(), of_predicted, of_told, bound))

    def wait(self, prediction: Prediction) -> Wait:
        """Correct a prediction, with its band if enough errors are known."""
        middle, low, high = self._errors[prediction.source].factors(time.monotonic())
        eta_s = _scaled(prediction.seconds, middle)
        if low is None:
            return Wait(int(1000 * eta_s))
        low_s = _scaled(eta_s, low)
        if high is None:
            return Wait(int(1000 * max(eta_s, low_s)), int(1000 * low_s))
        high_s = _scaled(eta_s, high)
        return Wait(int(1000 * min(max(eta_s, low_s), high_s)), int(1000 * low_s), int(1000 * high_s))


def _scaled(seconds: float, factor: float) -> float:
    return max(0.0, (seconds + OFFSET_S) * factor - OFFSET_S)


def _quantile(ordered: list[tuple[float, bool]], share: float) -> float | None:
    """The quantile of sorted ratios and whether they are bounds, interpolated; None if too many are bounds."""
    if not any(bound for _, bound in ordered):
        place = share * (len(ordered) - 1)
        below = int(place)
        above = min(below + 1, len(ordered) - 1)
        return ordered[below][0] + (place - below) * (ordered[above][0] - ordered[below][0])
    longer = 1.0
    for place, (ratio, bound) in enumerate(ordered):
        longer *= 1.0 if bound else 1 - 1 / (len(ordered) - place)
        if longer <= 1 - share + 1e-9:
            return ratio
    return None
