"""Calibration: the step times of a known engine come back from the requests that it has served."""

from __future__ import annotations

import pytest
from served_texts import DELAY_S, LIMITS, PATH_S, TRUTH, served_texts

from planner.commands.records import limits_of
from planner.commands.simulations import _coefficients
from planner.facts.catalogue import PlanError
from planner.fit import NO_LIMIT, ServedText, _Equation, _neighbours, _of_prefill, by_worker, fitted
from planner.simulator.engine import EngineShape
from telemetry.records.reader import Evidence
from telemetry.records.schema import SampleRecord

pytestmark = pytest.mark.slow


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
    assert list(by_worker(twice)) == ["a", "b"]
    one, both = fitted(texts, LIMITS), fitted(twice, LIMITS)
    assert both.times.step_s(8, 4000, 0) == pytest.approx(one.times.step_s(8, 4000, 0), rel=0.01)


def test_requests_all_alike_tell_what_a_step_takes() -> None:
    """What cannot be told is 0: a text alone of one length tells no share of a text or of the cache."""
    alike = [
        each._replace(prompt=100, answer=11, begun_s=n, arrived_s=n, first_s=n + 0.1, last_s=n + 0.3, heard_s=n + 0.1)
        for n, each in enumerate(served_texts()[:60])
    ]
    found = fitted(alike, LIMITS)
    assert found.times.step_s(1, 100, 0) == pytest.approx(0.02, rel=0.01)


def test_too_little_is_refused() -> None:
    with pytest.raises(PlanError, match="at least 40 are needed"):
        fitted(served_texts()[:10], LIMITS)


def test_the_simulator_gets_a_cache_of_any_size_if_only_slots_limit_it() -> None:
    """Its worker says so with 0 tokens in its samples, as the JSON does."""
    sample = SampleRecord(at_us=0, role="worker", process="w", pid=1, cpu_s=0.0, slots=3, kv_tokens=0)
    limits = limits_of(Evidence(samples={("w", 1): [sample]}), served_texts(), step_tokens=512)
    assert (limits.kv_tokens, limits.slots, limits.prefill_tokens) == (NO_LIMIT, 3, 512)
    found = fitted(served_texts(), limits)
    assert (found.shape.kv_tokens, found.shape.slots) == (NO_LIMIT, 3)
    assert _coefficients(found)["kv_tokens"] == 0
    assert _coefficients(fitted(served_texts(), LIMITS))["kv_tokens"] == LIMITS.kv_tokens


def beside(begun_s: float, first_s: float, *, by_slot: bool) -> _Equation:
    """What is known of a prompt of 10 tokens beside two answers of a token a second, of which one ends after 4 s."""
    texts = [
        ServedText("engine", at, at, at, last_s, at, 10, round(last_s - at) + 1) for at, last_s in ((0, 20), (0, 4))
    ]
    texts.append(ServedText("engine", 1, 1, 2, 18, 2, 1, 17))
    texts.append(ServedText("engine", begun_s, begun_s, first_s, 19, first_s, 10, 9))
    (found,) = [each for each in _neighbours(by_worker(texts)["engine"]) if each.text.begun_s == begun_s]
    return _of_prefill(found, EngineShape(NO_LIMIT, 8, 10, by_slot=by_slot))


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
