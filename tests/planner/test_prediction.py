"""Step times of a known engine come back from what it served; half of the loads predicts the others."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from served_texts import DELAY_S, LIMITS, PATH_S, TRUTH, served_texts

from planner import fit as fitting
from planner.facts.catalogue import PlanError
from planner.fit import _coefficients, limits_of
from planner.simulator.engine import EngineShape
from telemetry.records.reader import Evidence
from telemetry.records.schema import SampleRecord

pytestmark = pytest.mark.slow

fitted = cache(fitting.fitted)
EXACT = fitting.EngineFit(TRUTH, LIMITS, DELAY_S, PATH_S, 0)


def test_half_of_the_loads_predicts_the_others() -> None:
    """With noise of up to 5 %."""
    _, found = fitting.compared(fitting.loads_of(served_texts(noise=0.05)), LIMITS, 1)
    errors = fitting.errors_of(found)
    assert sum(each.held_out for each in found) in (len(found) // 2, (len(found) + 1) // 2) and len(found) >= 4
    assert max(errors.tokens_s, errors.ttft_p50_s, errors.ttft_p90_s, errors.tpot_p50_s) < 0.08
    assert "may be planned with" in fitting.fit_advice(found)


def test_what_is_held_out_is_not_fitted() -> None:
    """Loads that were twice as slow as the fitted ones are predicted wrong, and the advice says so."""
    loads = fitting.loads_of(served_texts())
    for load in loads[1::2]:
        load[:] = [
            each._replace(
                first_s=each.begun_s + 2 * (each.first_s - each.begun_s),
                heard_s=each.begun_s + 2 * (each.first_s - each.begun_s),
                last_s=each.begun_s + 2 * (each.last_s - each.begun_s),
            )
            for each in load
        ]
    fit, found = fitting.compared(loads, LIMITS, 1)
    errors = fitting.errors_of(found)
    assert fit.requests == sum(map(len, loads[::2]))
    assert errors.tpot_p50_s == pytest.approx(0.5, abs=0.1) and "too far" in fitting.fit_advice(found)


def test_loads_are_cut_where_nothing_is_in_flight_and_hold_every_text_once() -> None:
    texts = served_texts()
    loads = fitting.loads_of(texts)
    assert sorted(each for load in loads for each in load) == sorted(texts)
    ends = [max(each.last_s for each in load) for load in loads]
    assert all(end <= load[0].arrived_s for end, load in zip(ends, loads[1:], strict=False))


def test_a_load_without_a_pause_is_cut_into_equal_parts() -> None:
    busy = [each._replace(last_s=1e6) for each in served_texts()]
    loads = fitting.loads_of(busy)
    assert len(loads) == 8 and {len(load) for load in loads} == {50}
    with pytest.raises(PlanError, match="39 requests can be used, and a fit needs 40"):
        fitting.loads_of(busy[:39])
    with pytest.raises(PlanError, match="50,400 requests are more than the 50,000 that are simulated: --since"):
        fitting.loads_of(busy * 126)


def test_twice_the_load_waits_longer_and_two_workers_less() -> None:
    texts = served_texts(rates=(2, 3))
    one, fast, two = (fitting.predicted(EXACT, texts, *how) for how in ((1, 1.0), (1, 2.0), (2, 2.0)))
    p90 = [fitting.figures(EXACT, each).ttft_p90_s for each in (one, fast, two)]
    assert p90[0] < p90[1] and p90[2] < p90[1]
    assert [text.output for text in one] == [each.answer for each in texts], "in the order of what was served"


def off(**scales: float) -> list[fitting.ComparedLoad]:
    """Six loads, the held-out ones predicted so many times too high; each measures twice the one before it."""
    found = []
    for number in range(6):
        seen = fitting.LoadFigures(*(2.0**number * each for each in (100.0, 0.1, 0.2, 0.01)))
        said = replace(seen, **{name: scale * getattr(seen, name) for name, scale in scales.items()})
        found.append(fitting.ComparedLoad(float(number), 20, number % 2 == 1, seen, said))
    return found


def test_the_worst_load_stands_beside_the_median() -> None:
    found = off(tokens_s=1.1)
    found[5] = replace(found[5], predicted=replace(found[5].predicted, tokens_s=2 * 3200.0))
    assert fitting.errors_of(found).tokens_s == pytest.approx(0.1)
    assert fitting.errors_of(found, max).tokens_s == pytest.approx(1.0)


def test_a_known_engine_comes_back() -> None:
    found = fitted(served_texts(), LIMITS)
    for texts, held, prefilled in ((1, 200, 0), (8, 6000, 0), (16, 20_000, 0), (4, 2000, 500)):
        assert found.times.step_s(texts, held, prefilled) == pytest.approx(
            TRUTH.step_s(texts, held, prefilled), rel=0.04
        )
    assert found.delay_s == pytest.approx(DELAY_S, abs=0.004) and found.path_s == pytest.approx(PATH_S, abs=0.001)


def test_workers_are_fitted_together_and_do_not_count_beside_each_other() -> None:
    """The same texts on two workers at the same times tell the same."""
    texts = served_texts()
    twice = [each._replace(worker=name) for name in ("a", "b") for each in texts]
    assert list(fitting.by_worker(twice)) == ["a", "b"]
    one, both = fitted(texts, LIMITS), fitting.fitted(twice, LIMITS)
    assert both.times.step_s(8, 4000, 0) == pytest.approx(one.times.step_s(8, 4000, 0), rel=0.01)


def test_too_little_is_refused() -> None:
    with pytest.raises(PlanError, match="at least 40 are needed"):
        fitting.fitted(served_texts()[:10], LIMITS)


def test_the_simulator_gets_a_cache_of_any_size_if_only_slots_limit_it() -> None:
    """Its worker says so with 0 tokens in its samples, as the JSON does."""
    sample = SampleRecord(at_us=0, role="worker", process="w", pid=1, cpu_s=0.0, slots=3, kv_tokens=0)
    limits = limits_of(Evidence(samples={("w", 1): [sample]}), served_texts(), step_tokens=512)
    assert (limits.kv_tokens, limits.slots, limits.prefill_tokens) == (fitting.NO_LIMIT, 3, 512)
    found = fitting.fitted(served_texts(), limits)
    assert (found.shape.kv_tokens, found.shape.slots) == (fitting.NO_LIMIT, 3)
    assert _coefficients(found)["kv_tokens"] == 0
    assert _coefficients(fitted(served_texts(), LIMITS))["kv_tokens"] == LIMITS.kv_tokens


def beside(begun_s: float, first_s: float, *, by_slot: bool) -> fitting._Equation:
    """What is known of a prompt of 10 tokens beside two answers of a token a second, of which one ends after 4 s."""
    texts = [
        fitting.ServedText("engine", at, at, at, last_s, at, 10, round(last_s - at) + 1)
        for at, last_s in ((0, 20), (0, 4))
    ]
    texts.append(fitting.ServedText("engine", 1, 1, 2, 18, 2, 1, 17))
    texts.append(fitting.ServedText("engine", begun_s, begun_s, first_s, 19, first_s, 10, 9))
    (found,) = [
        each for each in fitting._neighbours(fitting.by_worker(texts)["engine"]) if each.text.begun_s == begun_s
    ]
    return fitting._of_prefill(found, EngineShape(fitting.NO_LIMIT, 8, 10, by_slot=by_slot))


def test_llama_cpp_has_fewer_tokens_for_prompts_where_others_generate() -> None:
    """Ten tokens a step, of which two go to others that generate: a prompt of ten takes two steps."""
    assert beside(7.0, 9.0, by_slot=True).terms[3] == 2
    assert beside(7.0, 9.0, by_slot=False).terms[3] == 1


@pytest.mark.parametrize(("begun_s", "waited", "since_s"), [(4.25, 1.0, 0.25), (7.0, 0.5, 0.0)])
def test_what_comes_while_a_step_is_under_way_waits_for_it(begun_s: float, waited: float, since_s: float) -> None:
    """For all of one that has just begun, as the last token of another text says, counted from its begin; else for half
    of one, in the mean."""
    found = beside(begun_s, begun_s + 2, by_slot=True)
    assert found.terms[0] == found.terms[3] + waited
    assert found.seconds == pytest.approx(2 + since_s)
