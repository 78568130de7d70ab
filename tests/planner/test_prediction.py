"""Prediction: half of the loads predicts the others, and what is too far is said."""

from __future__ import annotations

from dataclasses import replace

import pytest
from served_texts import DELAY_S, LIMITS, PATH_S, TRUTH, served_texts

from planner.facts.catalogue import PlanError
from planner.fit import (
    ComparedLoad,
    EngineFit,
    LoadFigures,
    compared,
    constant_errors_of,
    errors_of,
    figures,
    fit_advice,
    loads_of,
    predicted,
)

pytestmark = pytest.mark.slow

EXACT = EngineFit(TRUTH, LIMITS, DELAY_S, PATH_S, 0)


def test_half_of_the_loads_predicts_the_others() -> None:
    """With noise of up to 5 %."""
    _, found = compared(loads_of(served_texts(noise=0.05)), LIMITS, 1)
    errors = errors_of(found)
    assert sum(each.held_out for each in found) in (len(found) // 2, (len(found) + 1) // 2) and len(found) >= 4
    assert max(errors.tokens_s, errors.ttft_p50_s, errors.ttft_p90_s, errors.tpot_p50_s) < 0.08
    assert "may be planned with" in fit_advice(found)


def test_what_is_held_out_is_not_fitted() -> None:
    """Loads that were twice as slow as the fitted ones are predicted wrong, and the advice says so."""
    loads = loads_of(served_texts())
    for load in loads[1::2]:
        load[:] = [
            each._replace(
                first_s=each.begun_s + 2 * (each.first_s - each.begun_s),
                heard_s=each.begun_s + 2 * (each.first_s - each.begun_s),
                last_s=each.begun_s + 2 * (each.last_s - each.begun_s),
            )
            for each in load
        ]
    fit, found = compared(loads, LIMITS, 1)
    errors = errors_of(found)
    assert fit.requests == sum(map(len, loads[::2]))
    assert errors.tpot_p50_s == pytest.approx(0.5, abs=0.1) and "too far" in fit_advice(found)


def test_loads_are_cut_where_nothing_is_in_flight_and_hold_every_text_once() -> None:
    texts = served_texts()
    loads = loads_of(texts)
    assert sorted(each for load in loads for each in load) == sorted(texts)
    ends = [max(each.last_s for each in load) for load in loads]
    assert all(end <= load[0].arrived_s for end, load in zip(ends, loads[1:], strict=False))


def test_a_load_without_a_pause_is_cut_into_equal_parts() -> None:
    busy = [each._replace(last_s=1e6) for each in served_texts()]
    loads = loads_of(busy)
    assert len(loads) == 8 and {len(load) for load in loads} == {50}
    with pytest.raises(PlanError, match="39 requests can be used, and a fit needs 40"):
        loads_of(busy[:39])
    with pytest.raises(PlanError, match="50,400 requests are more than the 50,000 that are simulated: --since"):
        loads_of(busy * 126)


def test_twice_the_load_waits_longer_and_two_workers_less() -> None:
    texts = served_texts(rates=(2, 3))
    one, fast, two = (predicted(EXACT, texts, *how) for how in ((1, 1.0), (1, 2.0), (2, 2.0)))
    p90 = [figures(EXACT, each).ttft_p90_s for each in (one, fast, two)]
    assert p90[0] < p90[1] and p90[2] < p90[1]
    assert [text.output for text in one] == [each.answer for each in texts], "in the order of what was served"


def test_a_load_without_a_figure_counts_in_no_error() -> None:
    _, found = compared(loads_of(served_texts()), LIMITS, 1)
    empty = replace(found[1], measured=replace(found[1].measured, tpot_p50_s=0.0))
    assert errors_of([found[0], empty]).tpot_p50_s == 0.0


def off(**scales: float) -> list[ComparedLoad]:
    """Six loads, the held-out ones predicted so many times too high; each measures twice the one before it."""
    found = []
    for number in range(6):
        seen = LoadFigures(*(2.0**number * each for each in (100.0, 0.1, 0.2, 0.01)))
        said = replace(seen, **{name: scale * getattr(seen, name) for name, scale in scales.items()})
        found.append(ComparedLoad(float(number), 20, number % 2 == 1, seen, said))
    return found


@pytest.mark.parametrize("name", ["tokens_s", "ttft_p50_s", "ttft_p90_s", "tpot_p50_s"])
def test_one_figure_that_is_too_far_is_enough(name: str) -> None:
    """Times of a token that are a third too long, too: a simulator that is right in all else cannot plan with them."""
    assert "may be planned with" in fit_advice(off(**{name: 1.14}))
    said = fit_advice(off(**{name: 1.33}))
    assert "too far" in said and "33 %" in said


def test_the_worst_load_and_a_constant_stand_beside_the_median() -> None:
    """Fitted 100, 400, 1600: their median is 400; of 200, 800 and 3200 it is off by 100 %, 50 % and 87.5 %."""
    found = off(tokens_s=1.1)
    found[5] = replace(found[5], predicted=replace(found[5].predicted, tokens_s=2 * 3200.0))
    assert errors_of(found).tokens_s == pytest.approx(0.1)
    assert errors_of(found, max).tokens_s == pytest.approx(1.0)
    assert constant_errors_of(found).tokens_s == pytest.approx(0.875)
    assert "whatever the load" not in fit_advice(found)


def test_a_simulator_that_a_constant_beats_is_not_praised_for_it() -> None:
    """All loads yield the same, and it is 10 % off."""
    flat = LoadFigures(100.0, 0.1, 0.2, 0.01)
    found = [ComparedLoad(0.0, 20, number % 2 == 1, flat, replace(flat, tokens_s=110.0)) for number in range(4)]
    assert fit_advice(found).endswith("The median of the fitted loads, whatever the load, is nearer in throughput.")
