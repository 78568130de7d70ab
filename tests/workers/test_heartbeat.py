"""Heartbeats: jobs that only the store, or only the worker, counts as held."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from sim_worker import Start, ended, expected, put_job, text_of, until

from streaming.errors import Fenced
from streaming.jobs.history import History, LoggedRun
from streaming.jobs.job import JobState
from streaming.jobs.lease import HeldJob, Lease
from streaming.jobs.queue import Queue
from streaming.jobs.reader import JobReader
from streaming.keys import partition_key
from streaming.redis.client import RedisClient
from workers.engines.sim.settings import SimSettings
from workers.heartbeat import BeatComparison

pytestmark = pytest.mark.slow


async def test_a_claim_whose_answer_was_lost_is_handed_back(wire: RedisClient, start: Start) -> None:
    """A job the server counts as this worker's, of which it knows nothing, does not wait for ever."""
    running = await start()
    await until(lambda: _leased(wire, running.worker.lease.id))
    job = await put_job(Queue(wire), model="other")
    # The claim as it would be made, its answer thrown away.
    await wire.call("claim", 0, running.worker.lease.id, "other", 1, 1000, "", "", 100)

    async def back() -> bool:
        record = await JobReader(wire).record(job.id)
        return record.state is JobState.QUEUED and record.attempt == 1

    await until(back)


async def _leased(wire: RedisClient, lease: str) -> bool:
    return await wire.redis.zscore(partition_key(0, "leases"), lease) is not None


async def test_a_claim_that_is_slow_to_begin_is_not_taken_for_a_lost_one(wire: RedisClient, start: Start) -> None:
    """Reading what the job's last worker logged outlasts several heartbeats: the job is still begun once, by one."""
    queue, lost = Queue(wire), Lease(wire, "m")
    job = await put_job(queue, "slow", 30)
    await lost.register()
    await lost.claim(0, 1)
    await lost.release(job.id, 1)
    running = await start()
    worker, beats = running.worker, 0
    reader = worker._claimer._reader
    read, beat = reader.history, worker.lease.beat
    several = asyncio.Event()

    async def counted(partition: int) -> dict[str, HeldJob]:
        nonlocal beats
        held = await beat(partition)
        beats += job.id in held
        if beats == 4:
            several.set()
        return held

    async def slow(job_id: str, runs: Sequence[LoggedRun]) -> History:
        await several.wait()
        return await read(job_id, runs)

    worker.lease.beat = counted  # type: ignore[method-assign]
    reader.history = slow  # type: ignore[method-assign]
    record = await ended(wire, job.id)
    assert record.state is JobState.COMPLETED and record.attempt == 2 and len(record.runs) == 2
    assert text_of(record) == expected("slow", 30)


async def test_a_heartbeat_that_meets_the_lease_given_up_is_no_loss(wire: RedisClient, start: Start) -> None:
    """A drained worker has left; a beat that comes after it is refused, and the drain still ends well."""
    running = await start()
    lease, refused = running.worker.lease, asyncio.Event()
    await until(lambda: _leased(wire, lease.id))
    leave, beat = lease.leave, lease.beat

    async def left() -> int:
        held = await leave()
        await asyncio.wait_for(refused.wait(), 20)
        return held

    async def beaten(partition: int) -> dict[str, HeldJob]:
        try:
            return await beat(partition)
        except Fenced:
            refused.set()
            raise

    lease.leave, lease.beat = left, beaten  # type: ignore[method-assign]
    running.stop.set()
    await asyncio.wait_for(running.task, 20)
    assert refused.is_set()


async def test_a_job_that_one_heartbeat_leaves_out_goes_on(wire: RedisClient, start: Start) -> None:
    """Only where two heartbeats in a row do not name a job has the server taken it away."""
    running = await start(SimSettings(step_ms=20, prefill_ms=1))
    job = await put_job(Queue(wire), "seen", 100)
    beat, left_out = running.worker.lease.beat, 0

    async def beaten(partition: int) -> dict[str, HeldJob]:
        nonlocal left_out
        held = await beat(partition)
        if not left_out and job.id in held and job.id in running.worker._attempts:
            left_out += 1
            del held[job.id]
        return held

    running.worker.lease.beat = beaten  # type: ignore[method-assign]
    record = await ended(wire, job.id)
    assert left_out == 1 and record.state is JobState.COMPLETED
    assert record.attempt == 1 and text_of(record) == expected("seen", 100)


def test_a_job_whose_end_is_being_written_is_not_dropped() -> None:
    """The store has ended it already, and the answer to that is on its way: it is no job that was taken away."""
    ending, running = (
        SimpleNamespace(job=SimpleNamespace(id=name), number=1, over=name == "ending") for name in ("ending", "running")
    )
    held: Any = SimpleNamespace(of=lambda partition: [ending, running])
    comparison = BeatComparison(held, 0)
    assert comparison.taken({}) == set(), "it may have been claimed since"
    assert comparison.taken({}) == {("running", 1)}


def test_a_job_of_which_the_worker_knows_nothing_is_a_stray_in_the_second_beat() -> None:
    """And not while a claim is in flight, which may bring it: it is counted from its reply on."""
    held: Any = SimpleNamespace(holds=lambda job_id, number: (job_id, number) == ("held", 1))
    comparison, counted = BeatComparison(held, 0), {"held": HeldJob(1, False), "stray": HeldJob(2, False)}
    found = [comparison.strays(counted, may_claim=claims) for claims in (False, False, True, False, False)]
    assert found == [set(), {("stray", 2)}, set(), set(), {("stray", 2)}]
