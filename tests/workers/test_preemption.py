"""Preemption of running batch jobs: they give up their places, wait with their tokens, and end as if undisturbed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any
from unittest.mock import AsyncMock

import pytest
from msgspec.structs import replace
from sim_worker import LONG, DeafEngine, Running, Workshop, a_job, expected, put_job, text_of, until

from penstock.engine import Sampling, Task, TaskKind
from streaming.errors import NoCapacity, Unavailable
from streaming.jobs.job import Inputs, Job, JobState, Text
from streaming.jobs.lease import Claim, Lease
from streaming.jobs.queue import Queue
from streaming.jobs.reader import JobReader
from streaming.keys import partition_key
from streaming.order import Priority
from streaming.redis.client import RedisClient
from workers.settings import WorkerSettings

pytestmark = pytest.mark.slow


async def running_batch(shop: Workshop, jobs: int, tokens: int = 600, drain_s: float = 20) -> tuple[Running, list[Job]]:
    """A worker that runs so many batch jobs, each with a few tokens."""
    held = [await shop.put(f"line {number}", tokens, priority=Priority.BATCH) for number in range(jobs)]
    running = await shop.start(LONG, WorkerSettings(drain_s=drain_s))
    for job in held:
        await until(lambda: shop.has_deltas(job, 3))  # noqa: B023
    return running, held


async def states(wire: RedisClient, jobs: Sequence[Job]) -> list[JobState]:
    return [(await JobReader(wire).record(job.id)).state for job in jobs]


async def test_while_the_store_is_away_the_job_stays_this_workers(
    shop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its log keeps the tokens, heartbeats do not take it for a claim without an answer, and it is put back once."""
    running, (job,) = await running_batch(shop, 1, 300)
    lease, calls, back = running.worker.lease, 0, asyncio.Event()
    release = lease.release

    async def away(*args: Any, **options: Any) -> None:
        nonlocal calls
        calls += 1
        if "outcome" in options and not back.is_set():  # the heartbeat's would go through
            raise Unavailable("away")
        await release(*args, **options)

    monkeypatch.setattr(lease, "release", away)
    before = len((await shop.reader.history(job.id, (await shop.reader.record(job.id)).runs)).rows)
    running.worker._preemption.free(1)
    monkeypatch.setattr(lease, "beat", beats := AsyncMock(wraps=lease.beat))
    await until(lambda: beats.await_count > 4 and calls >= 3)
    record = await shop.reader.record(job.id)
    assert record.state is JobState.RUNNING and record.attempt == 1
    assert len((await shop.reader.history(job.id, record.runs)).rows) >= before
    back.set()
    record = await shop.ended(job)
    assert [each.outcome for each in record.attempts] == ["preempted", "completed"]
    assert text_of(record) == expected("line 0", 300)


async def test_a_cancel_meets_a_preemption(shop: Workshop) -> None:
    """One end, with the tokens of the run, whether the cancel comes just before or just behind."""
    running, jobs = await running_batch(shop, 2)
    await asyncio.gather(*(shop.queue.cancel(job.id) for job in jobs[:1]))
    running.worker._preemption.free(2)
    await shop.queue.cancel(jobs[1].id)
    for job in jobs:
        record = await shop.ended(job)
        assert record.state is JobState.CANCELLED and record.terminal is not None and record.terminal.rows


async def test_a_drain_waits_for_what_is_being_put_back(shop: Workshop) -> None:
    """The youngest gives way first."""
    running, jobs = await running_batch(shop, 3)
    youngest = max(running.worker._attempts.values(), key=lambda each: each.stamps.released).job.id
    running.worker._preemption.free(1)
    assert youngest not in running.worker._attempts and running.worker.running == 2
    running.worker._preemption.free(2)
    running.stop.set()
    await asyncio.wait_for(running.task, 30)
    await shop.start(LONG, WorkerSettings(drain_s=20))
    for number, job in enumerate(jobs):
        record = await shop.completed(job, f"line {number}", 600)
        assert "lost" not in [each.outcome for each in record.attempts]


