"""Any field of a job's record that cannot be read, at every moment of its life: only its own job may fail, and nothing
of it stays behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from flow import a_job, a_lease, append, delta, put_job, until
from house import redis_process
from redis import Redis
from redis.exceptions import ResponseError

from streaming.errors import Unavailable
from streaming.jobs.codec import Run, Section, Terminal
from streaming.jobs.dead_letters import DeadLetters
from streaming.jobs.job import JobState
from streaming.jobs.lease import Claim, Claimed, Finish, Lease, UnreadableClaim
from streaming.jobs.queue import Queue
from streaming.jobs.reaper import Reaper
from streaming.jobs.records import malformed_keep_s
from streaming.keys import partition_key, prefix
from streaming.redis.client import REFUSALS, RedisClient
from streaming.redis.scripts import load_library
from streaming.store.identity import reset_store

pytestmark = pytest.mark.slow

NO_HASH = "(no hash)"
"""In place of a field: the key holds something else."""
FIELDS = (
    *("state", "body", "tenant", "reply", "created", "lane", "entry", "keep", "owed", "events", "metadata", "idem"),
    *("deadline", "queue_deadline", "pinned", "worker", "attempt", "run", "claimed", "started", "runs", "alone"),
    *("cancel", "losses", "epoch", "abandoned", "delivered", "size", "queue", NO_HASH),
)
"""Of a job's hash before its end."""
NOISE = {"words": b"zz;9,x", "bytes": b"\xff\xc1\x00;:,", "digits": b"9" * 30, "infinity": b"1e400", "empty": b""}
FINAL = {state for state in JobState if state.final}


def by_id(claimed: Claimed) -> dict[str, Claim | UnreadableClaim]:
    return {each.id if isinstance(each, UnreadableClaim) else each.job.id: each for each in claimed.jobs}


