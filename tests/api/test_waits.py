"""What a client is told of a wait: by the plan, corrected by measured waits, and not more without a reason."""

from __future__ import annotations

import dataclasses
import random
from collections import deque
from collections.abc import Sequence
from typing import Any, cast

import pytest
from msgspec.structs import replace

from api.openai.errors import Wait
from api.waits import (
    DEFAULT_RETRY_S,
    FULL_LANE_SHARE,
    LEARNED_S,
    MAX_SHOWN,
    MAX_WATCHED,
    MIN_ERRORS,
    RATE_WINDOW_S,
    CompletionRate,
    EstimateSource,
    Prediction,
    ShownWaits,
    WaitErrors,
    WaitEstimates,
    WaitSampler,
    WorkerReadiness,
    measured_wait,
)
from streaming.fleet.plans import Plan
from streaming.fleet.process import Process, Prospect
from streaming.fleet.processes import this_process
from streaming.ids import new_job_id
from streaming.jobs.job import Job, JobState, Text
from streaming.jobs.lease import Lease
from streaming.jobs.queue import Queue
from streaming.jobs.reader import JobReader
from streaming.jobs.records import JobRecord
from streaming.order import Priority
from streaming.redis.client import RedisClient

STANDARD, BATCH = (EstimateSource("m", lane, "plan") for lane in (Priority.STANDARD, Priority.BATCH))
JOB = Job(id="j", model="m", tenant="t", priority=Priority.STANDARD, prompt=Text(("x",)))
LIMITED = replace(JOB, deadline_ms=9)


