"""Tuning: the analytic knee of every curve; the sweep fits its budget, stops where it is flat, and its frontier speaks
for settings."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from random import Random

import pytest

from planner import tuning
from planner.cost import GAIN, FrontierPoint, modelled, pareto
from planner.facts.catalogue import PlanError, device, model
from planner.load import PlanInput, RequestLengths
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


def samples_of(random: Random, t_mem: float, t_comp: float, repeats: int, noise: float) -> dict[int, list[float]]:
    return {
        batch: [batch / (t_mem + t_comp * batch) * random.gauss(1, noise) for _ in range(repeats)] for batch in BATCHES
    }


def test_a_hundred_exact_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without noise each draw of the measurements is the same."""
    monkeypatch.setattr("planner.tuning.RESAMPLED", 5)
    for seed in range(100):
        t_mem, t_comp, wanted = curve(Random(seed))
        found = knee(samples_of(Random(0), t_mem, t_comp, 1, 0.0), Random(0))
        assert (found.batch, found.confidence, found.is_beyond) == (wanted, 1.0, False)


def test_a_curve_that_falls_is_asked_itself() -> None:
    """An engine that thrashes beyond 8 has no hyperbola."""
    found = knee({1: [10], 2: [20], 4: [39], 8: [75], 16: [60], 32: [30]}, Random(0))
    assert (found.batch, found.is_fitted) == (8, False) and found.gain == pytest.approx(-0.2)


def test_a_knee_at_a_power_of_two_is_unsure() -> None:
    """Noise alone decides between it and the next power: over many runs, the confidence is low."""
    t_comp = 1e-4
    t_mem = t_comp * 64 / analytic_knee(1, 1)
    found = [knee(samples_of(Random(seed), t_mem, t_comp, 3, NOISE), Random(0)) for seed in range(20)]
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


LINE = tuning.LatencyLine(1.0, 0.1)


def test_a_sweep_asks_eight_times_for_each_client_up_to_the_requests() -> None:
    plan = tuning.sweep_plan(LINE, 60, 64, 1e9)
    assert plan.levels == tuple(
        tuning.SweepLevel(c, n) for c, n in ((1, 8), (2, 16), (4, 32), (8, 60), (16, 60), (32, 60))
    )
    assert plan.expected_s == pytest.approx(sum(map(LINE.level_s, plan.levels))) and plan.note == ""


@pytest.mark.parametrize("budget", [30.0, 60.0, 120.0, 200.0])
def test_a_sweep_keeps_its_budget(budget: float) -> None:
    plan = tuning.sweep_plan(LINE, 500, 256, budget)
    assert plan.expected_s <= budget and plan.note and len(plan.levels) >= 2
    assert all(level.requests >= min(500, 2 * level.clients) for level in plan.levels)


def test_a_budget_that_holds_no_pass_is_refused_with_what_one_needs() -> None:
    """Two requests of 1.1 s by one client, and two rounds of 1.2 s by two, take 4.6 s."""
    assert [level.clients for level in tuning.sweep_plan(LINE, 500, 256, 4.7).levels] == [1, 2]
    with pytest.raises(PlanError, match="1 and 2 at once needs about 5 s, and 4 s of the budget are left"):
        tuning.sweep_plan(LINE, 500, 256, 4.4)


def test_what_the_budget_leaves_out_is_named_and_nothing_is_advised() -> None:
    """However sure the knee of the rest seems."""
    plan = tuning.sweep_plan(LINE, 64, 16, 4.7)
    assert plan.left_out == (4, 8, 16)
    found = replace(measured(0.0, most=512), left_out=(1024,), cause="the budget ended")
    wanted = tuning.recommend(found, RequestLengths())
    assert found.is_open and wanted.withheld == "1024 at once was not measured: the budget ended"
    said = tuning.tuning_advice(found, wanted)
    assert "Set a batch" not in said and "1024 at once was not measured" in said and "--budget" in said


