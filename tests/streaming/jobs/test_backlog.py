"""What is told of lanes and deadlines, from a real server."""

from __future__ import annotations

import asyncio

import pytest
from flow import a_lease, lapse, put_job, until

from streaming.jobs import places as backlog
from streaming.jobs.lease import Claim
from streaming.jobs.places import Backlog, LaneDepth, backlog_of
from streaming.jobs.queue import Queue
from streaming.keys import partition_key
from streaming.order import Priority
from streaming.redis.client import RedisClient


async def put(wire: RedisClient, priority: Priority, **limits: int) -> str:
    """A waiting job of model m."""
    return (await put_job(Queue(wire), priority, **limits)).id


async def lane_of(wire: RedisClient, priority: Priority) -> LaneDepth:
    (lane,) = [lane for lane in await Backlog(wire).lanes(["m"]) if lane.priority is priority]
    return lane


async def test_suspects_wait_as_others_do(wire: RedisClient) -> None:
    """Else a pool would sleep while only they are left, and nobody would ever run them."""
    await put(wire, Priority.STANDARD)
    for _ in range(wire.settings.max_attempts - 1):
        lost = await a_lease(wire)
        assert len((await lost.claim(0, 1)).jobs) == 1
        await lapse(wire, lost)
    assert await wire.redis.exists(partition_key(0, "suspects", "m", "standard"))
    assert (await lane_of(wire, Priority.STANDARD)).waiting == 1


async def test_jobs_ever_put_are_counted(wire: RedisClient) -> None:
    """By lane; a claim changes what waits, not what came; nor does a job that is handed back come again."""
    for _ in range(3):
        await put(wire, Priority.STANDARD)
    await put(wire, Priority.BATCH)
    lease = await a_lease(wire)
    claimed = await lease.claim(0, 2)
    lane = await lane_of(wire, Priority.STANDARD)
    assert (lane.added, lane.waiting, lane.running) == (3, 1, 2)
    job = claimed.jobs[0]
    assert isinstance(job, Claim)
    await lease.release(job.job.id, job.number)
    lane = await lane_of(wire, Priority.STANDARD)
    assert (lane.added, lane.waiting, lane.running) == (3, 2, 1)
    assert (await lane_of(wire, Priority.BATCH)).added == 1
    assert (await lane_of(wire, Priority.INTERACTIVE)).added == 0


async def test_the_nearest_deadlines_are_told(wire: RedisClient) -> None:
    """With their lane and age, nearest first; claimed jobs and jobs without one are left out."""
    assert (await wire.ask(backlog_of([], wire.partitions))).due == []
    await put(wire, Priority.INTERACTIVE, deadline_ms=30_000)
    lease = await a_lease(wire)
    await lease.claim(0, 1)
    await put(wire, Priority.STANDARD)
    await put(wire, Priority.BATCH, deadline_ms=60_000)
    await put(wire, Priority.STANDARD, max_queue_ms=20_000, deadline_ms=90_000)
    due = (await wire.ask(backlog_of([], wire.partitions))).due
    assert [(each.model, each.priority) for each in due] == [("m", Priority.STANDARD), ("m", Priority.BATCH)]
    assert 0 < due[0].in_ms <= 20_000 < due[1].in_ms <= 60_000
    assert all(0 <= each.age_ms < 20_000 for each in due)


async def test_a_look_is_one_call_for_each_partition(wide: RedisClient) -> None:
    """However many models there are, and whatever waits; the partitions' counts are one lane's."""
    for _ in range(12):
        await put(wide, Priority.STANDARD, deadline_ms=60_000)
    lease = await a_lease(wide)
    running = sum([len((await lease.claim(partition, 1)).jobs) for partition in wide.partitions])
    models = ["m", *(f"other-{number}" for number in range(9))]
    await wide.ask(backlog_of(models, wide.partitions))
    before = await wide.redis.info("commandstats")
    lanes = await Backlog(wide).lanes(models)
    seen = await wide.ask(backlog_of(models, wide.partitions))
    after = await wide.redis.info("commandstats")
    (lane,) = [lane for lane in lanes if lane.model == "m" and lane.priority is Priority.STANDARD]
    assert (lane.waiting, lane.running, lane.added) == (12 - running, running, 12) and lane.oldest_ms >= 0
    assert [(each.model, each.priority) for each in seen.lanes] == [(m, p) for m in models for p in Priority]
    assert all((each.waiting, each.running, each.added) == (0, 0, 0) for each in seen.lanes if each.model != "m")
    assert len(seen.due) == 12 - running
    scripts, clocks = (after[name]["calls"] - before[name]["calls"] for name in ("cmdstat_fcall", "cmdstat_time"))
    assert (scripts, clocks) == (2 * len(wide.partitions), 2 * len(wide.partitions))  # nobody asked for the time beside


async def test_the_oldest_waiting_job_is_none_that_runs(wire: RedisClient) -> None:
    """What a worker was given stays in the lane until its end, before all that wait."""
    lease = await a_lease(wire)
    await put(wire, Priority.STANDARD)
    await lease.claim(0, 1)
    given_ms = await wire.now_ms()
    await until(lambda: _later(wire, given_ms))
    await put(wire, Priority.STANDARD)
    _, lanes, _ = await wire.call("lanes", 0, 0, "m")
    ((waiting, running, oldest_ms, _),) = [lane for lane in lanes if lane[0] or lane[1]]
    assert (waiting, running) == (1, 1) and oldest_ms > given_ms


async def _later(wire: RedisClient, than_ms: int) -> bool:
    return await wire.now_ms() > than_ms


async def test_a_lane_whose_jobs_have_all_gone_has_none(wire: RedisClient) -> None:
    """Its stream stays, and is empty."""
    assert await Queue(wire).cancel(await put(wire, Priority.STANDARD))
    lane = await lane_of(wire, Priority.STANDARD)
    assert await wire.redis.exists(partition_key(0, "lane", "m", "standard"))
    assert (lane.waiting, lane.running, lane.oldest_ms, lane.added) == (0, 0, 0, 1)


async def test_the_next_job_of_each_tenant_is_told_with_its_wait(wide: RedisClient) -> None:
    """However many wait behind it; of all partitions, the longest wait. A claimed job waits no more."""
    queue = Queue(wide)
    for tenant, number in (("a", 12), ("b", 1)):
        for _ in range(number):
            await put_job(queue, Priority.BATCH, id=queue.new_id(tenant), tenant=tenant)
        await asyncio.sleep(0.03)
    lanes = Backlog(wide)
    found = await lanes.ages(["m", "other"])
    waits = found["m", Priority.BATCH]
    assert set(waits) == {"a", "b"} and waits["a"] >= waits["b"] + 30 >= 60
    assert found["m", Priority.INTERACTIVE] == found["other", Priority.BATCH] == {}
    lease = await a_lease(wide)
    claimed = 0
    while claimed < 13:
        for partition in range(4):
            claimed += len((await lease.claim(partition, 16)).jobs)
    assert (await lanes.ages(["m"]))["m", Priority.BATCH] == {}


async def test_of_many_tenants_the_least_served_are_told(wire: RedisClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many wait, the server is blocked for few; one that starves is among them."""
    monkeypatch.setattr(backlog, "MAX_TENANTS", 2)
    queue = Queue(wire)
    for number in range(5):
        await put_job(queue, Priority.BATCH, tenant=f"t{number}")
        await wire.redis.zadd(partition_key(0, "tenants", "m", "batch"), {f"t{number}": 100 - number})
    assert set((await Backlog(wire).ages(["m"]))["m", Priority.BATCH]) == {"t3", "t4"}
