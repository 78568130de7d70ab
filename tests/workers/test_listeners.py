"""Addresses of readers that are gone: their rows are no longer logged, and who comes back misses nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from flow import numbers_read, until
from sim_worker import Start, a_job

from streaming.errors import Unavailable
from streaming.jobs.job import JobState
from streaming.jobs.lease import SILENT
from streaming.jobs.queue import Queue
from streaming.jobs.reader import JobReader
from streaming.jobs.relay import Relay
from streaming.jobs.reorder_buffer import ReorderBuffer
from streaming.keys import channel, partition_key
from streaming.redis.client import RedisClient
from workers import worker as module
from workers.engines.sim.settings import SimSettings
from workers.worker import Worker

pytestmark = pytest.mark.slow

GONE = channel("api", "gone")
TOKENS = 600


SLOW = SimSettings(step_ms=5, prefill_ms=1)
"""Three seconds for an answer."""


async def streamed(wire: RedisClient, relay: Relay) -> ReorderBuffer:
    """The buffer of a job that is being streamed to this relay."""
    queue = Queue(wire)
    job = a_job(queue, "hi", TOKENS, stream=True, reply_to=relay.address)
    buffer = relay.open(job.id)
    await queue.put(job)
    buffer.accepted = True
    await until(lambda: buffer.seq > 0)
    return buffer


@pytest.fixture
async def relay(wire: RedisClient) -> AsyncIterator[Relay]:
    relay = Relay(wire)
    await relay.start()
    await relay.connected.wait()
    yield relay
    await relay.stop()


async def fields_of_the_newest_step(wire: RedisClient, worker: Worker) -> set[str]:
    redis: Any = wire.redis
    ((_, fields),) = await redis.xrevrange(partition_key(0, "log", worker.lease.id), count=1)
    return {name.decode() for name in fields}


async def test_an_address_nobody_listens_at_is_dropped(
    wire: RedisClient, start: Start, relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows for a process that is gone are logged no more, those for the living one go on, and each comes once."""
    monkeypatch.setattr(module, "LISTENER_CHECK_INTERVAL_S", 0.1)
    worker = (await start(SLOW)).worker
    buffer = await streamed(wire, relay)
    reading = asyncio.create_task(numbers_read(buffer))
    await Queue(wire).follow(buffer.job_id, GONE)

    async def logged(*addresses: str) -> bool:
        return await fields_of_the_newest_step(wire, worker) == set(addresses)

    await until(lambda: logged(relay.address, GONE))
    await until(lambda: logged(relay.address))
    record = await JobReader(wire).record(buffer.job_id)
    assert record.addresses == (relay.address,) and record.state is JobState.RUNNING
    assert await reading == list(range(1, TOKENS + 1))


async def test_a_reader_that_was_dropped_by_mistake_follows_again(
    wire: RedisClient, start: Start, relay: Relay
) -> None:
    """It misses nothing, and hears the rest as it comes. A drop that the store did not take is undone: the record still
    names the address, so its rows go on."""
    worker = (await start(SLOW)).worker
    buffer = await streamed(wire, relay)
    reading = asyncio.create_task(numbers_read(buffer))
    unfollow, refused = worker.lease.unfollow, 0

    async def once_refused(partition: int, address: str, job_ids: Sequence[str]) -> None:
        nonlocal refused
        refused += 1
        if refused == 1:
            raise Unavailable("the store is away")
        await unfollow(partition, address, job_ids)

    async def logs_for(address: str) -> bool:
        return await fields_of_the_newest_step(wire, worker) == {address}

    worker.lease.unfollow = once_refused  # type: ignore[method-assign]
    with pytest.raises(Unavailable):
        await worker._unfollow(relay.address)
    assert worker._attempts[buffer.job_id].addresses == (relay.address,)
    assert (await JobReader(wire).record(buffer.job_id)).addresses == (relay.address,)
    await worker._unfollow(relay.address)
    assert worker._attempts[buffer.job_id].addresses == (SILENT,)
    assert (await JobReader(wire).record(buffer.job_id)).addresses == ()
    await until(lambda: logs_for(SILENT))
    await until(lambda: logs_for(relay.address))
    assert (await JobReader(wire).record(buffer.job_id)).state is JobState.RUNNING
    assert await reading == list(range(1, TOKENS + 1))
