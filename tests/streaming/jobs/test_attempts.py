"""What is kept of a job's attempts, and the tokens of a job that no worker has ended."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from flow import a_lease, append, claim_one, lapse, put_job
from msgspec.structs import replace

from penstock.engine import Sampling
from streaming.jobs.codec import Delta, Opening, Run, Section, Terminal, Usage
from streaming.jobs.dead_letters import DeadLetters
from streaming.jobs.history import History
from streaming.jobs.job import CancelledBy, Job, JobState, PastAttempt
from streaming.jobs.lease import Claim, Finish, Lease
from streaming.jobs.queue import Queue
from streaming.jobs.reader import JobReader, Summaries
from streaming.jobs.reaper import Reaper
from streaming.jobs.records import MAX_ATTEMPTS, JobRecord
from streaming.keys import partition_key
from streaming.redis.client import RedisClient

pytestmark = pytest.mark.slow

AT_MS = 1_700_000_000_000


async def claimed(wire: RedisClient, name: str, *, alone: bool = False) -> tuple[Lease, Claim]:
    """A new worker of this name, with the one job that waits."""
    lease = await a_lease(wire, name)
    return lease, await claim_one(lease, alone=alone)


def row(claim: Claim, seq: int, index: int = 0, prompt: tuple[int, int] | None = None, finish: str = "") -> Delta:
    return Delta(claim.run_number, seq, f"<{seq}>", (seq,), index, 1, finish, prompt=prompt)


async def wrote(lease: Lease, claim: Claim, rows: Sequence[Delta], parent: Run | None = None, at_ms: int = 0) -> None:
    opening = Opening(claim.job.id, rows[0].seq, parent, at_ms=at_ms)
    await lease.calls([append(lease, {"-": rows}, (claim.run_number, opening), oldest=claim.first_frame)])


async def given_up(wire: RedisClient, job: Job, rows: Sequence[Sequence[tuple[int, tuple[int, int] | None]]]) -> None:
    """Let a worker die for each of `rows`: of each row the index of its choice, and the size of that one's prompt."""
    parent, seq = None, 0
    for number, part in enumerate(rows, 1):
        lease, claim = await claimed(wire, f"worker-{number}", alone=number == wire.settings.max_attempts)
        deltas = [row(claim, seq + place, index, prompt) for place, (index, prompt) in enumerate(part, 1)]
        if deltas:
            await wrote(lease, claim, deltas, parent, AT_MS + number)
            parent, seq = Run(lease.id, claim.run_number), seq + len(deltas)
        await lapse(wire, lease)


async def salvaged_by(reaper: Reaper) -> None:
    """As each process that sweeps does, one beside the other."""
    await reaper.sweep()
    await reaper.salvage()


async def stored(wire: RedisClient, job: Job) -> bool:
    return bool(await wire.redis.hexists(partition_key(0, "job", job.id), "record"))


async def test_a_job_that_is_given_up_keeps_its_tokens_its_usage_and_its_attempts(wire: RedisClient) -> None:
    """A sweep stores what its three workers have logged; the logs are then no longer kept, and the record says all."""
    reader, job = JobReader(wire), await put_job(Queue(wire))
    await given_up(wire, job, [[(0, (7, 2)), (0, None)], [], [(0, None)]])
    logs = [log async for log in wire.redis.scan_iter("*:log:*")]
    assert len(logs) == 2 and all([await wire.redis.ttl(log) > 3600 for log in logs])
    assert not await stored(wire, job)
    await salvaged_by(Reaper(wire, salvager=reader))
    assert await stored(wire, job) and not await wire.redis.exists(partition_key(0, "cut"))
    assert all([0 < await wire.redis.ttl(log) <= 60 for log in logs])
    record = await reader.record(job.id)
    end = record.terminal
    assert end is not None and end.failure is not None and end.failure.code == "poison"
    assert (record.state, end.seq, end.usage, end.first_ms) == (JobState.FAILED, 3, Usage(7, 3, 2), AT_MS + 1)
    assert [each.text for each in end.rows] == ["<1>", "<2>", "<3>"]
    assert end.sections == tuple(Section(first, run.run) for first, run in zip((1, 3, 3), record.runs, strict=True))
    assert [(each.worker, each.outcome, each.tokens) for each in record.attempts] == [
        ("worker-1", "lost", 2),
        ("worker-2", "lost", 0),
        ("worker-3", "lost", 1),
    ]
    assert all(0 < each.started_ms <= each.ended_ms <= record.done_ms for each in record.attempts)
    assert await wire.redis.ttl(partition_key(0, "job", job.id)) > 0


