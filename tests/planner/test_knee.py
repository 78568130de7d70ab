"""Knee finder: the analytic knee of every curve, exact and with noise; the frontier without dominated points."""

from __future__ import annotations

import math
from collections.abc import Iterable
from random import Random

import pytest

from planner.cost import GAIN, FrontierPoint, modelled, pareto
from planner.facts.catalogue import device, model
from planner.load import PlanInput
from planner.roofline import batches, decode, memory_plan, prefill
from planner.tuning import knee

BATCHES = tuple(2**power for power in range(11))
NOISE = 0.03


def analytic_knee(t_mem: float, t_comp: float) -> float:
    """The batch of thr(B) = B / (t_mem + t_comp B) where doubling gains exactly GAIN: 2 (r + B) / (r + 2 B) = 1 + GAIN
    with r = t_mem / t_comp."""
    return t_mem / t_comp * (1 - GAIN) / (2 * GAIN)


def curve(random: Random) -> tuple[float, float, int]:
    """t_mem, t_comp, and the first power of two at or beyond the analytic knee, from 2 to 512."""
    t_comp = random.uniform(1e-5, 1e-3)
    t_mem = t_comp * 2 ** random.uniform(0, 9) / analytic_knee(1, 1)
    return t_mem, t_comp, 1 << max(0, math.ceil(math.log2(analytic_knee(t_mem, t_comp))))


def measured(random: Random, t_mem: float, t_comp: float, repeats: int, noise: float) -> dict[int, list[float]]:
    return {
        batch: [batch / (t_mem + t_comp * batch) * random.gauss(1, noise) for _ in range(repeats)] for batch in BATCHES
    }


def test_a_hundred_exact_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without noise each draw of the measurements is the same."""
    monkeypatch.setattr("planner.tuning.RESAMPLED", 5)
    for seed in range(100):
        t_mem, t_comp, wanted = curve(Random(seed))
        found = knee(measured(Random(0), t_mem, t_comp, 1, 0.0), Random(0))
        assert (found.batch, found.confidence, found.is_beyond) == (wanted, 1.0, False)


def test_a_curve_that_falls_is_asked_itself() -> None:
    """An engine that thrashes beyond 8 has no hyperbola."""
    found = knee({1: [10], 2: [20], 4: [39], 8: [75], 16: [60], 32: [30]}, Random(0))
    assert (found.batch, found.is_fitted) == (8, False) and found.gain == pytest.approx(-0.2)


def test_a_knee_at_a_power_of_two_is_unsure() -> None:
    """Noise alone decides between it and the next power: over many runs, the confidence is low."""
    t_comp = 1e-4
    t_mem = t_comp * 64 / analytic_knee(1, 1)
    found = [knee(measured(Random(seed), t_mem, t_comp, 3, NOISE), Random(0)) for seed in range(20)]
    assert {each.batch for each in found} == {64, 128}
    assert sum(each.confidence < 0.95 for each in found) >= 10


def test_a_knee_at_the_largest_batch_is_there_or_beyond() -> None:
    """The medians of OPT-125M on an H200: the last doubling gained 11 %, and the curve has twice the largest gain less,
    which nobody measured."""
    rates = (1998, 3948, 7590, 13742, 24989, 40690, 61346, 80569, 104900, 116849)
    found = knee({2**power: [rate] for power, rate in enumerate(rates)}, Random(1))
    assert (found.batch, found.is_fitted, found.is_beyond) == (512, True, True) and found.gain < GAIN
    assert found.reason.endswith("nothing beyond 512 was measured")


def test_points_that_another_beats_are_dropped() -> None:
    """Less latency and at least as many tokens."""
    points = [
        FrontierPoint(b, t, t / 10, s) for b, t, s in ((1, 10, 1), (2, 19, 1.1), (4, 18, 2), (8, 30, 3), (16, 30, 4))
    ]

    def kept(among: Iterable[FrontierPoint]) -> list[int]:
        return [each.batch for each in pareto(among, lambda each: -each.tokens_s, lambda each: each.latency_s)]

    assert kept(points) == kept(reversed(points)) == [1, 2, 8]


def test_the_largest_batch_that_fits_is_one_of_them() -> None:
    """Also where it is no power of two: memory ends the growth there, and not at half of it."""
    assert batches(20) == [1, 2, 4, 8, 16, 20] and batches(16) == [1, 2, 4, 8, 16] and not batches(0)


def test_the_modelled_frontier_by_hand() -> None:
    """A request takes the prefills of its batch and its own steps."""
    given = PlanInput(model("opt-13b"), device("h200"))
    points = modelled(given)
    assert points[-1].batch == memory_plan(given).max_batch
    four = points[2]
    by_hand = 4 * prefill(given, 1, 512).seconds + 256 * decode(given, 4, 640).seconds
    assert four.latency_s == pytest.approx(by_hand) and four.tokens_s == pytest.approx(4 * 256 / by_hand)
    assert four.joules_token == pytest.approx(700 / four.tokens_s)
    assert [point.tokens_s for point in points] == sorted(point.tokens_s for point in points)
