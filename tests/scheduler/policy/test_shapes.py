"""Which of a model's pools new jobs go to."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config import ConfigError
from scheduler.policy.snapshot import MIN_DWELL_S, Shape, ShapeChoice, calibrated, route, threshold
from scheduler.settings import shapes_of
from streaming.fleet.settings import ModelSettings, ShapeSettings

LOW_HIGH = (Shape("low", 64), Shape("high"))
SWEEP = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def saturating(one: float, most: float) -> list[tuple[float, float]]:
    """A sweep of a pool that gives `one` for a single job and `most` for ever so many."""
    return [(jobs, 1 / (1 / (one * jobs) + 1 / most)) for jobs in SWEEP]


def crossing(few: tuple[float, float], many: tuple[float, float]) -> float:
    """Where 1/(1/(a c) + 1/A) = 1/(1/(b c) + 1/B)."""
    return (1 / many[0] - 1 / few[0]) / (1 / few[1] - 1 / many[1])


@given(st.floats(20, 100), st.floats(200, 800), st.floats(0.2, 0.8), st.floats(1.5, 4))
def test_the_threshold_is_where_the_curves_cross(one: float, most: float, slower: float, more: float) -> None:
    """Between the two measured points around the analytic crossing; at the ends where there is none in the sweep."""
    few, many = (one, most), (one * slower, most * more)
    found, true = threshold(saturating(*few), saturating(*many)), crossing(few, many)
    if true >= SWEEP[-1]:
        assert found == math.inf or found > SWEEP[-2]
    else:
        below, above = next(((a, b) for a, b in pairwise((0, *SWEEP)) if a < true <= b))
        assert below <= found <= above


def test_a_shape_that_is_never_behind_serves_everything() -> None:
    """And one that always is, nothing."""
    better, worse = saturating(50, 900), saturating(40, 400)
    assert (threshold(worse, better), threshold(better, worse)) == (1.0, math.inf)
    assert calibrated([("a", better), ("b", worse)]) == (Shape("a"), Shape("b"))
    with pytest.raises(ValueError, match="no point"):
        threshold([], better)


def test_one_noisy_point_is_no_crossing() -> None:
    """What counts is from where on the other shape stays ahead."""
    few = [(1.0, 10.0), (16.0, 100.0), (64.0, 120.0), (256.0, 130.0)]
    many = [(1.0, 10.1), (16.0, 60.0), (64.0, 140.0), (256.0, 300.0)]
    assert 16 < threshold(few, many) < 64


@given(st.lists(st.integers(1, 256), min_size=2, max_size=400), st.floats(0.05, 2))
def test_switches_are_never_closer_than_the_dwell(jobs: list[int], tick: float) -> None:
    """Whatever the load does."""
    state: ShapeChoice | None = None
    switches = []
    for number, load in enumerate(jobs):
        before, state = state, route(state, LOW_HIGH, load, number * tick)
        if before is not None and before.shape != state.shape:
            switches.append(number * tick)
    assert all(later - earlier >= MIN_DWELL_S - 1e-6 for earlier, later in pairwise([0.0, *switches]))


def test_a_ramp_switches_once_each_way() -> None:
    """1 -> 256 -> 1: up at 64, down below 51."""
    state: ShapeChoice | None = None
    loads = [*range(1, 257), *range(256, 0, -1)]
    shapes = []
    for number, load in enumerate(loads):
        state = route(state, LOW_HIGH, load, float(number))
        shapes.append((state.shape, load))
    changes = [(new, load) for (old, _), (new, load) in pairwise(shapes) if old != new]
    assert [name for name, _ in changes] == ["high", "low"]
    assert 64 <= changes[0][1] <= 68 and 46 <= changes[1][1] <= 51


def test_shapes_that_were_renamed_are_chosen_anew() -> None:
    """A state of other shapes is no obstacle."""
    assert route(ShapeChoice("gone", 100.0, 0.0, 0.0), LOW_HIGH, 100, 1.0).shape == "high"


def test_a_shape_between_two_equal_thresholds_is_refused() -> None:
    """There is no load it would be for."""
    curves = {"small": ((1, 10), (64, 100)), "middle": ((1, 20), (64, 200)), "large": ((1, 30), (64, 300))}
    model = ModelSettings(engine="sim", shapes={name: ShapeSettings(curve=curve) for name, curve in curves.items()})
    with pytest.raises(ConfigError, match=r"models\.m\.shapes\.middle: by the curves another shape is better"):
        shapes_of("m", model)
