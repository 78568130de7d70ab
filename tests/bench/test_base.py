"""Two trees compared: order of turns, ratios and verdicts."""

from __future__ import annotations

import argparse
import random
from typing import Any

import pytest
from rich.console import Console

from bench.gateway.base import BASE, THIS, of_level, report
from bench.gateway.sweep import GatewayOptions, GatewayReadings
from bench.load.plan import StreamReading
from bench.program import ProgramRun
from bench.stats import Spread, coverage_of, median_interval

pytestmark = pytest.mark.slow

VERSIONS = {THIS: "aaa", BASE: "bbb"}


def reading(us_per_token: float, tokens: int = 1000, errors: int = 0) -> StreamReading:
    cpu_s = us_per_token * tokens / 1e6
    wrong, cpu = {"cut off": errors} if errors else {}, {"api-1": cpu_s / 2, "worker-1": cpu_s / 2}
    timed: dict[str, Any] = {"seconds": 1.0, "ttft": Spread(), "itl": Spread(), "e2e": Spread(), "own_cpu": 0.1}
    return StreamReading(requests=10, wrong=wrong, tokens=tokens, cpu=cpu, **timed)


def played(ratios: list[float], errors: int = 0) -> GatewayReadings:
    """Rounds in which this tree costs so many times what the base costs, while the machine gets slower and slower."""
    found = GatewayReadings()
    for number, ratio in enumerate(ratios):
        for _ in range(2):
            found.note(THIS, 16, reading(ratio * 50 * (number + 1), errors=errors))
            found.note(BASE, 16, reading(50 * (number + 1)))
    return found


def verdict(ratios: list[float], errors: int = 0) -> list[str]:
    """Of the cost, and of the errors of this tree."""
    run = ProgramRun(argparse.Namespace(), "command", Console(quiet=True))
    options = GatewayOptions(
        levels=(16,), rounds=len(ratios), requests_per_stream=1, tokens=128, step_ms=15, prefill_ms=25, limit_s=60
    )
    return [ratio.verdict for ratio in report(run, played(ratios, errors), VERSIONS, 1.03, options).ratios]


@pytest.mark.parametrize(
    ("count", "rank", "coverage"),
    [(1, 1, 0.0), (5, 1, 0.9375), (6, 1, 0.96875), (9, 2, 0.9609375), (12, 3, 0.9614), (25, 8, 0.9567)],
)
def test_the_interval_is_the_narrowest_that_covers_enough(count: int, rank: int, coverage: float) -> None:
    found = median_interval(range(count, 0, -1))
    assert (found.rank, found.low, found.high) == (rank, rank, count + 1 - rank)
    assert found.coverage == pytest.approx(coverage, abs=1e-4) and found.median == (count + 1) / 2
    if 2 * (rank + 1) <= count + 1:
        assert coverage_of(count, rank + 1) < 0.95


@pytest.mark.parametrize(("ratios", "expected"), [
    ([1.0] * 9, "reached"),
    ([1.04] * 9, "missed"),
    ([1.02] + [1.04] * 8, "missed"),  # one round on the good side is not enough
    ([1.02, 1.02] + [1.04] * 7, "undecided"),  # two are: the interval begins there
    ([2.0] * 6 + [1.0] * 3, "undecided"),
])  # fmt: skip
def test_a_bound_is_missed_only_by_a_whole_interval(ratios: list[float], expected: str) -> None:
    """Whatever the order of the rounds, and although the machine gets slower from round to round."""
    random.Random(1).shuffle(ratios)
    assert verdict(ratios) == [expected, "reached"]


def test_too_few_rounds_and_rounds_without_a_token_are_no_success() -> None:
    assert verdict([9.0] * 8) == ["", "reached"]
    found = played([1.0] * 9)
    found.readings[THIS, 16][-2:] = [reading(0, 0), reading(0, 0)]
    assert of_level(found.readings, 16, "bbb", 1.03).verdict == "missed"
