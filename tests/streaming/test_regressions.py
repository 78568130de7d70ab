"""Mistakes the protocol must never make again, each in the fewest steps that would show it."""

from __future__ import annotations

import asyncio
import math

import pytest
from flow import a_job, a_lease, append, claim_one, delta, lapse, put_job

from streaming.errors import Fenced, Unavailable
from streaming.ids import new_job_id
from streaming.jobs.codec import Run, Section, Terminal, decode_reply
from streaming.jobs.job import JobState
from streaming.jobs.lease import SILENT, Claim, Finish, HeldJob, Lease, without_rows
from streaming.jobs.queue import Queue
from streaming.jobs.quotas import Quotas
from streaming.jobs.reader import JobReader
from streaming.jobs.reaper import Reaper
from streaming.jobs.settings import QuotaSettings
from streaming.keys import channel, partition_key
from streaming.redis.client import RedisClient

LANE = partition_key(0, "lane", "m", "standard")


async def running(wire: RedisClient, **changes: object) -> tuple[Lease, str, Claim]:
    """A new worker, and the job that it runs."""
    lease, job = await a_lease(wire), await put_job(Queue(wire), **changes)
    return lease, job.id, await claim_one(lease)


async def finish(lease: Lease, job_id: str, run: int) -> None:
    end = Terminal(job_id, JobState.COMPLETED, 0, ("stop",))
    await lease.calls([lease.finish_call(Finish(end, run, True))])


async def state_of(wire: RedisClient, job_id: str) -> JobState:
    return (await JobReader(wire).record(job_id)).state


async def test_a_job_is_ended_by_its_holder_and_its_run_only(wire: RedisClient) -> None:
    """Another live worker's finish, or the holder's own of another run, changes nothing."""
    holder, job_id, claim = await running(wire)
    for lease, number in ((await a_lease(wire), claim.run_number), (holder, claim.run_number + 1)):
        await finish(lease, job_id, number)
        assert await state_of(wire, job_id) is JobState.RUNNING
    await finish(holder, job_id, claim.run_number)
    assert await state_of(wire, job_id) is JobState.COMPLETED


async def test_a_release_that_arrives_late_leaves_the_next_attempt_alone(wire: RedisClient) -> None:
    """The same worker has claimed the job again: what it sent before, of the attempt before, hands nothing back."""
    lease, job_id, first = await running(wire)
    await lease.release(job_id, first.run_number)
    second = await claim_one(lease)
    assert (second.job.id, second.attempt) == (job_id, first.attempt + 1)
    await lease.release(job_id, first.run_number)
    assert await state_of(wire, job_id) is JobState.RUNNING and await lease.beat(0) == {
        job_id: HeldJob(second.run_number, False)
    }
    await finish(lease, job_id, first.run_number)  # its end neither
    assert await state_of(wire, job_id) is JobState.RUNNING
    await lease.release(job_id, second.run_number)
    assert await state_of(wire, job_id) is JobState.QUEUED and await lease.beat(0) == {}


async def test_a_put_that_is_repeated_late_runs_nothing_again(wire: RedisClient) -> None:
    """Its first sending has been claimed, and then has ended: there is no second entry and the record stays."""
    queue, (lease, _, claim) = Queue(wire), await running(wire)
    job = claim.job
    await queue.put(job)
    assert (await lease.claim(0, 5)).jobs == [] and await state_of(wire, job.id) is JobState.RUNNING
    await finish(lease, job.id, claim.run_number)
    await queue.put(job)
    assert (await lease.claim(0, 5)).jobs == [] and await state_of(wire, job.id) is JobState.COMPLETED


