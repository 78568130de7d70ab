"""Jobs that wait for their time: none starts before it, each enters its lane once, in the order of the times."""

from __future__ import annotations

import asyncio
from typing import Any

from flow import a_job, a_lease, claim_one, put_job
from msgspec.structs import replace

from streaming.errors import LaneFull
from streaming.jobs.job import Job, JobState
from streaming.jobs.queue import Queue
from streaming.jobs.reader import LATER_MS, JobReader, Summaries
from streaming.jobs.reaper import MAX_JOBS, Reaper
from streaming.jobs.waiting import Backlog
from streaming.keys import partition_key
from streaming.redis.client import RedisClient
from streaming.redis.settings import RedisSettings

HOUR_MS = 3_600_000
SCHEDULED, OWED = partition_key(0, "scheduled"), partition_key(0, "owed")


async def become_due(wire: RedisClient, *jobs: Job) -> None:
    """Let their times come, in this order."""
    for number, job in enumerate(jobs):
        await wire.redis.zadd(SCHEDULED, {job.id: number + 1}, xx=True)


async def waiting(wire: RedisClient) -> int:
    return sum(lane.waiting for lane in await Backlog(wire).lanes(["m"]))


async def test_a_job_starts_at_its_time_and_not_before(wire: RedisClient) -> None:
    """Until then it has no place in its lane, and no worker gets it; then it is as one that was accepted now."""
    queue, reaper, lease = Queue(wire), Reaper(wire), await a_lease(wire)
    first = await put_job(queue, delay_ms=HOUR_MS)
    second = await put_job(queue, not_before_ms=await wire.now_ms() + 2 * HOUR_MS)
    await reaper.sweep()
    assert not (await lease.claim(0, 2)).jobs and await waiting(wire) == 0
    record = await JobReader(wire).record(first.id)
    assert record.state is JobState.QUEUED and record.held
    assert abs(record.not_before_ms - record.created_ms - HOUR_MS) < 5
    await become_due(wire, second, first)
    await asyncio.gather(*(Reaper(wire).sweep() for _ in range(3)))
    assert await waiting(wire) == 2 and not await wire.redis.exists(SCHEDULED)
    fresh = await JobReader(wire).again(record)
    assert not fresh.held
    assert [(await claim_one(lease)).job.id for _ in range(2)] == [second.id, first.id]


async def test_its_time_wakes_a_worker_that_is_idle(wire: RedisClient) -> None:
    lease, idle = await a_lease(wire), partition_key(0, "idle", "m")
    job = await put_job(Queue(wire), delay_ms=HOUR_MS)
    await lease.claim(0, 1)
    assert await wire.redis.zcard(idle) == 1
    await become_due(wire, job)
    await Reaper(wire).sweep()
    assert await wire.redis.zcard(idle) == 0, "it was taken out, and told"


async def test_what_it_counts_as_is_kept_until_behind_its_time(wire: RedisClient) -> None:
    """Its bytes in its tenant's usage, and the tenant's list of such jobs; no timer runs before it is in its lane."""
    job = await put_job(Queue(wire), delay_ms=20 * 24 * HOUR_MS, deadline_ms=50)
    (span,) = await wire.redis.hkeys(partition_key(0, "kept", "t"))
    assert int(span) * 1000 >= (await JobReader(wire).record(job.id)).not_before_ms
    assert await wire.redis.pttl(partition_key(0, "scheduled_of", "t")) > 30 * 24 * HOUR_MS
    assert not await wire.redis.exists(partition_key(0, "timers"))


async def test_a_time_that_is_over_delays_nothing(wire: RedisClient) -> None:
    await put_job(Queue(wire), not_before_ms=1)
    assert await waiting(wire) == 1 and not await wire.redis.exists(SCHEDULED)


async def test_limits_count_from_its_time(wire: RedisClient) -> None:
    """It does not expire while it waits for its time; behind that, as others do."""
    queue, reaper = Queue(wire), Reaper(wire)
    job = await put_job(queue, delay_ms=HOUR_MS, deadline_ms=50, max_queue_ms=40)
    record = await JobReader(wire).record(job.id)
    assert abs(record.deadline_ms - record.not_before_ms - 50) < 2
    await asyncio.sleep(0.1)
    assert (await reaper.sweep()).expired == 0
    await wire.redis.hset(partition_key(0, "job", job.id), "queue_deadline", await wire.now_ms() - 1)
    await become_due(wire, job)
    assert (await reaper.sweep()).expired == 1
    assert (await JobReader(wire).record(job.id)).state is JobState.EXPIRED


