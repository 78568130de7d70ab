"""The protocol's scripts on a real server: each step, its refusals, and what a repetition does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from flow import a_job, a_lease, append, claim_one, delta, deltas_of, kept, lapse, put_job, until

from streaming.errors import Fenced, KeyReused, LaneFull, Rewound, UnknownJob
from streaming.ids import new_job_id
from streaming.jobs.codec import Delta, Run, Terminal
from streaming.jobs.history import LoggedRun
from streaming.jobs.job import JobState
from streaming.jobs.lease import Claim, Claimed, Finish, HeldJob, UnreadableClaim
from streaming.jobs.queue import Queue
from streaming.jobs.reader import JobReader
from streaming.jobs.reaper import Reaper
from streaming.jobs.waiting import Backlog
from streaming.keys import partition_key
from streaming.order import Priority
from streaming.redis.client import RedisClient


def a_finish(claim: Claim, seq: int, rows: tuple[Delta, ...] = ()) -> Finish:
    return Finish(Terminal(claim.job.id, JobState.COMPLETED, seq, ("stop",), rows=rows), claim.run_number, True)


async def test_a_job_is_put_claimed_logged_and_finished(wire: RedisClient) -> None:
    """The whole life of a job leaves one record, an empty lane and no claim."""
    queue, reader = Queue(wire), JobReader(wire)
    job = a_job(queue)
    assert (await queue.put(job)).position.before == 0
    lease = await a_lease(wire)
    claim = await claim_one(lease)
    assert (claim.job, claim.attempt) == (job, 1)
    rows = [delta(claim, 1, "a"), delta(claim, 2, "b")]
    await lease.calls([append(lease, {"-": rows}, claim, oldest=claim.first_frame)])
    assert await deltas_of(reader, await reader.record(job.id)) == rows
    await lease.calls([lease.finish_call(a_finish(claim, 2, tuple(rows)))])
    record = await reader.record(job.id)
    assert record.state is JobState.COMPLETED and record.done_ms >= record.started_ms >= record.created_ms > 0
    assert await deltas_of(reader, record, after=1) == list(kept(rows[1:]))
    assert await wire.redis.xlen(partition_key(0, "lane", "m", "standard")) == 0
    assert await lease.leave() == 0


async def test_a_fenced_worker_can_write_nothing(wire: RedisClient) -> None:
    """After its lease was taken a worker's append, finish, claim, beat and release are all refused."""
    job = await put_job(Queue(wire))
    zombie = await a_lease(wire)
    claim = await claim_one(zombie)
    await lapse(wire, zombie)
    attempts = [
        zombie.calls([append(zombie, {"-": [delta(claim, 1)]}, claim)]),
        zombie.calls([zombie.finish_call(a_finish(claim, 0))]),
        zombie.claim(0, 1),
        zombie.beat(0),
        zombie.release(job.id, claim.run_number),
    ]
    for attempt in attempts:
        with pytest.raises(Fenced):
            await attempt
    assert await zombie.leave() == 0
    assert await wire.redis.hget(partition_key(0, "worker", zombie.id), "state") == b"dead", (
        "nor is its end written anew"
    )
    record = await JobReader(wire).record(job.id)
    assert record.state is JobState.QUEUED and await deltas_of(JobReader(wire), record) == []


