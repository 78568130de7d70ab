"""Fitting: planted coefficients come back, outliers move none, and what the measurements do not tell is refused."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from statistics import median

import pytest

from planner.fit import REGIME, DecodeRegime, FittedTimes, least_squares, nonnegative, robust, sparse

PLANTED = (0.012, 2e-7, 4e-5)
SMALL, LARGE = DecodeRegime(*PLANTED), DecodeRegime(0.008, 2e-7, 8e-5)
PREFILL = (0.004, 5e-5, 2e-9)


def median_error(predicted: Sequence[float], measured: Sequence[float]) -> float:
    return median(abs(each / real - 1) for each, real in zip(predicted, measured, strict=True))


def measured(noise: float, seed: int = 1, count: int = 400) -> tuple[list[tuple[float, ...]], list[float]]:
    """Terms (1, tokens in the cache, texts) and seconds of decode steps."""
    random = Random(seed)
    rows: list[tuple[float, ...]] = []
    for _ in range(count):
        texts = random.randint(1, 90)
        rows.append((1.0, float(texts * random.randint(64, 2000)), float(texts)))
    return rows, [sum(a * b for a, b in zip(row, PLANTED, strict=True)) * random.gauss(1, noise) for row in rows]


def test_exact_times_give_the_planted_coefficients() -> None:
    rows, values = measured(0.0)
    for found in (least_squares(rows, values), nonnegative(rows, values, ()), robust(rows, values, ())):
        assert found == pytest.approx(PLANTED, rel=1e-4)


def test_outliers_move_the_robust_fit_little() -> None:
    """One step in three takes half as long again: the machine was busy."""
    rows, values = measured(0.01)
    values = [1.5 * value if number % 3 == 0 else value for number, value in enumerate(values)]

    def error(found: list[float]) -> float:
        predicted = [sum(a * b for a, b in zip(row, found, strict=True)) for row in rows]
        return median_error(predicted, measured(0.0)[1])

    assert error(robust(rows, values, ())) < 0.02 < error(least_squares(rows, values))


def test_a_coefficient_below_zero_is_left_out() -> None:
    rows, values = measured(0.0)
    shrinking = [(one, held, texts, 1 / texts) for one, held, texts in rows]
    values = [value - 0.001 / row[2] for row, value in zip(rows, values, strict=True)]
    found = nonnegative(shrinking, values, ())
    assert found[3] == 0.0 and min(found) >= 0


def test_a_doubtful_column_stays_if_the_measurements_call_for_it() -> None:
    """A column of chance does not lower the errors by enough, and is left out; the planted ones stay."""
    random, (rows, values) = Random(3), measured(0.05)
    wide = [(*row, random.random()) for row in rows]
    assert robust(wide, values, (3, 2))[3] > 0, "a chance finds a use"
    found = sparse(wide, values, (3, 2))
    assert found[3] == 0 and found[:3] == pytest.approx(PLANTED, rel=0.1)


def test_what_the_measurements_do_not_tell_is_refused() -> None:
    with pytest.raises(ValueError, match="differ enough"):
        least_squares([(1.0, 2.0), (1.0, 2.0)], [1.0, 1.0])
    with pytest.raises(ValueError, match="nothing was measured"):
        nonnegative([], [], ())


def test_a_step_has_the_times_of_its_regime_and_of_its_prompts() -> None:
    found = FittedTimes(PREFILL, SMALL, LARGE)
    assert found.step_s(REGIME - 1, 1000, 0) == SMALL.step_s(REGIME - 1, 1000)
    assert found.step_s(REGIME, 1000, 0) == LARGE.step_s(REGIME, 1000)
    added = 0.004 + 5e-5 * 500 + 2e-9 * 500**2
    assert found.step_s(4, 2500, 500) == pytest.approx(SMALL.step_s(4, 2000) + added)
