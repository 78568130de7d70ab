"""What a client is told of a wait: corrected by past errors, in a band that holds, and not more without a reason."""

from __future__ import annotations

import random
from collections import deque

import pytest
from msgspec.structs import replace
from waits_clock import Clock, clock

from api.openai.errors import Wait, wait_fields
from api.waits import (
    DEFAULT_RETRY_S,
    FRESH_S,
    FULL_LANE_SHARE,
    LEARNED_S,
    MAX_ERRORS,
    MAX_SHOWN,
    MIN_ERRORS,
    EstimateSource,
    Prediction,
    ShownWaits,
    WaitErrors,
    WaitEstimates,
)
from streaming.fleet.plans import Plan, Prospect
from streaming.jobs.job import Job, Text
from streaming.order import Priority

__all__ = ["clock"]  # a fixture

STANDARD = EstimateSource("m", Priority.STANDARD, "plan")
LIMITED = Job(id="l", model="m", tenant="t", priority=Priority.STANDARD, prompt=Text(("x",)), deadline_ms=9)
JOB = Job(id="j", model="m", tenant="t", priority=Priority.STANDARD, prompt=Text(("x",)))


@pytest.mark.parametrize("drift", [0.0, 0.002, -0.001])
def test_a_band_holds_what_it_promises(drift: float) -> None:
    """Of waits of any length, about a tenth lies below the band and a tenth above, also while the load changes: each
    wait is told by the errors of those that had started by then."""
    chance, errors = random.Random(5), WaitErrors()
    under_way: deque[tuple[Prediction, Wait, float]] = deque()
    inside = count = 0
    for number in range(600):
        prediction = Prediction(STANDARD, chance.uniform(0, 300))
        told = errors.wait(prediction)
        factor = 1.3 * (1 + drift * number) * chance.lognormvariate(0, 0.2)
        waited_s = max(0.0, (prediction.seconds + 1) * factor - 1)
        under_way.append((prediction, told, waited_s))
        if len(under_way) > 12:
            errors.learn(*under_way.popleft())
        if told.low_ms is not None and told.high_ms is not None:
            assert told.low_ms <= told.eta_ms <= told.high_ms
            inside += told.low_ms <= 1000 * waited_s <= told.high_ms
            count += 1
    assert count > 500 and 0.7 <= inside / count <= 0.9


def test_bounds_move_the_band_only_as_far_as_they_say(clock: Clock) -> None:
    """Jobs that expire after a fifth of their estimate say nothing of longer waits, which others measured; and bounds
    alone make no estimate smaller."""
    asked, errors = Prediction(STANDARD, 10.0), WaitErrors()
    for _ in range(MIN_ERRORS):
        errors.learn(asked, Wait(10_000), 1.2, bound=True)
    assert errors.wait(asked) == Wait(10_000, 1_200)
    for _ in range(MIN_ERRORS):
        errors.learn(asked, Wait(10_000), 10.0)
    assert errors.wait(asked) == Wait(10_000, 10_000, 10_000)
    alone = WaitErrors()
    for _ in range(MIN_ERRORS):
        alone.learn(asked, Wait(10_000), 0.0, bound=True)
    assert alone.wait(asked) == Wait(10_000, 100), "a tenth, where no job tells more"


def learn(errors: WaitErrors, source: EstimateSource, waited_s: float, count: int) -> None:
    for _ in range(count):
        prediction = Prediction(source, 10.0)
        errors.learn(prediction, errors.wait(prediction), waited_s)


def test_there_is_no_band_without_enough_errors_of_the_same_source(clock: Clock) -> None:
    """Errors of another lane, another estimator or of jobs with a time limit, few ones and old ones say nothing."""
    errors = WaitErrors()
    asked = Prediction(STANDARD, 10.0)
    others = (
        STANDARD._replace(lane=Priority.BATCH),
        STANDARD._replace(estimator="rate"),
        EstimateSource.of(LIMITED, "plan"),
    )
    assert EstimateSource.of(JOB, "plan") == STANDARD != EstimateSource.of(LIMITED, "plan")
    for source in others:
        learn(errors, source, 21.0, MIN_ERRORS)
    assert errors.wait(asked) == Wait(10_000)
    learn(errors, STANDARD, 21.0, MIN_ERRORS - 1)
    assert errors.wait(asked) == Wait(21_000), "twice as long as predicted, each time"
    learn(errors, STANDARD, 21.0, 1)
    wait = errors.wait(asked)
    assert wait.eta_ms == wait.low_ms == 21_000 and wait.high_ms is not None
    clock.now += LEARNED_S + 1
    assert errors.wait(asked) == Wait(10_000)
    learn(errors, STANDARD, 10.0, 1)
    assert errors.wait(asked) == Wait(10_000), "the old ones are gone"


