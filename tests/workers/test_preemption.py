"""Preemption of running batch jobs: they give up their places, wait with their tokens, and end as if undisturbed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from sim_worker import LONG, DeafEngine, Running, Start, a_job, ended, expected, recorder, start, text_of, until

from penstock.engine import Sampling
from streaming.errors import Unavailable
from streaming.jobs.job import Job, JobState
from streaming.jobs.queue import Queue
from streaming.jobs.reader import JobReader
from streaming.keys import partition_key
from streaming.priority import Priority
from streaming.redis.client import RedisClient
from workers.settings import WorkerSettings

pytestmark = pytest.mark.slow

__all__ = ["recorder", "start"]  # fixtures


async def running_batch(wire: RedisClient, start: Start, jobs: int, tokens: int = 600) -> tuple[Running, list[Job]]:
    """A worker that runs so many batch jobs, each with a few tokens."""
    queue, reader = Queue(wire), JobReader(wire)
    held = [a_job(queue, f"line {number}", tokens, priority=Priority.BATCH) for number in range(jobs)]
    for job in held:
        await queue.put(job)
    running = await start(LONG, WorkerSettings(drain_s=20))

    async def all_have_tokens() -> bool:
        records = [await reader.record(job.id) for job in held]
        found = [(await reader.history(record.job.id, record.runs)).rows for record in records]
        return all(len(rows) >= 3 for rows in found)

    await until(all_have_tokens)
    return running, held


async def states(wire: RedisClient, jobs: Sequence[Job]) -> list[JobState]:
    return [(await JobReader(wire).record(job.id)).state for job in jobs]


async def test_the_youngest_wait_and_all_end_as_if_undisturbed(wire: RedisClient, start: Start) -> None:
    """Two of four are preempted, run on at once for there is room, and lose and repeat nothing."""
    running, jobs = await running_batch(wire, start, 4)
    begun = sorted(running.worker._attempts.values(), key=lambda each: each.stamps.released)
    youngest = {attempt.job.id for attempt in begun[-2:]}
    assert running.worker._preemption.places() == 4
    running.worker._preemption.free(2)
    assert not youngest & running.worker._attempts.keys()
    for number, job in enumerate(jobs):
        record = await ended(wire, job.id)
        assert record.state is JobState.COMPLETED and text_of(record) == expected(f"line {number}", 600)
        wanted = ["preempted", "completed"] if job.id in youngest else ["completed"]
        assert [each.outcome for each in record.attempts] == wanted
        assert await wire.redis.hget(partition_key(0, "job", job.id), "losses") is None
    assert not running.worker._preemption.tasks


async def test_while_the_store_is_away_the_job_stays_this_workers(
    wire: RedisClient, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its log keeps the tokens, heartbeats do not take it for a claim without an answer, and it is put back once."""
    running, (job,) = await running_batch(wire, start, 1, 300)
    lease, calls, back = running.worker.lease, 0, asyncio.Event()
    release = lease.release

    async def away(*args: Any, **options: Any) -> None:
        nonlocal calls
        calls += 1
        if not back.is_set():
            raise Unavailable("away")
        await release(*args, **options)

    monkeypatch.setattr(lease, "release", away)
    reader = JobReader(wire)
    before = len((await reader.history(job.id, (await reader.record(job.id)).runs)).rows)
    running.worker._preemption.free(1)
    beats, beat = 0, lease.beat

    async def counted(partition: int) -> Any:
        nonlocal beats
        found = await beat(partition)
        beats += 1
        return found

    monkeypatch.setattr(lease, "beat", counted)

    async def some_beats() -> bool:
        return beats >= 4 and calls >= 3

    await until(some_beats)
    record = await reader.record(job.id)
    assert record.state is JobState.RUNNING and record.attempt == 1
    assert len((await reader.history(job.id, record.runs)).rows) >= before
    back.set()
    record = await ended(wire, job.id)
    assert [each.outcome for each in record.attempts] == ["preempted", "completed"]
    assert text_of(record) == expected("line 0", 300)


async def test_a_cancel_meets_a_preemption(wire: RedisClient, start: Start) -> None:
    """One end, with the tokens of the run, whether the cancel comes just before or just behind."""
    running, jobs = await running_batch(wire, start, 2)
    queue = Queue(wire)
    await asyncio.gather(*(queue.cancel(job.id) for job in jobs[:1]))
    running.worker._preemption.free(2)
    await queue.cancel(jobs[1].id)
    for job in jobs:
        record = await ended(wire, job.id)
        assert record.state is JobState.CANCELLED and record.terminal is not None and record.terminal.rows


async def test_a_drain_waits_for_what_is_being_put_back(wire: RedisClient, start: Start) -> None:
    running, jobs = await running_batch(wire, start, 3)
    running.worker._preemption.free(3)
    running.stop.set()
    await asyncio.wait_for(running.task, 30)
    heir = await start(LONG, WorkerSettings(drain_s=20))
    for number, job in enumerate(jobs):
        record = await ended(wire, job.id)
        assert record.state is JobState.COMPLETED and text_of(record) == expected(f"line {number}", 600)
    assert heir.worker.running == 0 or not heir.task.done()


async def test_what_cannot_be_continued_exactly_keeps_its_place(wire: RedisClient, start: Start) -> None:
    """JSON of an engine that cannot restore a grammar's state."""
    queue = Queue(wire)
    sampling = Sampling(max_tokens=400, json_schema={})
    job = a_job(queue, "json", priority=Priority.BATCH, sampling=sampling)
    await queue.put(job)
    running = await start(LONG, engine=DeafEngine)

    async def runs() -> bool:
        return running.engine.stats().running == 1

    await until(runs)
    assert running.worker._preemption.places() == 0
    running.worker._preemption.free(1)
    assert job.id in running.worker._attempts