async def test_it_is_cancelled_and_leaves_nothing(wire: RedisClient) -> None:
    """Its reservation is kept until its end, also while its lane is empty."""
    queue, reaper = Queue(wire), Reaper(wire)
    job = await put_job(queue, delay_ms=HOUR_MS)
    await reaper.sweep()
    assert int((await wire.redis.hvals(OWED))[0]) > 0
    assert await queue.cancel(job.id) is JobState.QUEUED
    assert (await JobReader(wire).record(job.id)).state is JobState.CANCELLED
    assert {int(each) for each in await wire.redis.hvals(OWED)} == {0}
    assert not await wire.redis.exists(SCHEDULED, partition_key(0, "scheduled_of", "t"))
    await reaper.sweep()
    assert await waiting(wire) == 0 and not await wire.redis.hvals(OWED)


async def test_lists_have_it_before_all_others(wire: RedisClient) -> None:
    """By its time, page by page; once it has come, or it was cancelled, by that."""
    queue, lists = Queue(wire), Summaries(wire)
    jobs = [await put_job(queue, delay_ms=(3 - number) * HOUR_MS) for number in range(3)]
    other = await put_job(queue)
    expected, found, before = [*(job.id for job in jobs), other.id], list[str](), None
    for _ in expected:
        page = await lists.recent(["t"], before, 1)
        found, before = found + [record.job.id for record in page.jobs], page.behind
    assert found == expected and before is None
    assert [record.not_before_ms > 0 for record in (await lists.recent(["t"], None, 9)).jobs] == [True] * 3 + [False]
    assert not (await lists.recent(["other"], None, 9)).jobs
    await queue.cancel(jobs[0].id)
    await become_due(wire, jobs[1])
    await Reaper(wire).sweep()
    assert {record.job.id for record in (await lists.recent(["t"], None, 9)).jobs} == set(expected)
    assert (await lists.recent(["t"], None, 1)).jobs[0].job.id == jobs[2].id


async def test_a_repeated_put_schedules_once(wire: RedisClient) -> None:
    queue = Queue(wire)
    job = a_job(queue, delay_ms=HOUR_MS)
    await queue.put(job)
    await wire.redis.delete(SCHEDULED)  # as if the server had refused the put's last write
    await queue.put(job)
    assert await wire.redis.zcard(SCHEDULED) == 1 and await waiting(wire) == 0


async def test_as_many_wait_for_their_time_as_in_a_full_lane(redis_url: str) -> None:
    """No tenant has more of them than places are left; the lane itself is as free as before, and takes them when they
    come."""
    wire = RedisClient.open(RedisSettings(url=redis_url, lane_limit=10))
    queue, jobs = Queue(wire), list[Job]()

    async def fill(tenant: str, **about: Any) -> int:
        """How many a tenant may have."""
        for count in range(11):
            try:
                jobs.append(replace(a_job(queue, delay_ms=HOUR_MS, **about), tenant=tenant))
                await queue.put(jobs[-1])
            except LaneFull:
                jobs.pop()
                return count
        return 11

    assert [await fill("t", model="other"), await fill("u"), await fill("v"), await fill("w")] == [5, 3, 1, 1]
    assert [await fill("x"), await fill("y")] == [1, 0], "a tenth beyond the limit, for tenants that have none"
    for _ in range(10):
        await put_job(queue)
    await become_due(wire, *jobs)
    await Reaper(wire).sweep()
    assert await waiting(wire) == 16
    await wire.close()


async def test_counts_of_a_tenant_do_not_grow_with_its_times(wire: RedisClient) -> None:
    """Its requests count by the day, until its jobs end."""
    queue, kept = Queue(wire), partition_key(0, "kept", "t")
    jobs = [await put_job(queue, delay_ms=(1 + number) * HOUR_MS) for number in range(100)]
    counted = sum(map(int, await wire.redis.hvals(kept)))
    assert await wire.redis.hlen(kept) <= 7
    for job in jobs:
        await queue.cancel(job.id)
    assert await wire.redis.hlen(kept) <= 2 and sum(map(int, await wire.redis.hvals(kept))) == counted