def test_a_wait_of_nothing_has_a_band_too() -> None:
    errors = WaitErrors()
    for _ in range(MIN_ERRORS):
        errors.learn(Prediction(STANDARD, 0.0), Wait(0), 0.002)
    wait = errors.wait(Prediction(STANDARD, 0.0))
    assert wait.low_ms is not None and 0 <= wait.low_ms <= 5
    for _ in range(MAX_ERRORS):
        errors.learn(Prediction(STANDARD, 100.0), Wait(100_000), 0.0)
    assert errors.wait(Prediction(STANDARD, 0.0)).low_ms == 0, "never less than nothing"


def test_unknown_fields_are_null() -> None:
    assert wait_fields(None) == {"eta_ms": None, "eta_low_ms": None, "eta_high_ms": None}
    assert wait_fields(Wait(1, 0, 2)) == {"eta_ms": 1, "eta_low_ms": 0, "eta_high_ms": 2}


# --- what was shown --------------------------------------------------------------------------------------------------


def test_a_shown_wait_does_not_rise_unless_more_jobs_are_ahead() -> None:
    """Noise of the estimate is held down; more work ahead is told at once; the high end of the band is always told."""
    shown = ShownWaits()
    assert shown.settle("j", Wait(10_000), 5) == Wait(10_000)
    assert shown.settle("j", Wait(14_000, 12_000, 20_000), 5) == Wait(10_000, 10_000, 20_000)
    assert shown.settle("j", Wait(8_000), 4) == Wait(8_000)
    assert shown.settle("j", Wait(9_000), 4) == Wait(8_000), "held down to the last one, not to the first"
    assert shown.settle("j", Wait(9_000), 5) == Wait(9_000), "a job of a higher lane came"
    assert shown.settle("other", Wait(99_000), 4) == Wait(99_000)


def test_shown_waits_are_bounded() -> None:
    """The job that was not shown for longest is forgotten."""
    shown = ShownWaits()
    for number in range(MAX_SHOWN):
        shown.settle(str(number), Wait(1), 0)
    shown.settle("0", Wait(1), 0)
    shown.settle("new", Wait(1), 0)
    assert shown.settle("0", Wait(5), 0) == Wait(1) and shown.settle("1", Wait(5), 0) == Wait(5)


# --- by the plan -----------------------------------------------------------------------------------------------------


def waits(partitions: int = 1, *, want: int = 1, **lanes: Prospect) -> WaitEstimates:
    found = WaitEstimates(partitions)
    found.plans.learn({"m": Plan(model="m", want=want, reason="r", at_ms=1_000, lanes=lanes)}, 1_000)
    return found


def test_the_wait_of_a_job_counts_all_partitions() -> None:
    """A position is one partition's, the plan's number of waiting jobs that of all of them."""
    lane = Prospect(wait_s=100.0, each_s=1.0, waiting=100)
    for partitions, position in ((1, 100), (4, 25)):
        told = waits(partitions, standard=lane).wait_of(JOB, position)
        assert told == Wait(100_000)


def test_more_work_in_a_higher_lane_lifts_the_estimate() -> None:
    found = waits(interactive=Prospect(0.0, 1.0, 0), standard=Prospect(5.0, 1.0, 3), batch=Prospect(0.0, 1.0, 9))
    assert found.wait_of(JOB, 3) == Wait(5_000)
    busier = {"interactive": Prospect(4.0, 1.0, 4), "standard": Prospect(9.0, 1.0, 3)}
    found.plans.learn({"m": Plan(model="m", want=1, reason="r", at_ms=1_000, lanes=busier)}, 1_000)
    assert found.wait_of(JOB, 3) == Wait(9_000)
    lower = {"interactive": Prospect(4.0, 1.0, 4), "standard": Prospect(19.0, 1.0, 3), "batch": Prospect(1.0, 1.0, 99)}
    found.plans.learn({"m": Plan(model="m", want=1, reason="r", at_ms=1_000, lanes=lower)}, 1_000)
    assert found.wait_of(JOB, 3) == Wait(9_000), "lower lanes are not ahead of it"


def test_when_to_try_again_follows_from_the_wait() -> None:
    """At the lane's end; for a full lane, when a part of it has started; 5 s where nothing is known."""
    lane = Prospect(wait_s=40.0, each_s=0.4, waiting=100)
    for partitions, position in ((1, 100), (2, 50)):
        found = waits(partitions, standard=lane)
        assert found.retry_s(JOB) == 40.0
        assert found.retry_s(JOB, position) == pytest.approx(40.0 / FULL_LANE_SHARE, abs=0.001)
    assert found.retry_s(replace(JOB, priority=Priority.BATCH)) == DEFAULT_RETRY_S == WaitEstimates().retry_s(JOB, 9)


def test_only_a_fresh_plan_of_a_model_that_is_awake_refuses(clock: Clock) -> None:
    """The first job of a sleeping model wakes it: it must not be refused."""
    lane = Prospect(wait_s=40.0)
    found, asleep = waits(standard=lane), waits(standard=lane, want=0)
    assert found.plans.can_judge("m") and not asleep.plans.can_judge("m") and not found.plans.can_judge("other")
    clock.now += FRESH_S + 0.1
    assert not found.plans.can_judge("m")
