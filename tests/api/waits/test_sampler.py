"""Waits are measured by the jobs' own records: of a sample, whatever became of the job, and at a bounded cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import pytest
from msgspec.structs import replace
from waits_clock import Clock, clock

from api.openai.errors import Wait
from api.waits import (
    MAX_WATCHED,
    MIN_ERRORS,
    EstimateSource,
    MeasuredWait,
    Prediction,
    WaitErrors,
    WaitSampler,
    measured_wait,
)
from streaming.ids import new_job_id
from streaming.jobs.job import Job, JobState, Text
from streaming.jobs.lease import Lease
from streaming.jobs.queue import Queue
from streaming.jobs.reader import JobReader
from streaming.jobs.records import JobRecord
from streaming.order import Priority
from streaming.redis.client import RedisClient

__all__ = ["clock"]  # a fixture

STANDARD, BATCH = (EstimateSource("m", lane, "plan") for lane in (Priority.STANDARD, Priority.BATCH))
JOB = Job(id="j", model="m", tenant="t", priority=Priority.STANDARD, prompt=Text(("x",)))
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
    assert measured_wait(QUEUED, 9.0) is None and measured_wait(running, 9.0) == MeasuredWait(4.5)
    assert measured_wait(ended(JobState.COMPLETED, 60_000, 14_500), 9.0) == MeasuredWait(4.5)
    assert measured_wait(dataclasses.replace(running, started_ms=9_990), 9.0) == MeasuredWait(0.0), "a clock set back"
    for after_ms in (5_000, 20_000):
        expired = measured_wait(ended(JobState.EXPIRED, after_ms), 9.0)
        assert expired == MeasuredWait(after_ms / 1000, bound=True), "also before the time that was predicted"
    assert measured_wait(ended(JobState.CANCELLED, 20_000), 9.0) == MeasuredWait(20.0, bound=True)
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
    assert watching.watched == 0
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
    assert records.asked == ["j"] and watching.watched == 0
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


async def test_the_store_has_what_a_wait_needs(wire: RedisClient) -> None:
    """A job that a worker claims is measured from its put to that claim; one that the store lost is forgotten."""
    queue, lease, errors = Queue(wire), Lease(wire, "m"), WaitErrors()
    watching, prediction = WaitSampler(JobReader(wire), errors), Prediction(STANDARD, 3_600.0)
    await lease.register()
    for _ in range(MIN_ERRORS):
        job = replace(JOB, id=new_job_id(0))
        await queue.put(job)
        watching.watch(job.id, prediction, Wait(0), look_at=0.0)
    await watching.look()
    assert watching.watched == MIN_ERRORS, "none has started"
    assert len((await lease.claim(0, MIN_ERRORS)).jobs) == MIN_ERRORS
    watching.watch(new_job_id(0), prediction, Wait(0), look_at=0.0)
    for job_id in list(watching.due(float("inf"))):
        watching.watch(job_id, prediction, Wait(0), look_at=0.0)
    await watching.look()
    wait = errors.wait(prediction)
    assert wait.low_ms is not None and wait.eta_ms < 3_600_000 and watching.watched == 0
