"""A job that must not queue is accepted only if a worker would begin it at once, by what the last claims left."""

from __future__ import annotations

import asyncio

import pytest
from flow import a_job, a_lease

from streaming.errors import NoCapacity
from streaming.jobs.lease import Claim
from streaming.jobs.queue import Queue
from streaming.keys import partition_key
from streaming.order import Priority
from streaming.redis.client import RedisClient

LANES = {priority.value: priority for priority in Priority}


async def is_let_in(queue: Queue, tenant: str = "t", lane: Priority = Priority.STANDARD) -> bool:
    """Whether such a job is accepted now. One that was is taken back, and nothing else changes but the lists of workers
    that have room."""
    job = a_job(queue, lane, tenant=tenant)
    try:
        await queue.put(job, must_run=True)
    except NoCapacity:
        return False
    await queue.cancel(job.id)
    return True


async def test_places_that_are_reserved_from_lane_batch_are_not_free_for_it(wire: RedisClient) -> None:
    queue, lease = Queue(wire), await a_lease(wire)
    await lease.claim(0, 2, lowest=0)
    assert not await is_let_in(queue, lane=Priority.BATCH)
    assert await is_let_in(queue, lane=Priority.STANDARD)
    await lease.claim(0, 2, lowest=0)
    assert await is_let_in(queue, lane=Priority.INTERACTIVE)
    await lease.claim(0, 2, lowest=1)
    assert await is_let_in(queue, lane=Priority.BATCH), "a place is free for it again"


@pytest.mark.parametrize(("lowest", "free"), [(1, False), (2, True), (None, True)])
async def test_jobs_that_the_claim_brings_take_the_places_of_lane_batch(
    wire: RedisClient, lowest: int | None, free: bool
) -> None:
    queue, lease = Queue(wire), await a_lease(wire)
    await queue.put(a_job(queue, Priority.BATCH))
    assert len((await lease.claim(0, 3, lowest=lowest)).jobs) == 1
    assert await is_let_in(queue, lane=Priority.BATCH) is free


async def test_kept_places_are_free_for_others_alone(wire: RedisClient) -> None:
    queue, lease = Queue(wire), await a_lease(wire)
    kept = {"shared": 0, "crowding": ("flood",)}
    await lease.claim(0, 2, **kept)  # type: ignore[arg-type]
    assert not await is_let_in(queue, "flood")
    assert await is_let_in(queue, "light")
    await lease.claim(0, 2, shared=1, crowding=("flood",))
    assert await is_let_in(queue, "flood"), "one place is for any tenant"


async def test_jobs_that_a_kept_place_is_kept_from_do_not_hold_up_others(wire: RedisClient) -> None:
    """The flood waits, and a job of another tenant begins at once: in the lane of the flood or in a higher one."""
    queue, lease = Queue(wire), await a_lease(wire)
    await queue.put(a_job(queue, tenant="flood"))

    async def claim() -> None:
        assert (await lease.claim(0, 2, shared=0, crowding=("flood",))).jobs == []

    for lane, free in ((Priority.BATCH, False), (Priority.STANDARD, True), (Priority.INTERACTIVE, True)):
        await claim()
        assert await is_let_in(queue, "light", lane) is free
        await claim()
        assert not await is_let_in(queue, "flood", lane)
    await claim()
    light = a_job(queue, tenant="light")
    await queue.put(light, must_run=True)
    (claimed,) = (await lease.claim(0, 2, shared=0, crowding=("flood",))).jobs
    assert isinstance(claimed, Claim) and claimed.job.id == light.id


async def test_while_others_wait_a_place_for_anyone_is_theirs(wire: RedisClient) -> None:
    queue, lease, other = Queue(wire), await a_lease(wire), await a_lease(wire)
    await lease.claim(0, 1)
    await other.claim(0, 1)
    await queue.put(a_job(queue, tenant="first"))
    assert not await is_let_in(queue, "second")


async def test_a_chat_is_let_in_where_batch_work_gives_way_unless_its_tenant_crowds_the_worker(
    wire: RedisClient,
) -> None:
    queue, lease = Queue(wire), await a_lease(wire)
    await lease.claim(0, 2, free=0, lowest=0, shared=0, crowding=("flood",))
    assert not await is_let_in(queue, "flood", Priority.INTERACTIVE)
    assert not await is_let_in(queue, "light", Priority.STANDARD)
    assert await is_let_in(queue, "light", Priority.INTERACTIVE)


@pytest.mark.parametrize("lane", LANES)
async def test_the_worker_that_would_begin_the_job_is_woken(wire: RedisClient, lane: str) -> None:
    """Not the one that said last that it has room, if that is not for this job."""
    queue, taker, other = Queue(wire), await a_lease(wire), await a_lease(wire)
    controls = taker.controls()
    await anext(controls)  # it listens
    waiting = asyncio.create_task(anext(controls))
    await taker.claim(0, 1)
    since = await wire.now_ms()
    while await wire.now_ms() == since:
        await asyncio.sleep(0.001)
    await other.claim(0, 1, lowest=0, shared=0, crowding=("t",))
    await queue.put(a_job(queue, LANES[lane]), must_run=True)
    await asyncio.wait_for(waiting, 30)
    idle = await wire.redis.zrange(partition_key(0, "idle", "m"), 0, -1)
    assert idle == [other.id.encode()]
    await controls.aclose()  # type: ignore[attr-defined]
