"""Mistakes the protocol must never make again, each in the fewest steps that would show it."""

from __future__ import annotations

import time

import pytest
from flow import a_job

from streaming.journal import Journal
from streaming.keys import GROUP, partition_key
from streaming.lease import Claim, Finish, Held, Lease
from streaming.messages import State, Terminal
from streaming.queue import Queue
from streaming.reaper import Reaper
from streaming.wire import Wire

LANE = partition_key(0, "lane", "m", "standard")
RETRY = partition_key(0, "retry", "m", "standard")


async def a_lease(wire: Wire) -> Lease:
    lease = Lease(wire, "m")
    await lease.register()
    return lease


async def claim_one(lease: Lease) -> Claim:
    (claim,) = (await lease.claim(0, 1)).jobs
    assert isinstance(claim, Claim)
    return claim


async def finish(lease: Lease, job_id: str, attempt: int) -> None:
    end = Terminal(job_id, State.COMPLETED, 0, ("stop",))
    await lease.calls([lease.finish_call(Finish(end, attempt, True))])


async def state_of(wire: Wire, job_id: str) -> State:
    return (await Journal(wire).record(job_id)).state


async def test_a_job_is_ended_by_its_holder_in_its_attempt_only(wire: Wire) -> None:
    """Another live worker's finish, or the holder's own of another attempt, changes nothing."""
    queue, holder = Queue(wire), await a_lease(wire)
    other = await a_lease(wire)
    job_id = (await queue.put(a_job(queue))).id
    assert (await claim_one(holder)).attempt == 1
    for lease, attempt in ((other, 1), (holder, 2)):
        await finish(lease, job_id, attempt)
        assert await state_of(wire, job_id) is State.RUNNING
    await finish(holder, job_id, 1)
    assert await state_of(wire, job_id) is State.COMPLETED


async def test_a_finish_behind_the_hand_back_leaves_the_job_in_the_queue(wire: Wire) -> None:
    """Refused is refused: the job's new entry is still there for the next worker."""
    queue, leaving = Queue(wire), await a_lease(wire)
    job_id = (await queue.put(a_job(queue))).id
    claim = await claim_one(leaving)
    await leaving.release(job_id, claim.attempt)
    await finish(leaving, job_id, claim.attempt)
    assert (await claim_one(await a_lease(wire))).job.id == job_id


async def test_a_release_that_arrives_late_leaves_the_next_attempt_alone(wire: Wire) -> None:
    """The same worker has claimed the job again: what it sent before, of the attempt before, hands nothing back."""
    queue, lease = Queue(wire), await a_lease(wire)
    job_id = (await queue.put(a_job(queue))).id
    first = await claim_one(lease)
    await lease.release(job_id, first.attempt)
    second = await claim_one(lease)
    assert (second.job.id, second.attempt) == (job_id, first.attempt + 1)
    await lease.release(job_id, first.attempt)
    assert await state_of(wire, job_id) is State.RUNNING and await lease.beat(0) == {job_id: Held(2, False)}
    await finish(lease, job_id, first.attempt)  # its end neither
    assert await state_of(wire, job_id) is State.RUNNING
    await lease.release(job_id, second.attempt)
    assert await state_of(wire, job_id) is State.QUEUED and await lease.beat(0) == {}


async def test_a_put_that_is_repeated_late_runs_nothing_again(wire: Wire) -> None:
    """Its first sending has been claimed, and then has ended: there is no second entry and the record stays."""
    queue, lease = Queue(wire), await a_lease(wire)
    job = a_job(queue)
    await queue.put(job)
    claim = await claim_one(lease)
    await queue.put(job)
    assert (await lease.claim(0, 5)).jobs == [] and await state_of(wire, job.id) is State.RUNNING
    await finish(lease, job.id, claim.attempt)
    await queue.put(job)
    assert (await lease.claim(0, 5)).jobs == [] and await state_of(wire, job.id) is State.COMPLETED


async def test_a_lost_worker_leaves_no_entry_behind(wire: Wire) -> None:
    """Its job moves: the old entry and the dead consumer go, and after the job's end the new ones go too."""
    queue, lost = Queue(wire), await a_lease(wire)
    job_id = (await queue.put(a_job(queue))).id
    await claim_one(lost)
    await wire.redis.zadd(partition_key(0, "leases"), {lost.id: 1})
    assert (await Reaper(wire).sweep()).requeued == 1
    assert (await wire.redis.xlen(LANE), await wire.redis.xlen(RETRY)) == (0, 1)
    heir = await a_lease(wire)
    await finish(heir, job_id, (await claim_one(heir)).attempt)
    assert await wire.redis.xlen(RETRY) == 0 and await heir.leave() == 0
    for lane in (LANE, RETRY):
        (group,) = await wire.redis.xinfo_groups(lane)
        assert (group["pending"], group["consumers"]) == (0, 0)


async def test_a_consumer_with_pending_entries_is_never_deleted(wire: Wire) -> None:
    """A store that has lost a worker's claims, but not what was delivered to it, keeps what can still be found."""
    queue, lease = Queue(wire), await a_lease(wire)
    await queue.put(a_job(queue))
    await claim_one(lease)
    await wire.redis.delete(partition_key(0, "claims", lease.id))
    assert await lease.leave() == 0
    assert (await wire.redis.xpending(LANE, GROUP))["pending"] == 1


@pytest.mark.parametrize("hours", [-1, 1])
async def test_a_clients_clock_decides_nothing(wire: Wire, monkeypatch: pytest.MonkeyPatch, hours: int) -> None:
    """An hour fast or slow here: no lease lapses before its time, and one that has lapsed is found."""
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 3600 * hours)
    lease, queue = await a_lease(wire), Queue(wire)
    job_id = (await queue.put(a_job(queue, job_id=queue.new_id("t")))).id
    await claim_one(lease)
    assert await lease.beat(0) == {job_id: Held(1, False)}
    assert not await Reaper(wire).sweep()
    await wire.redis.zadd(partition_key(0, "leases"), {lease.id: await wire.now_ms() - 1})
    assert (await Reaper(wire).sweep()).requeued == 1


async def test_the_time_the_store_was_away_ends_no_lease(wire: Wire) -> None:
    """Who could not renew a lease has it once more, and only once; one that had lapsed before was over anyway."""
    living, dead, queue, reaper = await a_lease(wire), await a_lease(wire), Queue(wire), Reaper(wire)
    leases = partition_key(0, "leases")
    job_id = (await queue.put(a_job(queue, job_id=queue.new_id("t")))).id
    await claim_one(living)
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
    assert await living.beat(0) == {job_id: Held(1, False)}
    await away()
    assert (await reaper.sweep()).spared == 1
    await away()
    until = await wire.redis.zscore(leases, living.id)
    await wire.redis.hset(partition_key(0, "worker", living.id), "spared", int(until))  # not renewed since
    swept = await reaper.sweep()
    assert (swept.spared, swept.lapsed_workers, swept.requeued) == (0, 1, 1)


async def test_a_job_whose_time_is_over_is_not_claimed(wire: Wire) -> None:
    """The claim itself looks: no reaper has come by."""
    queue, lease = Queue(wire), await a_lease(wire)
    late, fine = a_job(queue), a_job(queue)
    for job in (late, fine):
        await queue.put(job)
    await wire.redis.hset(partition_key(0, "job", late.id), "deadline", "1")
    assert (await claim_one(lease)).job.id == fine.id
    assert await state_of(wire, late.id) is State.EXPIRED