async def test_the_time_the_store_was_away_ends_no_lease(wire: RedisClient) -> None:
    """Who could not renew a lease has it once more, and only once; one that had lapsed before was over anyway."""
    (living, job_id, _), dead, reaper = await running(wire), await a_lease(wire), Reaper(wire)
    leases = partition_key(0, "leases")
    await reaper.sweep()

    async def away() -> None:
        """Nobody has swept for ten leases, and the lease ended in that time."""
        now = await wire.now_ms()
        await wire.redis.set(partition_key(0, "swept"), now - 10 * wire.settings.lease_ms)
        await wire.redis.zadd(leases, {living.id: now - wire.settings.lease_ms})

    await away()
    await wire.redis.zadd(leases, {dead.id: 1})
    swept = await reaper.sweep()
    assert (swept.spared, swept.lapsed_workers, swept.requeued) == (1, 1, 0)
    assert await living.beat(0) == {job_id: HeldJob(1, False)}
    await away()
    assert (await reaper.sweep()).spared == 1
    await away()
    until = await wire.redis.zscore(leases, living.id)
    await wire.redis.hset(partition_key(0, "worker", living.id), "spared", int(until))  # not renewed since
    swept = await reaper.sweep()
    assert (swept.spared, swept.lapsed_workers, swept.requeued) == (0, 1, 1)


async def test_a_spared_lease_that_was_renewed_at_once_may_be_spared_again(wire: RedisClient) -> None:
    """A heartbeat in the very millisecond of the sweep that spared it is a renewal like any other."""
    living, reaper, lease_ms = await a_lease(wire), Reaper(wire), wire.settings.lease_ms
    leases, swept = partition_key(0, "leases"), partition_key(0, "swept")
    now = await wire.now_ms()
    await wire.redis.set(swept, now - 10 * lease_ms)
    await wire.redis.zadd(leases, {living.id: now - lease_ms})
    assert (await reaper.sweep()).spared == 1
    spared = await wire.redis.zscore(leases, living.id)
    renewed = math.ceil(spared)  # what `beat` writes in that millisecond; then more than a lease passes
    await wire.redis.set(swept, int(now) - 10 * lease_ms)
    await wire.redis.zadd(leases, {living.id: renewed - 2 * lease_ms})
    await wire.redis.hset(partition_key(0, "worker", living.id), "spared", spared - 2 * lease_ms)
    found = await reaper.sweep()
    assert (found.spared, found.lapsed_workers) == (1, 0)


async def test_a_lost_workers_log_lives_as_long_as_its_jobs(wire: RedisClient) -> None:
    """At most a day while a job it was lost with goes on elsewhere; from the end of the last one, or if there is none,
    a minute. A drained worker's too."""
    queue, lost, reaper = Queue(wire), await a_lease(wire), Reaper(wire)
    for _ in range(2):
        await queue.put(a_job(queue))
    claims = [await claim_one(lost) for _ in range(2)]
    await lost.calls([append(lost, {SILENT: [delta(claim, 1) for claim in claims]}, *claims)])
    await finish(lost, claims[0].job.id, claims[0].run_number)
    await wire.redis.zadd(partition_key(0, "leases"), {lost.id: 1})
    await reaper.sweep()
    log = partition_key(0, "log", lost.id)
    assert await wire.redis.ttl(log) > 3600
    drained = await a_lease(wire)
    claim = await claim_one(drained)
    await drained.calls([append(drained, {SILENT: [delta(claim, 2)]}, claim)])
    await drained.release(claim.job.id, claim.run_number)
    assert await drained.leave() == 0
    assert await wire.redis.ttl(partition_key(0, "log", drained.id)) > 3600
    last = await a_lease(wire)
    claim = await claim_one(last)
    rows = (await JobReader(wire).history(claim.job.id, claim.earlier_runs)).rows
    assert [row.seq for row in rows] == [1, 2]
    await last.calls([append(last, {SILENT: [delta(claim, 3)]}, claim)])
    await finish(last, claim.job.id, claim.run_number)
    for worker in (lost, drained):
        assert 0 < await wire.redis.ttl(partition_key(0, "log", worker.id)) <= 60
        assert not await wire.redis.exists(partition_key(0, "heirs", worker.id))
    assert await wire.redis.ttl(partition_key(0, "log", last.id)) == -1, "it still works"
    assert await last.leave() == 0
    assert 0 < await wire.redis.ttl(partition_key(0, "log", last.id)) <= 60