async def test_a_drain_hands_its_jobs_back_once_the_store_answers(
    shop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interruption does not leave them with a worker that has nothing to do but to end."""
    running, (job,) = await running_batch(shop, 1, drain_s=0)
    release, failures = running.worker.lease.release, iter([Unavailable("away")])

    async def away_at_first(*args: Any, **options: Any) -> None:
        for failure in failures:
            raise failure
        await release(*args, **options)

    monkeypatch.setattr(running.worker.lease, "release", away_at_first)
    running.stop.set()
    await asyncio.wait_for(running.task, 30)
    await shop.start(LONG, WorkerSettings(drain_s=20))
    record = await shop.ended(job)
    assert [each.outcome for each in record.attempts] == ["handed_back", "completed"]
    assert text_of(record) == expected("line 0", 600)


async def test_what_cannot_be_continued_exactly_keeps_its_place(shop: Workshop) -> None:
    """JSON of an engine that cannot restore a grammar's state."""
    sampling = Sampling(max_tokens=400, json_schema={})
    job = await shop.put("json", priority=Priority.BATCH, sampling=sampling)
    running = await shop.start(LONG, engine=DeafEngine)
    await until(lambda: running.engine.stats().running == 1)
    assert running.worker._preemption.freeable_slots() == 0
    running.worker._preemption.free(1)
    assert job.id in running.worker._attempts


# --- asked for by a claim --------------------------------------------------------------------------------------------

FULL = WorkerSettings(drain_s=20, reserved_slots=0, poll_ms=20_000)
"""Batch jobs may fill every slot, and nothing but a wake-up makes the worker look for others in time."""


async def full_of_batch(
    shop: Workshop, settings: WorkerSettings = FULL, tokens: int = 2_000
) -> tuple[Running, list[Job]]:
    """A worker with more batch jobs than slots."""
    jobs = [await shop.put(f"line {number}", tokens, priority=Priority.BATCH) for number in range(12)]
    running = await shop.start(LONG, settings)
    await until(lambda: running.engine.stats().running == LONG.slots and running.worker._starter.is_full)
    return running, jobs


async def test_a_chat_takes_the_place_of_a_batch_job(shop: Workshop) -> None:
    """Of the youngest, which had waited in the engine, and of the next one: every slot is taken. No batch job has ended
    when the chat has, and all end with the text of an undisturbed run."""
    running, jobs = await full_of_batch(shop, tokens=800)
    chat = await shop.put("chat", 5, priority=Priority.INTERACTIVE)
    record = await shop.completed(chat, "chat", 5)
    assert not any(state.final for state in await states(shop.wire, jobs))
    assert running.worker.running <= LONG.slots + FULL.prefetch
    preempted = 0
    for number, job in enumerate(jobs):
        record = await shop.completed(job, f"line {number}", 800)
        preempted += sum(each.outcome == "preempted" for each in record.attempts)
        assert await shop.wire.redis.hget(partition_key(0, "job", job.id), "losses") is None
    assert 1 <= preempted <= 2


@pytest.mark.parametrize("kind", ["tokenize", "embed"])
async def test_only_a_task_that_computes_takes_a_place(shop: Workshop, kind: TaskKind) -> None:
    """Token ids come at once beside a full engine, and nobody gives way; vectors need a place like a chat."""
    running, jobs = await full_of_batch(shop)
    prompt = Text(("Name a river.",)) if kind == "tokenize" else Inputs((("Name a river.",),))
    job = await shop.put(max_tokens=1, priority=Priority.INTERACTIVE, prompt=prompt, task=Task(kind=kind))
    record = await shop.ended(job)
    assert record.state is JobState.COMPLETED and record.terminal is not None
    assert record.terminal.usage.completion == 0 and record.terminal.rows[0].text
    assert not any(state.final for state in await states(shop.wire, jobs))
    found = [await shop.reader.record(each.id) for each in jobs]
    preempted = sum(each.outcome == "preempted" for record in found for each in record.attempts)
    assert (preempted > 0) == (kind == "embed")
    assert not running.task.done()


async def test_a_job_of_lane_standard_preempts_nothing(shop: Workshop) -> None:
    """It waits for a batch job to end, and a full worker claims none."""
    running, jobs = await full_of_batch(shop, WorkerSettings(drain_s=0.1, reserved_slots=0, poll_ms=10))
    job = await shop.put("standard", 5)
    claims = AsyncMock(wraps=running.worker.lease.claim)
    running.worker.lease.claim = claims  # type: ignore[method-assign]
    await until(lambda: claims.await_count >= 5)
    record = await shop.reader.record(job.id)
    assert record.state is JobState.QUEUED and not running.worker._preemption.tasks
    for job in jobs:
        assert not any(each.outcome == "preempted" for each in (await shop.reader.record(job.id)).attempts)


async def test_who_must_not_wait_is_let_in_where_a_batch_job_yields(shop: Workshop) -> None:
    """A chat that must begin at once is accepted; a job of lane standard is refused."""
    await full_of_batch(shop)
    with pytest.raises(NoCapacity):
        await shop.queue.put(a_job(shop.queue, "standard", 5), must_run=True)
    chat = a_job(shop.queue, "chat", 5, priority=Priority.INTERACTIVE)
    await shop.queue.put(chat, must_run=True)
    assert (await shop.ended(chat)).state is JobState.COMPLETED


async def test_a_claim_beyond_the_free_places_brings_the_highest_lane_alone(wire: RedisClient) -> None:
    queue, lease = Queue(wire), Lease(wire, "m")
    await lease.register()
    for priority in reversed(Priority):
        for number in range(3):
            await put_job(queue, f"{priority} {number}", priority=priority)
    found = [each.job.priority for each in (await lease.claim(0, 5, free=1)).jobs if isinstance(each, Claim)]
    assert found == [Priority.INTERACTIVE] * 3
    found = [each.job.priority for each in (await lease.claim(0, 5, free=2)).jobs if isinstance(each, Claim)]
    assert found == [Priority.STANDARD] * 2
    yielding, idle = partition_key(0, "yielding", "m"), partition_key(0, "idle", "m")
    assert (await lease.claim(0, 2, free=0)).jobs == []
    assert await wire.redis.zscore(yielding, lease.id) is not None and await wire.redis.zscore(idle, lease.id) is None
    assert 0 < await wire.redis.ttl(yielding) <= 10
    await put_job(queue, "batch", priority=Priority.BATCH)
    assert await wire.redis.exists(yielding), "a batch job wakes no worker that is full"
    await put_job(queue, "chat", priority=Priority.INTERACTIVE)
    assert not await wire.redis.exists(yielding)


@pytest.mark.parametrize("lane", [Priority.INTERACTIVE, Priority.STANDARD])
async def test_a_worker_whose_slots_are_taken_is_not_idle(shop: Workshop, lane: Priority) -> None:
    """Though it would prefetch a job: one that must begin at once is refused; another one wakes it all the same."""
    settings = WorkerSettings(drain_s=0, poll_ms=60_000)
    running = await shop.start(replace(LONG, slots=1), settings)
    await shop.put("long", 2_000)

    async def is_full() -> bool:
        marked = await shop.wire.redis.exists(partition_key(0, "prefetching", "m"))
        return running.engine.stats().running == 1 and bool(marked)

    await until(is_full)
    with pytest.raises(NoCapacity):
        await shop.queue.put(a_job(shop.queue, "now", 5, priority=lane), must_run=True)
    await shop.put("later", 5, priority=lane)
    await until(lambda: running.worker.running == 2)
