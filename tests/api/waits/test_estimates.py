"""When a waiting job will begin, as this process guesses without a scheduler."""

from __future__ import annotations

import pytest

from api.waits import estimates
from api.waits.estimates import WINDOW_S, CompletionRate


class Clock:
    """Stands in for the module `time`."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(estimates, "time", clock)
    return clock


def test_only_jobs_that_ended_lately_count(clock: Clock) -> None:
    """Those before the window are forgotten; with fewer than two, nothing is known."""
    rate = CompletionRate()
    for _ in range(7):
        rate.ended("m")
    clock.now += WINDOW_S + 1
    assert rate.eta_ms("m", 0) is None and rate.eta_ms("m", 100) is None
    rate.ended("m")
    clock.now += 10
    rate.ended("m")
    clock.now += 10
    assert rate.eta_ms("m", 0) == 10_000, "two in twenty seconds"
    assert rate.eta_ms("m", 2) == 30_000
    assert rate.eta_ms("other", 0) is None