def test_no_cache_is_smaller_than_a_context() -> None:
    """The server refuses what its cache cannot hold: a short workload must not cut the prompts that it takes."""
    found, short = measured(0.0, most=512), RequestLengths(32, 16)
    assert tuning.recommend(found, short).kv_tokens == found.knee.batch * 64
    assert tuning.recommend(found, short, context=100_001).kv_tokens == 100_032
    shape, gpu = model("opt-125m"), device("a100-40gb")
    assert tuning.recommend(found, short, shape, gpu, context=100_001).kv_tokens == 100_032


def test_flat_is_two_doublings_without_gain() -> None:
    assert not tuning.is_flat({1: 10, 2: 20}) and not tuning.is_flat({1: 10, 2: 20, 4: 21})
    assert tuning.is_flat({1: 10, 2: 10.5, 4: 11}) and not tuning.is_flat({1: 10, 2: 10.5, 4: 20})


def measured(noise: float, repeats: int = 3, most: int = 64) -> tuning.MeasuredFrontier:
    """thr(B) = B / (0.02 + 0.001 B) tokens a second, of answers of 100 tokens; the knee is 90, so 128, or the end."""
    random = Random(3)
    rates = {
        2**p: [2**p / (0.02 + 0.001 * 2**p) * random.gauss(1, noise) for _ in range(repeats)]
        for p in range(most.bit_length())
    }
    readings = {
        b: [tuning.LevelReading(b, 1, 0, rate, rate / 100, 100 * b / rate, 1.0, []) for rate in each]
        for b, each in rates.items()
    }
    return tuning.frontier_of(readings, random)


def test_a_frontier_of_measurements() -> None:
    found = measured(0.0, most=512)
    assert (found.knee.batch, found.repeats, len(found.points)) == (128, 3, 10)
    assert found.kept == found.points  # each larger batch yields more
    assert found.curve[0] == (1.0, pytest.approx(47.6, abs=0.1))


def test_noise_needs_repeats_until_the_knee_is_sure() -> None:
    random = Random(5)
    samples = {2**p: [2**p / (0.02 + 0.001 * 2**p) * random.gauss(1, 0.03) for _ in range(5)] for p in range(10)}
    assert tuning.is_settled(samples, Random(1))
    assert not tuning.is_settled({b: rates[:2] for b, rates in samples.items()}, Random(1))


def test_the_knee_speaks_for_batch_cache_and_replicas() -> None:
    found = measured(0.0, most=512)
    alone = tuning.recommend(found, RequestLengths(512, 256))
    assert (alone.max_batch_size, alone.kv_tokens, alone.replicas) == (128, 128 * 768, None)
    small = tuning.recommend(found, RequestLengths(512, 256), model("opt-125m"), device("a100-40gb"))
    assert small.replicas == 3
    big = tuning.recommend(found, RequestLengths(512, 256), model("opt-13b"), device("a100-40gb"))
    assert big.replicas == 0
    assert "3 replicas with such a batch fit" in tuning.tuning_advice(found, small)
    assert "Not one replica" in tuning.tuning_advice(found, big)


def test_the_advice_says_what_more_would_cost() -> None:
    said = tuning.tuning_advice(measured(0.0, most=512), tuning.recommend(measured(0.0, most=512), RequestLengths()))
    assert said.startswith("Set a batch of 128: twice 128 would gain 7 %")
    beyond = measured(0.0, most=8)
    said = tuning.tuning_advice(beyond, tuning.recommend(beyond, RequestLengths()))
    assert "still rises at 8" in said and "Set a batch" not in said and "--max 16" in said


def test_half_of_the_points_predict_the_others() -> None:
    """Exactly on the engine's curve, to the noise with noise, and not at all on another curve."""
    assert tuning.held_out_error({2**p: [2**p / (0.02 + 0.001 * 2**p)] for p in range(6)}) == pytest.approx(0, abs=1e-9)
    noisy = measured(0.03, most=512).error
    assert noisy is not None and noisy < 0.05
    falls = tuning.held_out_error({1: [10.0], 2: [20.0], 4: [39.0], 8: [30.0], 16: [60.0], 32: [10.0]})
    assert falls is None or falls > 0.2
    assert tuning.held_out_error({1: [1.0], 2: [2.0], 4: [3.0]}) is None
