"""Drains: what ends in time, what is handed back, and what a lease that was taken leaves."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from flow import deltas_of
from sim_worker import FAST, Start, a_job, ended, expected, has_deltas, lose_lease, put_job, text_of, until

from streaming.errors import Fenced
from streaming.ids import new_job_id
from streaming.jobs.job import JobState
from streaming.jobs.queue import Queue
from streaming.jobs.reader import JobReader
from streaming.keys import partition_key
from streaming.redis.client import RedisClient
from streaming.redis.settings import RedisSettings
from workers.engines.sim.engine import SimEngine
from workers.engines.sim.settings import SimSettings
from workers.record import Recorder
from workers.settings import WorkerSettings
from workers.worker import Worker

pytestmark = pytest.mark.slow


async def test_a_drained_worker_finishes_or_hands_over(
    wire: RedisClient, start: Start, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short jobs finish within the grace time; a long one goes on elsewhere from its logged tokens, exactly."""
    queue, put_back = Queue(wire), list[str]()
    monkeypatch.setattr(recorder, "released", put_back.append)
    short, long = a_job(queue, "short", 20), a_job(queue, "long", 1500)
    await queue.put(short)
    await queue.put(long)
    first = await start(SimSettings(step_ms=2, prefill_ms=1), WorkerSettings(drain_s=1))

    async def long_runs() -> bool:
        return (await JobReader(wire).record(long.id)).state is JobState.RUNNING

    await until(long_runs)  # the short one was claimed with it
    first.stop.set()
    await asyncio.wait_for(first.task, 20)
    assert (await ended(wire, short.id)).state is JobState.COMPLETED
    handed = await JobReader(wire).record(long.id)
    assert handed.state is JobState.QUEUED and handed.attempt == 1
    assert put_back == [long.id]
    await start()
    record = await ended(wire, long.id)
    assert text_of(record) == expected("long", 1500)
    assert len(record.runs) == 2


async def test_the_last_write_of_a_drain_keeps_what_is_handed_back(wire: RedisClient, start: Start) -> None:
    """Until a job is put back, the log has all that a reader, or another worker after a loss, has to read."""
    queue, reader = Queue(wire), JobReader(wire)
    job = await put_job(queue, "handed", 4000)
    leaving = await start(FAST, WorkerSettings(drain_s=0.2))
    lease, gate = leaving.worker.lease, asyncio.Event()
    await until(lambda: has_deltas(wire, job.id, 200))
    write, release, seqs = lease.calls, lease.release, list[int]()

    async def looked_at(*args: Any, **options: Any) -> None:
        seqs.extend([row.seq for row in await deltas_of(reader, await reader.record(job.id))])
        await release(*args, **options)

    async def held_up(calls: object) -> None:
        await gate.wait()
        await write(calls)  # type: ignore[arg-type]

    lease.calls = held_up  # type: ignore[method-assign]
    lease.release = looked_at  # type: ignore[method-assign]
    lease.send_nowait = lambda *_: False  # type: ignore[method-assign]  # so that all goes that way
    leaving.stop.set()
    await until(lambda: leaving.worker.running == 0)
    gate.set()
    await asyncio.wait_for(leaving.task, 20)
    record = await reader.record(job.id)
    assert record.state is JobState.QUEUED and seqs == list(range(1, len(seqs) + 1)) and len(seqs) > 200
    assert [row.seq for row in await deltas_of(reader, record)] == seqs


@pytest.mark.parametrize("draining", [False, True])
async def test_a_lease_lost_in_one_partition_abandons_no_job_of_another(
    redis_url: str, recorder: Recorder, draining: bool
) -> None:
    """Fenced in one of two partitions, before or in its drain: the other's jobs finish, and none counts as lost."""
    wire = RedisClient.open(RedisSettings(url=redis_url, lease_ms=1_000, partitions=2))
    queue, reasons, stop, workers = Queue(wire), list[str](), asyncio.Event(), list[Worker]()
    engine = SimEngine("m", SimSettings(step_ms=5, prefill_ms=1, slots=8))
    card = await engine.start(lambda step: [worker.on_step(step) for worker in workers], lambda _: None)
    worker = Worker(wire, engine, card, WorkerSettings(drain_s=20), recorder, reasons.append)
    workers.append(worker)
    task = asyncio.create_task(worker.run(stop))
    jobs = [await put_job(queue, "x", 300, id=new_job_id(partition)) for partition in (0, 1)]
    await until(lambda: engine.stats().running == 2)
    if draining:
        stop.set()
    await lose_lease(wire, worker)
    with pytest.raises(Fenced, match=r"\[0\]"):
        await asyncio.wait_for(task, 30)
    taken, kept = [await JobReader(wire).record(job.id) for job in jobs]
    assert (taken.state, kept.state) == (JobState.QUEUED, JobState.COMPLETED) and text_of(kept) == expected("x", 300)
    assert await wire.redis.hget(partition_key(1, "job", jobs[1].id), "losses") is None
    assert reasons == ["its lease in partition 0 was taken"]
    assert await wire.redis.zscore(partition_key(1, "leases"), worker.lease.id) is None
    await engine.stop()
    await wire.close()


async def test_a_lease_lost_everywhere_ends_the_worker_at_once(wire: RedisClient, start: Start) -> None:
    """There is nothing left to drain, however long the grace time is."""
    running = await start(SimSettings(step_ms=20, prefill_ms=1), WorkerSettings(drain_s=600))
    await put_job(Queue(wire), max_tokens=4000)
    await until(lambda: running.engine.stats().running == 1)
    await lose_lease(wire, running.worker)
    with pytest.raises(Fenced):
        await asyncio.wait_for(running.task, 20)