async def test_the_log_of_a_worker_that_still_works_does_not_expire(wire: RedisClient) -> None:
    """A draining worker handed one job back and still runs another: where the first ends elsewhere, the log stays."""
    queue, draining, heir = Queue(wire), await a_lease(wire), await a_lease(wire)
    for _ in range(2):
        await queue.put(a_job(queue))
    claims = [await claim_one(draining) for _ in range(2)]
    await draining.calls([append(draining, {SILENT: [delta(claim, 1) for claim in claims]}, *claims)])
    await draining.release(claims[0].job.id, claims[0].run_number)
    again = await claim_one(heir)
    assert again.job.id == claims[0].job.id
    await finish(heir, again.job.id, again.run_number)
    assert not await wire.redis.exists(partition_key(0, "heirs", draining.id))
    assert await wire.redis.ttl(partition_key(0, "log", draining.id)) == -1


async def test_a_list_of_jobs_is_as_long_as_its_time(wire: RedisClient) -> None:
    """It is trimmed as jobs are put, and goes when nothing more is put; nobody need look at it."""
    queue, jobs = Queue(wire), partition_key(0, "jobs", "t")
    now, keep_s = await wire.now_ms(), 2 * wire.settings.retention_s
    await wire.redis.zadd(jobs, {f"old {number}": now - 1000 * keep_s - 1 for number in range(100)})
    put = 0
    while await wire.redis.zcard(jobs) != put:
        assert put < 1000, "it was never trimmed"
        await queue.put(a_job(queue))
        put += 1
    assert 0 < await wire.redis.ttl(jobs) <= keep_s


async def test_a_clock_that_is_set_back_keeps_no_dead_worker(wire: RedisClient) -> None:
    """A lease that ends ten minutes from now was made by a clock that was ahead: it ends within one lease."""
    (dead, job_id, _), reaper = await running(wire), Reaper(wire)
    leases = partition_key(0, "leases")
    await wire.redis.zadd(leases, {dead.id: await wire.now_ms() + 600_000})
    await reaper.sweep()
    ends_in = float(await wire.redis.zscore(leases, dead.id) or 0) - await wire.now_ms()
    assert ends_in <= wire.settings.lease_ms
    await wire.redis.zadd(leases, {dead.id: 1})
    assert (await reaper.sweep()).requeued == 1
    assert await state_of(wire, job_id) is JobState.QUEUED


async def test_a_job_whose_time_is_over_is_not_claimed(wire: RedisClient) -> None:
    """The claim itself looks: no reaper has come by."""
    queue, lease = Queue(wire), await a_lease(wire)
    late, fine = a_job(queue), a_job(queue)
    for job in (late, fine):
        await queue.put(job)
    await wire.redis.hset(partition_key(0, "job", late.id), "deadline", "1")
    assert (await claim_one(lease)).job.id == fine.id
    assert await state_of(wire, late.id) is JobState.EXPIRED


async def test_a_job_begins_anew_at_the_word_of_its_own_run_only(wire: RedisClient) -> None:
    """From there on nobody reads what earlier runs logged, and its events have another epoch."""
    reader, (lost, job_id, _) = JobReader(wire), await running(wire)
    await lapse(wire, lost)
    holder = await a_lease(wire)
    run = (await claim_one(holder)).run_number
    before = await reader.record(job_id)
    await holder.restart(job_id, run + 1)
    assert await reader.record(job_id) == before and len(before.runs) == 2
    await holder.restart(job_id, run)
    after = await reader.record(job_id)
    assert (after.runs, after.epoch) == (before.runs[1:], before.epoch + 1)
    with pytest.raises(Fenced):
        await lost.restart(job_id, run)


