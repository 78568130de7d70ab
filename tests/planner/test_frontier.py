"""Frontier: dominated points go, and the roofline's frontier rises with the batch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from planner.facts.catalogue import device, model
from planner.knee import FrontierPoint, batches, doublings, modelled, pareto
from planner.load import PlanInput
from planner.memory import memory_plan
from planner.roofline import decode, prefill


def test_points_that_another_beats_are_dropped() -> None:
    """Less latency and at least as many tokens."""
    points = [
        FrontierPoint(b, t, t / 10, s) for b, t, s in ((1, 10, 1), (2, 19, 1.1), (4, 18, 2), (8, 30, 3), (16, 30, 4))
    ]

    def kept(among: Iterable[FrontierPoint]) -> list[int]:
        return [each.batch for each in pareto(among, lambda each: -each.tokens_s, lambda each: each.latency_s)]

    assert kept(points) == kept(reversed(points)) == [1, 2, 8]


def test_doubling_batches() -> None:
    assert list(doublings(20)) == [1, 2, 4, 8, 16] and list(doublings(0)) == []


def test_the_largest_batch_that_fits_is_one_of_them() -> None:
    """Also where it is no power of two: memory ends the growth there, and not at half of it."""
    assert list(batches(20)) == [1, 2, 4, 8, 16, 20] and list(batches(16)) == [1, 2, 4, 8, 16] and not list(batches(0))


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


def test_two_devices_take_the_power_of_two() -> None:
    """Joules of a token are those of all devices of a replica."""
    for point in modelled(PlanInput(model("opt-13b"), device("h200"), tp=2)):
        assert point.joules_token == pytest.approx(2 * 700 / point.tokens_s)


def test_half_the_efficiency_is_half_the_tokens() -> None:
    given = PlanInput(model("opt-13b"), device("h200"))
    whole, half = modelled(given), modelled(replace(given, efficiency=0.5))
    assert [2 * point.tokens_s for point in half] == pytest.approx([point.tokens_s for point in whole])
    assert replace(half[0], batch=1) == half[0]