class Desk:
    """Jobs of which one field each is spoiled, and three that are whole; all with one worker."""

    def __init__(self, wire: RedisClient) -> None:
        self.wire, self.queue, self.lease = wire, Queue(wire), Lease(wire, "m")
        self.reaper = Reaper(wire)
        self.whole: list[str] = []
        self.spoiled: dict[str, str] = {}
        self.claims: dict[str, Claim | UnreadableClaim] = {}

    async def put(self, **settings: Any) -> None:
        """The whole ones stand before, between and behind the others."""
        await self.lease.register()
        fields = ("", *FIELDS[:12], "", *FIELDS[12:], "")
        jobs = [a_job(self.queue, events="bw", **settings) for _ in fields]
        await asyncio.gather(*(self.queue.put(job, idempotency_key=job.id, digest="d") for job in jobs))
        self.whole = [job.id for field, job in zip(fields, jobs, strict=True) if not field]
        self.spoiled = {field: job.id for field, job in zip(fields, jobs, strict=True) if field}

    async def claim(self) -> None:
        await self._claimed(self.lease)

    async def _claimed(self, lease: Lease) -> None:
        claimed = await lease.claim(0, 50)
        self.claims |= by_id(claimed)
        while claimed.suspects:
            claimed = await lease.claim(0, 1, alone=True)
            self.claims |= by_id(claimed)
            if not claimed.jobs:
                break
            await self.finish(lease)

    async def spoil(self, noise: str, fields: Iterable[str] = FIELDS) -> None:
        pipeline: Any = self.wire.redis.pipeline(transaction=False)
        for field in fields:
            key = self.key(self.spoiled[field])
            if field == NO_HASH:
                pipeline.delete(key)
                pipeline.lpush(key, NOISE[noise])
            else:
                pipeline.hset(key, field, NOISE[noise])
        await pipeline.execute()

    async def finish(self, lease: Lease) -> None:
        """Every job that this worker knows, and then what only the server counts as its own, as a worker does it."""
        claims, self.claims = self.claims, {}
        calls = []
        for job_id, claim in claims.items():
            sections = (Section(1, Run(lease.id, claim.run_number)),)
            end = Terminal(
                job_id, JobState.COMPLETED, 1, ("stop",), rows=(delta(claim.run_number, 1),), sections=sections
            )
            calls.append(lease.finish_call(Finish(end, claim.run_number, True)))
        await asyncio.gather(*(lease.calls([call]) for call in calls))
        await self.hand_back_strays(lease)

    async def hand_back_strays(self, lease: Lease) -> None:
        for job_id, held in (await lease.beat(0)).items():
            await lease.release(job_id, held.run_number)

    async def drain(self) -> None:
        """The worker hands all jobs back, and leaves."""
        for job_id, claim in self.claims.items():
            await self.lease.release(job_id, claim.run_number)
        self.claims = {}
        await self.hand_back_strays(self.lease)
        assert await self.lease.leave() == 0
        for job_id in self.whole:
            assert await self.wire.redis.hget(self.key(job_id), "losses") is None  # type: ignore[misc]

    async def lapse(self, losses: int = 0) -> None:
        """The worker is lost, for the last time if it has `losses` already; its lease lapses."""
        hashes = [job_id for field, job_id in self.spoiled.items() if field != NO_HASH]
        for job_id in [*self.whole, *hashes] if losses else []:
            if not await self.wire.redis.hget(self.key(job_id), "losses"):  # type: ignore[misc]
                await self.wire.redis.hset(self.key(job_id), "losses", losses)  # type: ignore[misc]
        await self.wire.redis.zadd(partition_key(0, "leases"), {self.lease.id: 1})
        await self.reaper.sweep()
        assert await self.wire.redis.zscore(partition_key(0, "leases"), self.lease.id) is None
        self.claims = {}

    async def all_end(self) -> None:
        """Other workers do what is left. Then no job is unfinished and nothing is held for any."""
        for _ in range(3):
            heir = await a_lease(self.wire)
            await self._claimed(heir)
            await self.finish(heir)
            await heir.leave()
        with suppress(Exception):
            await self.lease.leave()
        await self.reaper.sweep()
        redis: Any = self.wire.redis
        pipeline = redis.pipeline(transaction=False)
        names = [*self.spoiled.items(), *(("whole", each) for each in self.whole)]
        for _, job_id in names:
            pipeline.hget(self.key(job_id), "state")
            pipeline.ttl(self.key(job_id))
        found = await pipeline.execute()
        for (name, _), state, ttl in zip(names, found[::2], found[1::2], strict=True):
            assert (state or b"").decode(errors="replace") in FINAL, f"the job of which {name} was spoiled is {state!r}"
            assert 0 < ttl <= (3600 if name == "keep" else self.wire.settings.retention_s), f"{name} was spoiled"
        for kind in ("lane", "retry", "suspects", "timers", "claims"):
            async for key in redis.scan_iter(match=f"{prefix(0)}{kind}*"):
                sizes = {b"set": redis.scard, b"zset": redis.zcard, b"stream": redis.xlen}
                assert await sizes[await redis.type(key)](key) == 0, key
        assert sum(int(each) for each in await redis.hvals(partition_key(0, "owed"))) == 0

    async def cancel(self) -> None:
        """Every job."""
        await asyncio.gather(*map(self.queue.cancel, (*self.whole, *self.spoiled.values())))

    async def states(self, job_ids: Iterable[str]) -> set[str]:
        redis: Any = self.wire.redis
        return {(await redis.hget(self.key(job_id), "state")).decode() for job_id in job_ids}

    @staticmethod
    def key(job_id: str) -> str:
        return partition_key(0, "job", job_id)


@pytest.fixture
def desk(wire: RedisClient) -> Desk:
    return Desk(wire)


each_noise = pytest.mark.parametrize("noise", NOISE)


@each_noise
@pytest.mark.parametrize("cancelled", [False, True])
async def test_jobs_end_beside_one_that_cannot_be_read(desk: Desk, noise: str, cancelled: bool) -> None:
    """Their worker finishes them all; what the server alone counts as its own it hands back. An API process that
    cancels them hears no error."""
    await desk.put()
    await desk.claim()
    await desk.spoil(noise)
    if cancelled:
        await desk.cancel()
        held = await desk.lease.beat(0)
        assert all(held[job_id].cancelled for job_id in desk.whole)
    await desk.finish(desk.lease)
    assert await desk.states(desk.whole) == {"completed"}
    await desk.all_end()


