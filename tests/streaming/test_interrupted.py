"""Scripts that the server stops between two of their writes: Redis takes none back, and the next calls go on.

Every write of a script is refused in turn: that one alone, as a right that a role lacks, or all from it on.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from flow import a_job, a_lease
from redis.exceptions import ResponseError

from streaming.errors import Fenced, Unavailable
from streaming.jobs.codec import Terminal
from streaming.jobs.dead_letters import DeadLetters
from streaming.jobs.job import Job, JobState
from streaming.jobs.lease import Claim, Finish, Lease, UnreadableClaim
from streaming.jobs.queue import Queue
from streaming.jobs.reader import JobReader
from streaming.jobs.reaper import Reaper
from streaming.keys import partition_key, prefix
from streaming.order import Priority
from streaming.redis.client import RedisClient
from streaming.redis.scripts import LIBRARIES, load_library
from streaming.redis.settings import RedisSettings

pytestmark = pytest.mark.slow

READS = (
    "EXISTS GET HEXISTS HGET HGETALL HKEYS HMGET HSTRLEN HVALS PUBLISH SCARD SISMEMBER SMEMBERS TIME TTL XLEN XRANGE "
    "ZCARD ZCOUNT ZMSCORE ZRANGE ZRANK ZSCORE"
)
REFUSING = """
local READS = {READ-COMMANDS}
local function refusing(name, ...)
  local left = not READS[name] and tonumber(redis.call('GET', 'writes-left') or nil)
  if left == 0 then
    if redis.call('GET', 'refused') == 'one' then redis.call('DEL', 'writes-left') end
    redis.call('INCR', 'refusals')
    error({err = 'NOPERM refused'}, 0)
  end
  if left then redis.call('DECR', 'writes-left') end
  return redis.call(name, ...)