class Clock:
    """Stands in for the module `time`."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("api.waits.time", clock)
    return clock


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
        assert found.retry(JOB) == (40.0, 40_000)
        assert found.retry(JOB, position) == (pytest.approx(40.0 / FULL_LANE_SHARE, abs=0.001), 40_000)
    unknown = (DEFAULT_RETRY_S, None)
    assert found.retry(replace(JOB, priority=Priority.BATCH)) == unknown == WaitEstimates().retry(JOB, 9)


def test_only_jobs_that_ended_lately_count(clock: Clock) -> None:
    """Those before the window are forgotten; with fewer than two, nothing is known."""
    rate = CompletionRate()
    for _ in range(7):
        rate.ended("m")
    clock.now += RATE_WINDOW_S + 1
    assert rate.eta_ms("m", 0) is None and rate.eta_ms("m", 100) is None
    rate.ended("m")
    clock.now += 10
    rate.ended("m")
    clock.now += 10
    assert rate.eta_ms("m", 0) == 10_000, "two in twenty seconds"
    assert rate.eta_ms("m", 2) == 30_000
    assert rate.eta_ms("other", 0) is None


# --- no worker is ready ----------------------------------------------------------------------------------------------


def a_worker(state: str, model: str = "m") -> Process:
    return replace(this_process("worker", "worker-1"), state=state, model=model)


def test_why_no_worker_can_claim_a_job() -> None:
    """Nothing is claimed of a model while it is not known, and before the reports were read."""
    readiness = WorkerReadiness()
    assert readiness.problem("m") == ""
    readiness.learn([])
    assert readiness.problem("m") == "no worker is ready: none is running"
    readiness.learn([a_worker("starting"), a_worker("draining"), a_worker("ready", "other")])
    assert readiness.problem("m") == "no worker is ready: one is draining, one is starting"
    assert readiness.problem("other") == ""
    readiness.learn([a_worker("starting"), a_worker("ready")])
    assert readiness.problem("m") == ""


def test_a_worker_whose_servers_are_away_begins_nothing() -> None:
    """So no wait is known, whatever the plan and the last minutes say."""
    waits, job = WaitEstimates(), replace(JOB, priority=Priority.BATCH)
    plan = Plan(model="m", want=1, reason="r", at_ms=0, lanes={"batch": Prospect(0.0)})
    away = replace(a_worker("ready"), away=("http://gpu-1:8000/v1 (connection refused)",), away_s=3.0)
    for plans in ({"m": plan}, {}):
        waits.plans.learn(plans, 0)
        for _ in range(2):
            waits.completions.ended("m")
        waits.readiness.learn([away])
        assert waits.wait(job) is None
        assert waits.readiness.problem("m") == "no worker is ready: one is waiting for its server"
        waits.readiness.learn([away, a_worker("ready")])
        assert waits.wait(job) is not None and not waits.readiness.problem("m")


@pytest.mark.parametrize(("wake_s", "ready", "known"), [(0.0, False, False), (0.0, True, True), (8.0, False, True)])
def test_a_wait_without_a_ready_worker_is_unknown(wake_s: float, ready: bool, known: bool) -> None:
    """Unless the first worker is expected: a plan whose start is overdue, as of one that crashes, is no estimate."""
    waits, job = WaitEstimates(), replace(JOB, priority=Priority.BATCH)
    plan = Plan(model="m", want=1, reason="r", at_ms=0, wake_s=wake_s, lanes={"batch": Prospect(wake_s)})
    waits.plans.learn({"m": plan}, 0)
    waits.readiness.learn([a_worker("ready" if ready else "starting")])
    assert (waits.wait(job) is not None) == known


def test_a_start_that_takes_too_long_is_expected_no_more(clock: Clock) -> None:
    """A plan names a whole cold start while it has ordered none, as with a worker that crashes at each start. An order
    begins the time anew."""

    def expected(want: int) -> bool:
        at_ms = int(1000 * clock.now)
        plan = Plan(
            model="m", want=want, reason="r", at_ms=at_ms, wake_s=8.0, cold_start_s=8.0, lanes={"batch": Prospect(8.0)}
        )
        waits.plans.learn({"m": plan}, at_ms)
        waits.readiness.learn([a_worker("starting")])
        return waits.wait(job) is not None

    waits, job = WaitEstimates(), replace(JOB, priority=Priority.BATCH)
    waits.readiness.learn([a_worker("ready")])
    assert expected(want=1)
    clock.now += 8
    assert expected(want=1)
    clock.now += 1
    assert not expected(want=1)
    assert expected(want=0), "this job wakes it"
    assert expected(want=1)
    clock.now += 9
    assert not expected(want=1)


QUEUED = JobRecord(job=JOB, state=JobState.QUEUED, created_ms=10_000, keep_s=60, terminal=None)


class Records:
    """Stands in for the reader of jobs; counts what it is asked for."""

    def __init__(self) -> None:
        self.known: dict[str, JobRecord] = {}
        self.asked: list[str] = []

    async def records(self, job_ids: Sequence[str], **_: Any) -> list[JobRecord | None]:
        self.asked += job_ids
        return [self.known.get(job_id, QUEUED) for job_id in job_ids]


def ended(state: JobState, after_ms: int, started_ms: int = 0) -> JobRecord:
    return dataclasses.replace(QUEUED, state=state, done_ms=10_000 + after_ms, started_ms=started_ms)


def test_a_wait_ends_with_the_first_claim() -> None:
    """Whatever came later. A job that never started waited longer than it was there; that may say something."""
    running = dataclasses.replace(QUEUED, state=JobState.RUNNING, started_ms=14_500)
    assert measured_wait(QUEUED, 9.0) is None and measured_wait(running, 9.0) == (4.5, False)
    assert measured_wait(ended(JobState.COMPLETED, 60_000, 14_500), 9.0) == (4.5, False)
    assert measured_wait(dataclasses.replace(running, started_ms=9_990), 9.0) == (0.0, False), "a clock set back"
    for after_ms in (5_000, 20_000):
        expired = measured_wait(ended(JobState.EXPIRED, after_ms), 9.0)
        assert expired == (after_ms / 1000, True), "also before the time that was predicted"
    assert measured_wait(ended(JobState.CANCELLED, 20_000), 9.0) == (20.0, True)
    assert measured_wait(ended(JobState.CANCELLED, 5_000), 9.0) is None


async def test_jobs_that_expire_teach_that_a_limit_cannot_be_met(clock: Clock) -> None:
    """They are looked at once their limit is over, not when they were predicted to start."""
    records, errors = Records(), WaitErrors()
    watching, prediction = WaitSampler(cast(JobReader, records), errors), Prediction(STANDARD, 15.0)
    for number in range(MIN_ERRORS):
        clock.now += 1.0
        watching.note(f"s{number}", prediction, errors.wait(prediction), 2_000)
        records.known[f"s{number}"] = ended(JobState.EXPIRED, 2_100)
        await watching.look()
    clock.now += 2.0
    await watching.look()
    assert not watching.watched
    wait = errors.wait(prediction)
    assert wait.low_ms is not None and 2_000 < wait.low_ms < 2_500 and wait.eta_ms == 15_000 and wait.high_ms is None


@pytest.mark.parametrize("started_ms", [10**30, 10_000 + 600_000], ids=["corrupt", "clock set forward"])
async def test_a_wait_longer_than_the_job_was_watched_teaches_nothing(clock: Clock, started_ms: int) -> None:
    """One corrupt record must not become the estimate of every later job of its lane, which would be refused."""
    records, errors = Records(), WaitErrors()
    watching, prediction = WaitSampler(cast(JobReader, records), errors), Prediction(STANDARD, 15.0)
    watching.note("j", prediction, errors.wait(prediction))
    records.known["j"] = dataclasses.replace(QUEUED, state=JobState.RUNNING, started_ms=started_ms)
    clock.now += 16.0
    await watching.look()
    assert records.asked == ["j"] and not watching.watched
    assert errors.wait(prediction) == Wait(15_000)
    watching.note("k", prediction, errors.wait(prediction))
    records.known["k"] = dataclasses.replace(QUEUED, state=JobState.RUNNING, started_ms=10_000 + 16_500)
    clock.now += 16.0
    await watching.look()
    assert errors.wait(prediction).eta_ms == 16_500, "clocks that differ by less than a second are believed"


async def test_a_sample_of_each_lane_is_watched_until_it_starts(clock: Clock) -> None:
    """At most one a second and so many at once; none is forgotten, and none is read all the time."""
    records, errors = Records(), WaitErrors()
    watching = WaitSampler(cast(JobReader, records), errors)
    for number in range(2 * MAX_WATCHED):
        clock.now += 1.0
        for again in range(3):
            watching.note(f"s{number}.{again}", Prediction(STANDARD, 0.0), Wait(1_000))
    watching.note("b", Prediction(BATCH, 1e6), Wait(0))
    await watching.look()
    assert records.asked == [f"s{number}.0" for number in range(MAX_WATCHED)], "a long queue hides no other lane"
    records.asked.clear()
    running = dataclasses.replace(QUEUED, state=JobState.RUNNING, started_ms=11_000)
    records.known = {f"s{number}.0": running for number in range(MAX_WATCHED) if number != 1}
    clock.now += 10.0
    await watching.look()
    assert errors.wait(Prediction(STANDARD, 0.0)) == Wait(1_000, 1_000, 1_000)
    records.asked.clear()
    clock.now += 1.0
    await watching.look()
    assert records.asked == [], "one that still waits is left alone for a tenth of its age"
    clock.now += 10.0
    await watching.look()
    assert records.asked == ["s1.0"]
    watching.note("next", Prediction(STANDARD, 0.0), Wait(0))
    records.asked.clear()
    clock.now += 30.0
    await watching.look()
    assert records.asked == ["s1.0", "next"], "there is room again"


async def test_the_store_has_what_a_wait_needs(clock: Clock, wire: RedisClient) -> None:
    """A job that a worker claims is measured from its put to that claim; one that the store lost is forgotten."""
    queue, lease, errors = Queue(wire), Lease(wire, "m"), WaitErrors()
    watching, prediction = WaitSampler(JobReader(wire), errors), Prediction(STANDARD, 3_600.0)
    await lease.register()
    for _ in range(MIN_ERRORS):
        clock.now += 1.0
        job = replace(JOB, id=new_job_id(0))
        await queue.put(job)
        watching.note(job.id, prediction, Wait(0))
    clock.now += 1.0
    watching.note(new_job_id(0), prediction, Wait(0))
    clock.now += 3_600.0
    await watching.look()
    assert len(watching.watched) == MIN_ERRORS, "none has started"
    assert len((await lease.claim(0, MIN_ERRORS)).jobs) == MIN_ERRORS
    clock.now += 3_600.0
    await watching.look()
    wait = errors.wait(prediction)
    assert wait.low_ms is not None and wait.eta_ms < 3_600_000 and not watching.watched