@each_noise
@pytest.mark.parametrize("cancelled", [False, True])
@pytest.mark.parametrize("losses", [0, 1, 2, None])
async def test_a_sweep_takes_all_jobs_of_a_lost_worker(
    desk: Desk, noise: str, losses: int | None, cancelled: bool
) -> None:
    """Put back, put aside as suspects, given up or cancelled: whatever is to become of the others becomes of them. So
    it does where the worker drains (None): it loses none of them, and can leave."""
    await desk.put(deadline_ms=600_000)
    await desk.claim()
    if cancelled:
        await desk.cancel()
    await desk.spoil(noise)
    if losses is None:
        await desk.drain()
    else:
        await desk.lapse(losses)
    now = "cancelled" if cancelled else "failed" if losses == 2 else "queued"
    assert await desk.states(desk.whole) == {now}
    await desk.all_end()


@each_noise
async def test_a_claim_and_a_sweep_go_on_behind_a_waiting_job(desk: Desk, noise: str) -> None:
    """Jobs whose record is spoiled while they wait: what is over expires, the others run."""
    await desk.put(max_queue_ms=1)
    await until(lambda: _passed(desk.wire))
    await desk.spoil(noise)
    for job_id in desk.whole[:2]:
        await desk.wire.redis.hdel(desk.key(job_id), "queue_deadline")  # type: ignore[misc]
    await desk.claim()
    assert set(desk.whole[:2]) <= desk.claims.keys() and desk.whole[2] not in desk.claims
    await desk.finish(desk.lease)
    assert await desk.states(desk.whole[:2]) == {"completed"} and await desk.states(desk.whole[2:]) == {"expired"}
    await desk.all_end()


@each_noise
async def test_a_claim_leaves_no_waiting_job_behind(desk: Desk, noise: str) -> None:
    """It gives a job to the worker, or fails it: none is dropped from its lane and waits for ever."""
    await desk.put()
    await desk.spoil(noise)
    await desk.claim()
    assert "queued" not in await desk.states([*desk.whole, *desk.spoiled.values()])
    for claim in desk.claims.values():
        assert isinstance(claim, UnreadableClaim) or claim.attempt == 1
    await desk.finish(desk.lease)
    assert await desk.states(desk.whole) == {"completed"}
    await desk.all_end()


@each_noise
async def test_a_sweep_expires_waiting_jobs(desk: Desk, noise: str) -> None:
    """No worker is there to claim any."""
    await desk.put(max_queue_ms=1)
    await until(lambda: _passed(desk.wire))
    await desk.spoil(noise)
    await desk.reaper.sweep()
    assert await desk.states(desk.whole) == {"expired"}
    assert await desk.states(desk.spoiled.values()) <= {"expired", "failed"}
    await desk.all_end()


@each_noise
async def test_waiting_jobs_are_cancelled(desk: Desk, noise: str) -> None:
    """And abandoned: no key but an idempotency key is deleted with them."""
    await desk.put(reply_to="somewhere")
    await desk.spoil(noise)
    await desk.wire.redis.set("another", b"x")
    await desk.wire.redis.hset(desk.key(desk.whole[2]), "idem", "another")  # type: ignore[misc]
    await desk.queue.cancel(desk.whole[0])
    for job_id in [*desk.whole[1:], *desk.spoiled.values()]:
        await desk.queue.abandon(job_id, "somewhere")
    assert await desk.states(desk.whole) == {"cancelled"} and await desk.wire.redis.exists("another")
    await desk.all_end()