async def test_many_that_are_due_at_once_come_in_slices(wide: RedisClient) -> None:
    """In every partition; no sweep takes more than it may, and none is lost."""
    queue, count = Queue(wide), 2 * MAX_JOBS * len(wide.partitions)
    for job in [a_job(queue, delay_ms=HOUR_MS) for _ in range(count)]:
        await queue.put(job)
    for partition in wide.partitions:
        key = partition_key(partition, "scheduled")
        await wide.redis.zadd(key, dict.fromkeys(await wide.redis.zrange(key, 0, -1), 1), xx=True)
    seen = list[int]()
    while not seen or seen[-1] < count:
        await Reaper(wide).sweep()
        seen.append(await waiting(wide))
    assert seen[0] <= MAX_JOBS * len(wide.partitions)


async def test_what_is_left_of_a_lost_record_goes(wire: RedisClient) -> None:
    job = await put_job(Queue(wire), delay_ms=HOUR_MS)
    await wire.redis.delete(partition_key(0, "job", job.id))
    await become_due(wire, job)
    await Reaper(wire).sweep()
    assert not await wire.redis.exists(SCHEDULED) and await waiting(wire) == 0


async def test_those_whose_time_has_come_all_enter_at_once(wire: RedisClient) -> None:
    """Not slice by slice at the reaper's interval."""
    queue = Queue(wire)
    jobs = [a_job(queue, delay_ms=HOUR_MS) for _ in range(2 * MAX_JOBS + 1)]
    for job in jobs:
        await queue.put(job)
    await become_due(wire, *jobs)
    sweeping = asyncio.create_task(Reaper(wire).keep_sweeping(1.0))
    async with asyncio.timeout(10):
        while not (entered := await waiting(wire)):
            await asyncio.sleep(0)
        while (now := await waiting(wire)) < len(jobs):
            assert now >= entered
    sweeping.cancel()
    assert (await Reaper(wire).sweep()).full is False


async def test_pages_lose_no_job_while_some_are_due(wire: RedisClient) -> None:
    queue, lists = Queue(wire), Summaries(wire)
    first = await put_job(queue)
    due = [await put_job(queue, delay_ms=1) for _ in range(2)]
    await asyncio.sleep(0.01)
    jobs = [first, *due, *[await put_job(queue) for _ in range(3)]]
    found, before = list[str](), None
    while not found or before:
        page = await lists.recent(["t"], before, 1)
        found, before = found + [record.job.id for record in page.jobs], page.behind
    assert sorted(found) == sorted(job.id for job in jobs)


async def test_a_lost_job_counts_no_more_once_its_time_is_long_past(wire: RedisClient) -> None:
    queue = Queue(wire)
    lost = await put_job(queue, delay_ms=HOUR_MS)
    listed = partition_key(0, "scheduled_of", "t")
    await wire.redis.delete(partition_key(0, "job", lost.id))
    await wire.redis.zadd(listed, {lost.id: LATER_MS + await wire.now_ms() - 2 * HOUR_MS}, xx=True)
    await put_job(queue, delay_ms=HOUR_MS)
    assert await wire.redis.zcard(listed) == 1


async def test_leaked_reservations_of_a_lane_go_while_a_job_waits_for_its_time(wire: RedisClient) -> None:
    """Its own are kept, and go with it into its lane."""
    queue, reaper = Queue(wire), Reaper(wire)
    job = await put_job(queue, delay_ms=HOUR_MS)
    (own,) = await wire.redis.hvals(OWED)
    await wire.redis.hset(OWED, "m:standard", 10_000)
    await reaper.sweep()
    assert await wire.redis.hvals(OWED) == [own]
    await become_due(wire, job)
    await reaper.sweep()
    await reaper.sweep()
    assert await wire.redis.hgetall(OWED) == {b"m:standard": own}
    await queue.cancel(job.id)
    await reaper.sweep()
    assert not await wire.redis.exists(OWED)
