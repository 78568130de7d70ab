"""The reaper's sweep for a worker whose process has ended: what it takes at once, and what it leaves alone."""

from __future__ import annotations

import pytest
from flow import a_job, a_lease, append, claim_one, delta

from streaming.errors import Fenced
from streaming.ids import new_job_id
from streaming.jobs.lease import Claim, Lease
from streaming.jobs.queue import Queue
from streaming.jobs.reaper import Reaper, Swept
from streaming.keys import partition_key
from streaming.redis.client import RedisClient
from telemetry.metrics import Metrics

LEASES, IDLE = partition_key(0, "leases"), partition_key(0, "idle", "m")


async def running(wire: RedisClient, lease: Lease) -> Claim:
    """A job that the worker runs."""
    await Queue(wire).put(a_job(Queue(wire)))
    return await claim_one(lease)


async def test_the_jobs_of_a_process_that_ended_wait_for_no_lapse(wire: RedisClient) -> None:
    """Another worker has them at once; a write of the dead one that arrives late is refused."""
    dead, heir, reaper = await a_lease(wire), await a_lease(wire), Reaper(wire)
    claim = await running(wire, dead)
    assert await reaper.sweep() == Swept(), "its lease is valid"
    swept = await reaper.sweep(ended=dead.id)
    assert (swept.lapsed_workers, swept.requeued) == (1, 1)
    assert [lapse.jobs for lapse in swept.lapses] == [[claim.job.id]]
    with pytest.raises(Fenced):
        await dead.calls([append(dead, {"-": [delta(claim, 1)]}, claim)])
    again = await claim_one(heir)
    assert (again.job.id, again.attempt) == (claim.job.id, 2)


async def test_no_other_worker_is_touched(wire: RedisClient) -> None:
    """Neither a living one nor the successor; a lease that is unknown or was given up is not made again."""
    living, dead = await a_lease(wire), await a_lease(wire)
    held = await running(wire, living)
    successor, left, reaper = await a_lease(wire), await a_lease(wire), Reaper(wire)
    await left.leave()
    before = await wire.redis.zrange(LEASES, 0, -1, withscores=True)
    for ended in (left.id, "", "0123456789ab"):
        assert await reaper.sweep(ended=ended) == Swept()
        assert await wire.redis.zrange(LEASES, 0, -1, withscores=True) == before
    assert (await reaper.sweep(ended=dead.id)).requeued == 0
    assert {name.decode() for name in await wire.redis.zrange(LEASES, 0, -1)} == {living.id, successor.id}
    assert held.job.id in await living.beat(0)


async def test_an_outage_of_the_store_extends_no_lease_of_a_dead_process(wire: RedisClient) -> None:
    """Half a lease without a sweep gives every worker one more lease, but not one whose process has ended."""
    dead, living, reaper = await a_lease(wire), await a_lease(wire), Reaper(wire)
    await running(wire, dead)
    await reaper.sweep()
    now = await wire.now_ms()
    await wire.redis.set(partition_key(0, "swept"), now - 10 * wire.settings.lease_ms)
    await wire.redis.zadd(LEASES, {lease.id: now - wire.settings.lease_ms for lease in (dead, living)})
    swept = await reaper.sweep(ended=dead.id)
    assert (swept.lapsed_workers, swept.requeued) == (1, 1)
    assert await living.beat(0) == {}


async def test_its_jobs_wake_a_worker_that_lives(wire: RedisClient) -> None:
    """The dead worker was idle a moment ago, more recently than the other: the wake-up is not for it."""
    heir, dead = await a_lease(wire), await a_lease(wire)
    await running(wire, dead)
    await heir.claim(0, 1)
    await dead.claim(0, 1)
    now = await wire.now_ms()
    await wire.redis.zadd(IDLE, {heir.id: now - 1, dead.id: now})
    assert (await Reaper(wire).sweep(ended=dead.id)).requeued == 1
    assert await wire.redis.zrange(IDLE, 0, -1) == [], "the living one was taken out, and told"


async def test_a_death_is_counted_once_however_many_partitions_there_are(
    wide: RedisClient, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if two processes find it, each in other partitions; its jobs are counted in every one."""
    dead, metrics = await a_lease(wide), [Metrics.start("", "worker"), Metrics.start("", "scheduler")]
    queue = Queue(wide)
    for partition in (1, 3):
        await queue.put(a_job(queue, id=new_job_id(partition)))
        assert len((await dead.claim(partition, 1)).jobs) == 1
    for partition in (0, 1):
        await wide.redis.zadd(partition_key(partition, "leases"), {dead.id: 1})
    first = await Reaper(wide, metrics[0]).sweep()
    second = await Reaper(wide, metrics[1]).sweep(ended=dead.id)
    assert (first.lapsed_workers, second.lapsed_workers, first.requeued, second.requeued) == (1, 0, 1, 1)
    pages = [each.expose().decode() for each in metrics]
    assert [f"penstock_lapsed_workers_total {count}.0" in page for count, page in zip((1, 0), pages, strict=True)]
    assert all("penstock_lease_reclaims_total 1.0" in page for page in pages)
    said = [record for record in caplog.records if " lapsed: " in record.message]
    assert len(said) == 3, "of partition 0, and where it held jobs"