@each_noise
async def test_every_other_call_of_a_worker_bears_it(desk: Desk, noise: str) -> None:
    """It begins jobs anew, writes checkpoints, and puts back what only a newer version can read."""
    await desk.put()
    await desk.claim()
    await desk.lapse()
    lease = desk.lease = await a_lease(desk.wire)
    await desk.claim()
    await desk.spoil(noise)
    await lease.calls([append(lease, {"-": [delta(each.run_number, 1) for each in desk.claims.values()]})])
    await lease.calls([lease.checkpoint_call(0, job_id, each.run_number, 1) for job_id, each in desk.claims.items()])
    for job_id, each in desk.claims.items():
        await lease.restart(job_id, each.run_number)
        await desk.queue.reset(job_id, 1)
    await lease.decline([UnreadableClaim(job_id, each.run_number, "") for job_id, each in desk.claims.items()])
    desk.claims = {}
    assert await desk.states(desk.whole) == {"queued"}
    await desk.hand_back_strays(lease)
    await desk.all_end()


async def test_what_failed_is_shown_to_people(desk: Desk) -> None:
    """As a dead letter that says which field; a job that can be ended and read without that field is none."""
    await desk.put()
    await desk.claim()
    await desk.spoil("words")
    await desk.finish(desk.lease)
    reasons = {letter.job: letter.reason for letter in await DeadLetters(desk.wire).recent(100)}
    needed = {"state", "lane", "entry", "worker", "run", "runs", "attempt"}
    needed |= {"created", "claimed", "started", "deadline", "keep", "epoch"}
    assert "WRONGTYPE" in reasons.pop(desk.spoiled[NO_HASH])
    for field in needed:
        assert reasons[desk.spoiled[field]].startswith("unreadable: ") and field in reasons[desk.spoiled[field]]
    assert reasons.keys() == {desk.spoiled[field] for field in needed}
    assert malformed_keep_s(NOISE["digits"]) == malformed_keep_s(NOISE["words"]) == 3600


@pytest.mark.parametrize("ends", [False, True])
async def test_a_refusal_in_the_middle_of_a_claim_loses_no_job(
    desk: Desk, opened: Callable[..., RedisClient], redis_url: str, ends: bool
) -> None:
    """The server refuses the worker a command that one of five jobs needs. Nothing fails for it, and what was read is
    handed back: by the worker, which lives on, or by the sweep after its end."""
    redis: Any = desk.wire.redis
    await redis.execute_command("ACL", "SETUSER", "narrow", "on", ">p", "~*", "&*", "+@all")
    narrow = opened(redis_url.replace("//", "//narrow:p@"), lease_ms=1000)
    desk.whole = [(await put_job(desk.queue, events="b" if number == 2 else "")).id for number in range(5)]
    lease = await a_lease(narrow)
    await redis.execute_command("ACL", "SETUSER", "narrow", "-xadd")
    with pytest.raises((ResponseError, Unavailable)):
        await lease.claim(0, 5)
    await redis.execute_command("ACL", "SETUSER", "narrow", "+xadd")
    if ends:
        desk.lease = lease
        await desk.lapse()
    else:
        await desk.hand_back_strays(lease)
    assert await desk.states(desk.whole) == {"queued"}
    await desk.all_end()
    assert await desk.states(desk.whole) == {"completed"}
    assert await DeadLetters(desk.wire).recent(10) == []


def test_scripts_and_processes_know_the_same_refusals() -> None:
    """What is a refusal to a process fails no job in a script."""
    source = load_library().sources["reap"]
    table = source[source.index("local refusals") :]
    assert all(f"{code} = true" in table[: table.index("}")] for code in REFUSALS)


async def _passed(wire: RedisClient) -> bool:
    """Whether all that waits has waited for too long."""
    latest = await wire.redis.zrange(partition_key(0, "timers"), -1, -1, withscores=True)
    return bool(latest) and await wire.now_ms() > latest[0][1]


# --- a full store -----------------------------------------------------------------------------------------------------


async def test_a_full_store_is_reset(opened: Callable[..., RedisClient], tmp_path: Path) -> None:
    """Nothing but deleting makes room in it; while that goes on no process may use it."""
    with redis_process(tmp_path, None, "--appendonly", "yes") as url, Redis.from_url(url) as redis:
        redis.set(partition_key(0, "job", "x"), b"y" * 5_000_000)
        redis.config_set("maxmemory", "4mb")
        with pytest.raises(ResponseError, match="maxmemory"):
            redis.set("more", b"x")
        assert await reset_store(opened(url)) == 2
        assert redis.keys("*") == []