end
""".replace("READ-COMMANDS", ", ".join(f"{name} = true" for name in READS.split()))
"""Stands for redis.call."""


class Desk:
    """A queue, a worker and its jobs on a store that refuses writes."""

    def __init__(self, wire: RedisClient, redis: Any) -> None:
        self.wire, self.redis, self.queue, self.reaper = wire, redis, Queue(wire), Reaper(wire)
        self.jobs: list[Job] = []
        self.lease = Lease(wire, "m")
        self.claims: list[Claim] = []

    async def put(self, count: int = 3, **changes: Any) -> None:
        self.jobs = [
            a_job(self.queue, Priority.STANDARD, tenant=f"t{n % 2}", events="b", deadline_ms=600_000, **changes)
            for n in range(count)
        ]
        await self.repeat_puts()

    async def put_later(self) -> None:
        await self.put(delay_ms=3_600_000)

    async def come_due(self) -> None:
        await self.redis.zadd(partition_key(0, "scheduled"), {job.id: 1 for job in self.jobs}, xx=True)
        await self.reaper.sweep()

    async def repeat_puts(self) -> None:
        for job in self.jobs:
            await self.queue.put(job, idempotency_key=job.id, digest="d")

    async def claim(self) -> None:
        await self.lease.register()
        claimed = await self.lease.claim(0, 10)
        if claimed.suspects:
            claimed = await self.lease.claim(0, 1, alone=True)
        self.claims = [claim for claim in claimed.jobs if isinstance(claim, Claim)]

    async def finish(self, lease: Lease) -> None:
        ends = [Finish(Terminal(claim.job.id, JobState.COMPLETED, 0), claim.run_number, True) for claim in self.claims]
        await lease.calls([lease.finish_call(end) for end in ends])

    async def release(self) -> None:
        for claim in self.claims:
            await self.lease.release(claim.job.id, claim.run_number)

    async def decline(self) -> None:
        await self.lease.decline([UnreadableClaim(claim.job.id, claim.run_number, "") for claim in self.claims])

    async def lapse(self) -> None:
        await self.redis.zadd(partition_key(0, "leases"), {self.lease.id: 1})
        await self.reaper.sweep()

    async def lost(self) -> None:
        """Once more than before its jobs are suspects."""
        await self.claim()
        for claim in self.claims:
            await self.redis.hset(partition_key(0, "job", claim.job.id), "losses", 1)

    async def cancel(self) -> None:
        for job in self.jobs:
            await self.queue.cancel(job.id)

    async def expire(self) -> None:
        for job in self.jobs:
            await self.redis.hset(partition_key(0, "job", job.id), "deadline", 1)
            await self.redis.zadd(partition_key(0, "timers"), {job.id: 1}, xx=True)
        await self.reaper.sweep()


class Case:
    """`before` is not refused anything; `call` is."""

    def __init__(self, *steps: Callable[[Desk], Awaitable[None]]) -> None:
        *self.before, self.call = steps


async def _finish(desk: Desk) -> None:
    await desk.finish(desk.lease)


CASES = {
    "put": Case(Desk.put),
    "put for later": Case(Desk.put_later),
    "start of jobs for later": Case(Desk.put_later, Desk.come_due),
    "cancel of jobs for later": Case(Desk.put_later, Desk.cancel),
    "claim": Case(Desk.put, Desk.claim),
    "claim of jobs that were put back": Case(Desk.put, Desk.claim, Desk.release, Desk.claim),
    "claim of suspects": Case(Desk.put, Desk.lost, Desk.lapse, Desk.claim),
    "finish": Case(Desk.put, Desk.claim, _finish),
    "release": Case(Desk.put, Desk.claim, Desk.release),
    "decline": Case(Desk.put, Desk.claim, Desk.decline),
    "lapse": Case(Desk.put, Desk.claim, Desk.lapse),
    "lapse before the last attempt": Case(Desk.put, Desk.lost, Desk.lapse),
    "cancel": Case(Desk.put, Desk.cancel),
    "cancel of jobs that were put back": Case(Desk.put, Desk.claim, Desk.release, Desk.cancel),
    "expiry": Case(Desk.put, Desk.expire),
}


@pytest.mark.parametrize("refused", ["one", "all"])
@pytest.mark.parametrize("name", CASES)
async def test_a_script_may_end_between_two_writes(redis_url: str, name: str, refused: str) -> None:
    """Every accepted job ends once its call was repeated, and nothing is held for any then."""
    library, failures = load_library(), list[str]()
    renamed = f"{LIBRARIES}refusing"
    text = library.text.replace("redis.call(", "refusing(").replace(library.name, renamed)
    head, rest = text.split("\n", 1)
    wire = RedisClient.open(RedisSettings(url=redis_url, timeout_s=30))
    wire._library = replace(library, name=renamed, text=f"{head}\n{REFUSING}{rest}")
    redis: Any = wire.redis
    case, writes = CASES[name], 0
    try:
        while True:
            await redis.flushall()
            desk = Desk(wire, redis)
            for step in case.before:
                await step(desk)
            await redis.mset({"writes-left": writes, "refused": refused})
            with suppress(Fenced, ResponseError, Unavailable):
                await case.call(desk)
            hit = await redis.get("refusals")
            await redis.delete("writes-left", "refused", "refusals")
            if not hit:
                break
            wrong = await _left(desk)
            if wrong:
                failures.append(f"write {writes}: {wrong}")
            writes += 1
    finally:
        await wire.close()
    assert writes > 3 and not failures, "\n".join(failures)


async def _left(desk: Desk) -> str:
    """What is wrong once clients, workers and sweeps have repeated what failed."""
    await desk.repeat_puts()
    with suppress(Fenced, Unavailable):
        for job_id, held in (await desk.lease.beat(0)).items():
            await desk.lease.release(job_id, held.run_number)
    await desk.redis.zadd(partition_key(0, "leases"), {desk.lease.id: 1})
    await desk.come_due()
    await desk.reaper.sweep()
    await desk.redis.delete(partition_key(0, "alone", "m"))
    for _ in range(8):
        desk.lease = await a_lease(desk.wire)
        await desk.claim()
        await desk.finish(desk.lease)
        if await desk.lease.leave():
            return "a worker holds a job that it ended"
        if not await desk.redis.xlen(partition_key(0, "lane", "m", "standard")):
            break
    await desk.reaper.sweep()
    found = []
    records = await JobReader(desk.wire).records([job.id for job in desk.jobs])
    found += [f"a job is {record and record.state}" for record in records if record is None or not record.state.final]
    if await desk.redis.xlen(partition_key(0, "lane", "m", "standard")):
        found.append("an entry stays")
    for kind in ("arrivals", "tenants", "retry", "suspects"):
        if await desk.redis.exists(partition_key(0, kind, "m", "standard")):
            found.append(f"{kind} stays")
    if await desk.redis.hgetall(partition_key(0, "owed")):
        found.append("bytes stay reserved")
    if [key async for key in desk.redis.scan_iter(f"{prefix(0)}scheduled*")]:
        found.append("a job waits for its time")
    if [key async for key in desk.redis.scan_iter(f"{prefix(0)}line:*")]:
        found.append("a line stays")
    if [key async for key in desk.redis.scan_iter(f"{prefix(0)}claims:*")]:
        found.append("a claim stays")
    if await DeadLetters(desk.wire).recent(10):
        found.append("a dead letter")
    return ", ".join(found)
