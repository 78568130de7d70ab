"""Cost: SLM-Pareto's arithmetic, and advice that names the cheapest."""

from __future__ import annotations

import pytest

from planner.cost import DeviceCost, cost_advice, cost_of, cost_points, knee_of, per_million
from planner.facts.catalogue import device, model
from planner.knee import FrontierPoint, pareto
from planner.load import PlanInput


def found(gpu: str, price: float | None, tp: int = 1) -> DeviceCost:
    return cost_of(PlanInput(model("llama-3.1-8b"), device(gpu), tp=tp, efficiency=0.7), price)


def test_a_million_tokens() -> None:
    """price / (3600 * tokens a second), times a million."""
    assert per_million(3.60, 1000) == pytest.approx(1.0)
    assert per_million(2.0, 500) == 2 * per_million(1.0, 500) == 2 * per_million(2.0, 1000)


def test_the_knee_or_the_memory_ends_the_batch() -> None:
    points = [FrontierPoint(batch, rate, 0, 0) for batch, rate in ((1, 10), (2, 19), (4, 20), (8, 20.1))]
    assert knee_of(points) == (points[1], "knee")
    assert knee_of(points[:2]) == (points[1], "memory")
    part = FrontierPoint(3, 20.2, 0, 0)  # 6.3 % more for 1.5 x the batch are 11 % for a doubling
    assert knee_of([*points[:2], part]) == (part, "memory")
    assert knee_of([*points[:2], FrontierPoint(3, 20.0, 0, 0)]) == (points[1], "knee")


def test_the_price_is_that_of_all_devices() -> None:
    assert found("h200", 3.0, 2).price_per_hour == 6.0
    assert found("h200", None).per_million is None


def test_the_advice_names_the_cheapest() -> None:
    said = cost_advice([found("l4", 0.8), found("h200", 3.8)])
    assert said.startswith("h200 is the cheapest") and "x on l4" in said
    assert cost_advice([found("l4", 0.8), found("h200", 80.0)]).startswith("l4 is the cheapest")


def test_without_prices_it_says_what_one_may_cost() -> None:
    l4, h200 = found("l4", None), found("h200", None)
    ratio = h200.point.tokens_s / l4.point.tokens_s
    assert f"h200 may cost up to {ratio:.1f} x" in cost_advice([l4, h200])
    assert "--price l4=PRICE" in cost_advice([l4])


def test_the_pareto_of_cost_and_latency() -> None:
    """No kept point is beaten in both, and every other one is, or is equalled."""
    points = cost_points([found("l4", 0.8), found("h200", 3.8)])
    assert {each.gpu for each in points} == {"l4", "h200"} and not cost_points([found("l4", None)])
    kept = pareto(points, lambda each: each.price_per_million_tokens, lambda each: each.latency_s)
    assert [each.latency_s for each in kept] == sorted(each.latency_s for each in kept)
    for each in points:
        beaten = any(
            one.latency_s <= each.latency_s and one.price_per_million_tokens <= each.price_per_million_tokens
            for one in kept
        )
        assert beaten and (each in kept) == (
            not any(
                one.latency_s < each.latency_s and one.price_per_million_tokens <= each.price_per_million_tokens
                for one in points
            )
        )
    assert pareto([(1, 2), (1, 1), (2, 1), (3, 0)], lambda each: each[1], lambda each: each[0]) == [(1, 1), (3, 0)]