async def test_a_run_shares_its_number_with_none_of_another_partition(
    wide: RedisClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker claims from two partitions at once, and the claim that began first is answered last: readers know a run
    by worker and number alone."""
    queue, lease, call = Queue(wide), await a_lease(wide), wide.call
    for partition in (0, 1, 1, 1):
        await queue.put(a_job(queue, id=new_job_id(partition)))
    answered = asyncio.Event()

    async def slow(name: str, partition: int, *args: str | bytes | int) -> Any:
        answer = await call(name, partition, *args)
        if partition == 0:
            await answered.wait()
        return answer

    monkeypatch.setattr(wide, "call", slow)
    waiting = asyncio.create_task(lease.claim(0, 2))
    await asyncio.sleep(0)
    claims = (await lease.claim(1, 1)).jobs
    answered.set()
    claims += (await waiting).jobs
    claims += (await lease.claim(1, 2)).jobs
    assert len({claim.run_number for claim in claims}) == len(claims) == 4


async def test_a_checkpoint_counts_only_for_its_run_and_once_it_is_in_the_log(wire: RedisClient) -> None:
    """Sent before its frame is there, by another worker, or for an earlier run, it changes nothing; twice is once."""
    reader, job = JobReader(wire), await put_job(Queue(wire))
    lease, other = await a_lease(wire), await a_lease(wire)
    claim = await claim_one(lease)
    rows = [delta(claim, 1), delta(claim, 2)]
    await lease.calls([append(lease, {"-": rows}, claim)])
    number = claim.run_number
    for call in (
        lease.checkpoint_call(0, job.id, number, 2),
        other.checkpoint_call(0, job.id, number, 1),
        lease.checkpoint_call(0, job.id, number + 1, 1),
    ):
        await lease.calls([call])
        assert (await reader.record(job.id)).runs == (LoggedRun(Run(lease.id, number), 1),)
    again = append(lease, {"-": rows}, claim)
    for _ in range(2):
        await lease.calls([again, lease.checkpoint_call(0, job.id, number, 2)])
        assert (await reader.record(job.id)).runs == (LoggedRun(Run(lease.id, number), 2),)
    await wire.redis.xtrim(partition_key(0, "log", lease.id), minid="2-0", approximate=False)
    assert (await reader.history(job.id, (await reader.record(job.id)).runs)).rows == rows


async def test_repeated_writes_change_nothing(wire: RedisClient) -> None:
    """A put, append or finish whose answer was lost may be sent again."""
    queue, reader = Queue(wire), JobReader(wire)
    job = await put_job(queue)
    await queue.put(job)
    lease = await a_lease(wire)
    claims = (await lease.claim(0, 5)).jobs
    assert len(claims) == 1 and isinstance(claims[0], Claim)
    step = append(lease, {"-": [delta(claims[0], 1)]}, claims[0])
    finish = lease.finish_call(a_finish(claims[0], 1, (delta(claims[0], 1),)))
    for _ in range(2):
        await lease.calls([step, finish])
    assert len(await deltas_of(reader, await reader.record(job.id))) == 1
    assert await wire.redis.xlen(partition_key(0, "log", lease.id)) == 1


async def test_a_worker_that_held_very_many_jobs_leaves_all_of_them(
    opened: Callable[..., RedisClient], redis_url: str
) -> None:
    """More than one command takes at once: each is put back, and nothing of the worker is left. A loaded
    machine may take longer for that than a client waits for one command, and than a short lease lasts."""
    wire = opened(redis_url, timeout_s=60, lease_ms=60_000)
    queue, lost = Queue(wire), await a_lease(wire)
    jobs = [a_job(queue) for _ in range(1500)]
    await queue.put_parts(jobs)
    assert len((await lost.claim(0, 2000)).jobs) == 1500
    assert (await lapse(wire, lost)).requeued == 1500
    heir = await a_lease(wire)
    claims = (await heir.claim(0, 2000)).jobs
    assert {claim.job.id for claim in claims if isinstance(claim, Claim)} == {job.id for job in jobs}
    assert not await wire.redis.exists(partition_key(0, "claims", lost.id))
    assert await wire.redis.exists(partition_key(0, "retry", "m", "standard")) == 0


async def test_foreign_entries_of_a_lane_become_dead_letters(wire: RedisClient) -> None:
    """Also in a lane that had no job before; each once, and no job is lost behind them."""
    lane = partition_key(0, "lane", "m", "standard")
    foreign: list[dict[Any, Any]] = [{b"\xff\x00": b"\xfe"}, {"job": "no-such-job", "more": "x"}, {"jobs": "1"}] * 10
    entries = [await wire.redis.xadd(lane, fields) for fields in foreign]
    job = await put_job(Queue(wire))
    for _ in range(len(foreign)):
        await Reaper(wire).sweep()
    letters = [letter for _, letter in await wire.redis.xrange(partition_key(0, "dead"))]
    assert sorted(letter[b"entry"] for letter in letters) == sorted(entries)
    assert (await claim_one(await a_lease(wire))).job.id == job.id
    assert await wire.redis.xlen(lane) == 1


async def test_a_job_given_up_after_too_many_lost_workers_is_a_dead_letter(wire: RedisClient) -> None:
    """It fails with its reason instead of killing workers for ever."""
    job = await put_job(Queue(wire))
    for _ in range(wire.settings.max_attempts - 1):
        lease = await a_lease(wire)
        await claim_one(lease)
        await lapse(wire, lease)
    lease = await a_lease(wire)
    assert (await lease.claim(0, 5)) == Claimed([], suspects=True)
    assert len((await lease.claim(0, 5, alone=True)).jobs) == 1
    swept = await lapse(wire, lease)
    record = await JobReader(wire).record(job.id)
    assert len(swept.given_up) == 1 and record.state is JobState.FAILED
    assert record.terminal is not None and record.terminal.failure is not None
    assert record.terminal.failure.code == "poison"
    assert await wire.redis.xlen(partition_key(0, "dead")) == 1


async def test_cancel_ends_a_waiting_job_and_marks_a_running_one(wire: RedisClient) -> None:
    """A waiting job is never claimed after its cancel; a running one is told, and beat repeats it."""
    queue, reader = Queue(wire), JobReader(wire)
    waiting, running = a_job(queue), a_job(queue, Priority.INTERACTIVE)
    await queue.put(waiting)
    await queue.put(running)
    lease = await a_lease(wire)
    await claim_one(lease)
    assert await queue.cancel(waiting.id) is JobState.QUEUED
    assert await queue.cancel(running.id) is JobState.RUNNING
    assert (await reader.record(waiting.id)).state is JobState.CANCELLED
    assert (await lease.claim(0, 5)).jobs == []
    assert await lease.beat(0) == {running.id: HeldJob(1, True, "owner")}
    with pytest.raises(UnknownJob):
        await queue.cancel(queue.new_id("t"))


async def test_a_released_job_is_not_counted_as_a_loss(wire: RedisClient) -> None:
    """A drained worker's job goes to the next worker, in its next attempt, and may be handed on for ever."""
    await put_job(Queue(wire))
    for attempt in range(1, wire.settings.max_attempts + 3):
        leaving = await a_lease(wire)
        claim = await claim_one(leaving)
        assert claim.attempt == attempt and await leaving.leave() == 1
        await leaving.release(claim.job.id, claim.run_number)
        assert await leaving.leave() == 0


async def test_an_idempotency_key_leads_to_one_job(wire: RedisClient) -> None:
    """Equal keys join the first job; another body under the same key is refused; other tenants are others."""
    queue = Queue(wire)
    first, again = a_job(queue), a_job(queue)
    assert not (await queue.put(first, idempotency_key="k", digest="d")).joined
    joined = await queue.put(again, idempotency_key="k", digest="d")
    assert joined.joined and joined.id == first.id
    with pytest.raises(KeyReused):
        await queue.put(a_job(queue), idempotency_key="k", digest="other")
    assert not (await queue.put(a_job(queue, tenant="u"), idempotency_key="k", digest="d")).joined


async def test_a_full_lane_refuses_and_keeps_what_it_has(opened: Callable[..., RedisClient], redis_url: str) -> None:
    """The bound is on waiting jobs of one lane; running ones and other lanes do not count."""
    wire = opened(redis_url, lane_limit=2)
    queue = Queue(wire)
    await put_job(queue)
    await claim_one(await a_lease(wire))
    for _ in range(2):
        await put_job(queue)
    with pytest.raises(LaneFull):
        await queue.put(a_job(queue))
    await queue.put(a_job(queue, Priority.BATCH))
    (lane,) = [lane for lane in await Backlog(wire).lanes(["m"]) if lane.priority is Priority.STANDARD]
    assert (lane.waiting, lane.running) == (2, 1)


async def test_a_lane_that_one_tenant_fills_takes_a_job_of_each_other_one(
    opened: Callable[..., RedisClient], redis_url: str
) -> None:
    """Up to a tenth beyond its limit; the error says how many are the tenant's own."""
    queue = Queue(opened(redis_url, lane_limit=20))
    await queue.put_parts([a_job(queue, tenant="flood") for _ in range(20)])
    for tenant, waiting, own in (("flood", 20, 20), ("light", 21, 1)):
        if own == 1:
            await queue.put(a_job(queue, tenant=tenant))
        with pytest.raises(LaneFull) as full:
            await queue.put(a_job(queue, tenant=tenant))
        assert (full.value.waiting, full.value.own) == (waiting, own)
    accepted = await queue.put_parts([a_job(queue, tenant=tenant) for tenant in ("b", "b", "c")])
    assert [isinstance(answer, LaneFull) for answer in accepted] == [False, True, True], "two more in all"


async def test_a_store_that_was_set_back_begins_a_new_epoch_once(wire: RedisClient) -> None:
    """Whoever saw a later tick says so; several who saw it make one epoch of it."""
    reader, job = JobReader(wire), await put_job(Queue(wire))
    first, second = Reaper(wire), Reaper(wire)
    for _ in range(3):
        await first.sweep()
        await second.sweep()
    assert (await reader.record(job.id)).epoch == 1
    await wire.redis.set(partition_key(0, "tick"), 2)
    for reaper in (first, second, first, second):
        await reaper.sweep()
    assert (await reader.record(job.id)).epoch == 2


async def test_frames_behind_lost_ones_are_refused_until_the_loss_is_made_good(wire: RedisClient) -> None:
    """A log with a hole in it is never written on as if nothing had been."""
    await put_job(Queue(wire))
    lease = await a_lease(wire)
    claim = await claim_one(lease)
    lost = append(lease, {"-": [delta(claim, 1)]}, claim)
    assert lost[0] == "append"  # and never arrives
    with pytest.raises(Rewound):
        await lease.calls([append(lease, {"-": [delta(claim, 2)]})])
    rows = [delta(claim, 1), delta(claim, 2)]
    await lease.calls([append(lease, {"-": rows}, claim, forced=True)])
    record = await JobReader(wire).record(claim.job.id)
    assert await deltas_of(JobReader(wire), record) == rows


@pytest.mark.parametrize("way", ["hands it back", "dies of it", "cannot read it"])
async def test_whoever_is_done_with_a_suspect_leaves_the_rest_to_another(wire: RedisClient, way: str) -> None:
    """The next worker runs them alone, too; whoever dies of one leaves none but the second."""
    await suspects(wire, 2 if way == "dies of it" else 1)
    runner, heir = await a_lease(wire), await a_lease(wire)
    assert (await runner.claim(0, 1)).suspects
    suspect = await claim_one(runner, alone=True)
    assert not (await heir.claim(0, 1)).suspects
    match way:
        case "hands it back":
            await runner.release(suspect.job.id, suspect.run_number)
            assert await runner.leave() == 0
        case "dies of it":
            await lapse(wire, runner)
        case _:
            await runner.decline([UnreadableClaim(suspect.job.id, suspect.run_number, "", newer=True)])
    assert await heir.claim(0, 1) == Claimed([], suspects=True)
    assert len((await heir.claim(0, 1, alone=True)).jobs) == 1


async def suspects(wire: RedisClient, count: int) -> None:
    """So many jobs that have lost all but their last worker."""
    for _ in range(count):
        await put_job(Queue(wire))
    for _ in range(wire.settings.max_attempts - 1):
        lease = await a_lease(wire)
        assert len((await lease.claim(0, count)).jobs) == count
        await lapse(wire, lease)


async def test_resets_that_know_the_same_epoch_begin_one_new_epoch(wire: RedisClient) -> None:
    """Two readers that miss the same deltas ask for a reset with the same number: the job's epoch rises once."""
    queue, reader = Queue(wire), JobReader(wire)
    job = await put_job(queue)
    before = (await reader.record(job.id)).epoch
    assert [await queue.reset(job.id, 0) for _ in range(3)] == [1, 1, 1]
    assert (await reader.record(job.id)).epoch == before + 1
    assert [await queue.reset(job.id, known) for known in (1, 1)] == [2, 2]


async def test_a_job_expires_at_the_earlier_of_its_two_times(wire: RedisClient) -> None:
    """`deadline_ms` and `max_queue_ms` both bound the wait: the sweep ends the job when the first of them is over."""
    queue, reaper = Queue(wire), Reaper(wire)
    jobs = [a_job(queue, deadline_ms=1, max_queue_ms=600_000), a_job(queue, deadline_ms=600_000, max_queue_ms=1)]
    for job in jobs:
        await queue.put(job)

    async def all_expired() -> bool:
        await reaper.sweep()
        return all([(await JobReader(wire).record(job.id)).state is JobState.EXPIRED for job in jobs])

    await until(all_expired)
    assert [await limit_passed(wire, job.id) for job in jobs] == ["queue.deadline_ms", "queue.max_queue_ms"]
    assert (await (await a_lease(wire)).claim(0, 5)).jobs == []


async def limit_passed(wire: RedisClient, job_id: str) -> str | None:
    """The limit that the error of an expired job names."""
    record = await JobReader(wire).record(job_id)
    assert record.terminal is not None and record.terminal.failure is not None
    assert (record.terminal.failure.param or "") in record.terminal.failure.message
    return record.terminal.failure.param


async def test_a_heartbeat_renews_the_right_to_run_suspects(wire: RedisClient) -> None:
    """A suspect may run for longer than the key of its runner lives: no other worker is told to take suspects."""
    await suspects(wire, 2)
    runner, other = await a_lease(wire), await a_lease(wire)
    assert (await runner.claim(0, 1)).suspects
    assert len((await runner.claim(0, 1, alone=True)).jobs) == 1
    alone = partition_key(0, "alone", "m")
    await wire.redis.pexpire(alone, 2 * wire.settings.lease_ms)  # its three leases are nearly over
    before = await wire.redis.pexpiretime(alone)
    await runner.beat(0)
    assert await wire.redis.pexpiretime(alone) > before
    assert not (await other.claim(0, 1)).suspects