async def test_a_request_is_counted_once_however_long_its_job_took(wire: RedisClient) -> None:
    """Its bytes move from the time by which it was to be gone to the one by which it will be."""
    queue, lease, kept = Queue(wire), await a_lease(wire), partition_key(0, "kept", "t")
    job_id = (await queue.put(a_job(queue))).id
    ((ends, size),) = [(int(field), int(count)) for field, count in (await wire.redis.hgetall(kept)).items()]
    other = ends + 7200  # as if it had been put at another time
    await wire.redis.delete(kept)
    await wire.redis.hset(kept, str(other), size)
    await wire.redis.hset(partition_key(0, "job", job_id), "size", f"{size}:{other}")
    await finish(lease, job_id, (await claim_one(lease)).run_number)
    assert (await Quotas(wire).usage("t")).job_bytes == size


async def test_a_put_whose_answer_was_lost_is_asked_once_more(wire: RedisClient) -> None:
    """Before its client is told that nobody knows; the script knows the repetition."""
    queue, asked = Queue(wire), list[tuple[str | bytes | int, ...]]()
    put = queue._puts.call

    async def first_answer_lost(partition: int, *args: str | bytes | int) -> object:
        asked.append(args)
        answer = await put(partition, *args)
        if len(asked) == 1:
            raise Unavailable("cut")
        return answer

    queue._puts.call = first_answer_lost  # type: ignore[method-assign]
    job = a_job(queue)
    assert not (await queue.put(job)).joined
    assert asked[0] == asked[1] and len(asked) == 2 and await wire.redis.xlen(LANE) == 1


async def test_what_is_kept_elsewhere_counts_against_a_quota_once(wide: RedisClient) -> None:
    """Of the partition that is asked the script knows better, and would count it twice."""
    queue = Queue(wide)
    for partition in (0, 0, 0, 1):
        await queue.put(a_job(queue, id=new_job_id(partition)))
    left = [await Quotas(wide).left("t", partition, QuotaSettings(jobs=10)) for partition in (0, 1)]
    assert left == [{"jobs": 10 - 1}, {"jobs": 10 - 3}]


@pytest.mark.parametrize("with_rows", [False, True])
async def test_the_end_of_a_job_is_sent_to_those_who_wait_for_it(wire: RedisClient, with_rows: bool) -> None:
    """They need not look for it: with its rows, or without them for readers that have had these."""
    address = channel("api", "here")
    lease, job_id, claim = await running(wire, reply_to=address)
    run = Section(1, Run(lease.id, claim.run_number))
    end = Terminal(job_id, JobState.COMPLETED, 1, ("stop",), rows=(delta(claim, 1),), sections=(run,))
    async with wire.subscribe(address) as heard, asyncio.timeout(20):
        await lease.calls([lease.finish_call(Finish(end, claim.run_number, with_rows))])
        assert decode_reply(await heard.message()) == (end if with_rows else without_rows(end))


async def test_a_run_has_a_number_of_its_own_whatever_fails_beside_it(wire: RedisClient) -> None:
    """A job whose claim fails half-way takes no number away: no two jobs of a worker ever share one."""
    queue, lease = Queue(wire), await a_lease(wire)
    bad = await put_job(queue)
    for _ in range(4):
        await queue.put(a_job(queue))
    await wire.redis.hset(partition_key(0, "job", bad.id), "attempt", 1)  # and nothing of when that was
    numbers = []
    for _ in range(2):
        numbers += [job.run_number for job in (await lease.claim(0, 2)).jobs]
    assert len(numbers) == 4 == len(set(numbers)), numbers
    assert max(numbers) == 4, "and they stay small, for they stand in every row"
    assert (await lease.claim(0, 64)).jobs == []
    await queue.put(a_job(queue))
    (claim,) = (await lease.claim(0, 64)).jobs
    assert claim.run_number == 5


@pytest.mark.parametrize("fault", ["gone", "no hash"])
async def test_a_worker_leaves_though_the_store_has_lost_its_job(wire: RedisClient, fault: str) -> None:
    """What it hands back is nobody's: it holds nothing more."""
    leaving, job_id, claim = await running(wire)
    await wire.redis.delete(partition_key(0, "job", job_id))
    if fault == "no hash":
        await wire.redis.set(partition_key(0, "job", job_id), b"x")
    assert await leaving.leave() == 1
    await leaving.release(job_id, claim.run_number)
    assert await leaving.leave() == 0