async def test_the_first_reader_stores_the_tokens_if_no_sweep_has(wire: RedisClient) -> None:
    """Whoever gave the job up may have died, or may not read tokens; every way to read it shows the same end."""
    reader, job = JobReader(wire), await put_job(Queue(wire), sampling=Sampling(n=2))
    await given_up(wire, job, [[(0, (7, 2)), (1, (7, 0))], [(0, None)], []])
    (outline,) = await reader.records([job.id], bodies=False, resultless=[job.id])
    assert outline is not None and outline.terminal is not None and await stored(wire, job)
    whole = await reader.record(job.id)
    assert whole.terminal == replace(outline.terminal, rows=whole.terminal.rows if whole.terminal else ())
    assert whole.terminal is not None and whole.terminal.usage == Usage(7, 3, 2), "copies of one prompt count once"
    assert len(whole.terminal.rows) == 3


@pytest.mark.parametrize("place", ["waits", "runs", "lost", "handed back"])
async def test_the_record_says_who_cancelled_a_job_first(wire: RedisClient, place: str) -> None:
    """Whoever ends it: the cancel itself, its worker, the sweep after its worker was lost, or a worker that drains."""
    queue, reader = Queue(wire), JobReader(wire)
    job = await put_job(queue)
    if place != "waits":
        lease, claim = await claimed(wire, "worker-1")
    await queue.cancel(job.id, CancelledBy.ADMIN)
    await queue.cancel(job.id, CancelledBy.OWNER)
    if place == "runs":
        (held,) = (await lease.beat(0)).values()
        assert held.cancelled_by == "admin"
        end = Terminal(job.id, JobState.CANCELLED, 0, worker=lease.id, cancelled_by=held.cancelled_by)
        await lease.calls([lease.finish_call(Finish(end, claim.run_number, True))])
    elif place == "lost":
        await lapse(wire, lease)
    elif place == "handed back":
        await lease.release(job.id, claim.run_number)
    for record in (await reader.record(job.id), (await Summaries(wire).recent(["t"], None, 1)).jobs[0]):
        assert record.state is JobState.CANCELLED and record.terminal is not None
        assert record.terminal.cancelled_by == "admin"


async def test_the_stored_tokens_count_against_the_tenants_quota(wire: RedisClient) -> None:
    reader, job = JobReader(wire), await put_job(Queue(wire))
    await given_up(wire, job, [[(0, (7, 2))], [], []])

    async def result_bytes() -> int:
        kept = await wire.redis.hgetall(partition_key(0, "kept", "t"))
        return sum(int(size) for name, size in kept.items() if name.startswith(b"r"))

    assert await result_bytes() == 0
    for _ in range(2):
        await reader.record(job.id)
    fields = await wire.redis.hmget(partition_key(0, "job", job.id), "record", "rows")
    assert await result_bytes() == sum(map(len, fields))


async def test_tokens_behind_a_hole_in_the_log_are_not_kept(wire: RedisClient) -> None:
    """The store has lost the second of four: what comes before it is the job's answer."""
    runs = (Run("a", 1), Run("b", 1), Run("c", 1))
    rows = [Delta(1, seq, str(seq), (seq,), 0, 1) for seq in (1, 3, 4)]
    history = History(rows, (Section(1, runs[0]), Section(3, runs[1]), Section(5, runs[2])), AT_MS)
    assert history.intact == History(rows[:1], (Section(1, runs[0]), Section(2, runs[1]), Section(2, runs[2])), AT_MS)
    assert history.intact.tokens == (1, 0, 0)
    assert History(rows[1:], history.sections, AT_MS).intact.first_ms == 0


async def test_a_job_that_the_store_has_lost_is_looked_at_once(wire: RedisClient) -> None:
    """An id without a record does not stay behind in the set of jobs whose tokens are to be stored."""
    reader, job = JobReader(wire), await put_job(Queue(wire))
    await given_up(wire, job, [[(0, None)], [], []])
    assert await wire.redis.zrange(partition_key(0, "cut"), 0, -1) == [job.id.encode()]
    await wire.redis.delete(partition_key(0, "job", job.id))
    await salvaged_by(Reaper(wire, salvager=reader))
    assert not await wire.redis.exists(partition_key(0, "cut"))


async def test_the_log_holds_the_newest_twenty_attempts(wire: RedisClient) -> None:
    """Of a job that is handed back again and again; while it runs its last attempt has no end."""
    reader, job = JobReader(wire), await put_job(Queue(wire))
    for number in range(1, MAX_ATTEMPTS + 5):
        lease, claim = await claimed(wire, f"worker-{number}")
        await lease.release(job.id, claim.run_number)
    waiting = await reader.record(job.id)
    assert waiting.attempt == MAX_ATTEMPTS + 4 and len(waiting.attempts) == MAX_ATTEMPTS
    assert [each.worker for each in waiting.attempts] == [f"worker-{5 + place}" for place in range(MAX_ATTEMPTS)]
    assert {each.outcome for each in waiting.attempts} == {"handed_back"}
    kept = await wire.redis.hget(partition_key(0, "job", job.id), "past")
    assert kept.count(b";") == MAX_ATTEMPTS, "of the others nothing is stored"
    lease, claim = await claimed(wire, "last;one:\N{BULLET}")
    running = (await reader.record(job.id)).attempts[-1]
    assert running == PastAttempt("last_one__", claim.claimed_ms)
    end = Terminal(job.id, JobState.COMPLETED, 0, ("stop",), Usage(3, 4, 0), sections=(Section(1, Run(lease.id, 1)),))
    await lease.calls([lease.finish_call(Finish(end, claim.run_number, True))])
    record = await reader.record(job.id)
    assert record.attempts[-1] == replace(running, ended_ms=record.done_ms, tokens=4, outcome="completed")
    assert len(record.attempts) == MAX_ATTEMPTS


async def test_a_record_of_an_earlier_version_shows_what_it_has(wire: RedisClient) -> None:
    """Without names and ends of its attempts: the last attempt, under its lease; and a spoiled field spoils no job."""
    reader, job = JobReader(wire), await put_job(Queue(wire))
    lost, _ = await claimed(wire, "worker-1")
    await lapse(wire, lost)
    lease, claim = await claimed(wire, "worker-2")
    key = partition_key(0, "job", job.id)
    await wire.redis.hdel(key, "name", "past")
    assert (await reader.record(job.id)).attempts == (PastAttempt(lease.id, claim.claimed_ms),)
    await wire.redis.hset(key, "past", b"\xff;worker-1:x;:::;")
    record: JobRecord = await reader.record(job.id)
    assert record.state is JobState.RUNNING and len(record.attempts) == 1
    await lapse(wire, lease)
    assert (await reader.record(job.id)).attempts[-1].outcome == "lost"


async def test_a_record_of_a_later_version_shows_what_this_one_knows(wire: RedisClient) -> None:
    """It may say more of an attempt, and know more outcomes; the attempt is shown all the same."""
    reader, job = JobReader(wire), await put_job(Queue(wire))
    lost, _ = await claimed(wire, "worker-1")
    await lapse(wire, lost)
    before = (await reader.record(job.id)).attempts
    key = partition_key(0, "job", job.id)
    past = (await wire.redis.hget(key, "past")).replace(b"lost;", b"evicted:host-7:0.5;")
    await wire.redis.hset(key, "past", past)
    assert (await reader.record(job.id)).attempts == (replace(before[0], outcome="evicted"),)


async def test_a_replay_keeps_the_attempts_at_the_job_that_was_given_up(wire: RedisClient) -> None:
    queue, reader, letters = Queue(wire), JobReader(wire), DeadLetters(wire)
    job = await put_job(queue)
    await given_up(wire, job, [[(0, None)], [], []])
    before = (await reader.record(job.id)).attempts
    (letter,) = await letters.recent(5)
    again = (await letters.replay(letter.id)).id
    assert (await reader.record(again)).attempts == before
    _, claim = await claimed(wire, "worker-9")
    record = await reader.record(again)
    assert record.attempts == (*before, PastAttempt("worker-9", claim.claimed_ms)) and record.attempt == 1


async def test_one_process_at_a_time_stores_a_jobs_tokens(wire: RedisClient) -> None:
    """And another one a lease later, if the first has not; one that may not read tokens is given none."""
    reader, job = JobReader(wire), await put_job(Queue(wire))
    await given_up(wire, job, [[(0, None)], [], []])
    key = partition_key(0, "cut")
    await Reaper(wire).sweep()
    (_, before) = (await wire.redis.zrange(key, 0, -1, withscores=True))[0]
    died, other = Reaper(wire, salvager=reader), Reaper(wire, salvager=reader)
    await died.sweep()
    (_, after) = (await wire.redis.zrange(key, 0, -1, withscores=True))[0]
    assert after >= before + wire.settings.lease_ms
    await salvaged_by(other)
    assert not await stored(wire, job)
    await wire.redis.zadd(key, {job.id: before})
    await salvaged_by(other)
    assert await stored(wire, job) and not await wire.redis.exists(key)
