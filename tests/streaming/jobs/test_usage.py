"""Usage counts by library calls: each job once, whatever is sent twice, and never in the way of its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from datetime import UTC, date, datetime, timedelta

from flow import MODEL, a_job, a_lease, append, claim_one, delta, lapse
from msgspec.structs import replace

from streaming.jobs.codec import Opening, Terminal, Usage
from streaming.jobs.job import JobState
from streaming.jobs.lease import SILENT, Claim, Finish
from streaming.jobs.queue import Queue
from streaming.jobs.reader import JobReader
from streaming.jobs.reaper import Reaper
from streaming.jobs.usage import FIRST_DAY, UsageCounts, Used
from streaming.keys import partition_key
from streaming.redis.client import RedisClient

DONE = (JobState.COMPLETED, 0, ("stop",))


def days() -> list[date]:
    """Today and its neighbours: a test may begin just before midnight."""
    today = datetime.now(UTC).date()
    return [today + timedelta(each) for each in (-1, 0, 1)]


async def listed(counts: AsyncGenerator[Used, None]) -> list[Used]:
    return [each async for each in counts]


async def used(wire: RedisClient, tenant: str | None = "t") -> set[tuple[str | int, ...]]:
    """Key, model, requests, tokens of prompts, of answers, cached ones: each of one day."""
    return {(each[2:]) for each in await listed(UsageCounts(wire).read(days(), tenant))}


async def test_each_key_counts_for_itself_and_each_job_once(wire: RedisClient) -> None:
    """Names with any characters; ends that are sent twice, together and apart."""
    queue, lease, names = Queue(wire), await a_lease(wire), ["", "a", "a b", "7:a", "ü\n:", "a"]
    await asyncio.gather(*(queue.put(a_job(queue), caller=name) for name in names))
    claims = (await lease.claim(0, 9)).jobs
    ends = [
        lease.finish_call(Finish(Terminal(claim.job.id, *DONE, Usage(5, 7, 3)), claim.run_number, True, prompt=10))
        for claim in claims
        if isinstance(claim, Claim)
    ]
    await lease.calls(ends + ends)
    await lease.calls(ends)
    expected = {(name, MODEL, 1, 5, 7, 3) for name in names if name != "a"} | {("a", MODEL, 2, 10, 14, 6)}
    assert await used(wire) == expected == await used(wire, None)
    assert await used(wire, "other") == set()


async def test_a_script_that_ends_a_job_counts_it_and_its_tokens_come_once(wire: RedisClient) -> None:
    """Cancelled while it waits; lost with its worker and cancelled, its logged tokens stored twice."""
    queue, reader = Queue(wire), JobReader(wire)
    job = a_job(queue)
    await queue.put(job, caller="k")
    await queue.cancel(job.id)
    await queue.cancel(job.id)
    assert await used(wire) == {("k", MODEL, 1, 0, 0, 0)}
    await queue.put(a_job(queue), caller="k")
    lease = await a_lease(wire)
    claim = await claim_one(lease)
    first = replace(delta(claim, 1), prompt=(11, 4))
    rows = {SILENT: [first, delta(claim, 2)]}
    await lease.calls([append(lease, rows, (claim.run_number, Opening(claim.job.id)))])
    await queue.cancel(claim.job.id)
    await lapse(wire, lease)
    assert await used(wire) == {("k", MODEL, 2, 0, 0, 0)}
    await asyncio.gather(*(reader.records([claim.job.id]) for _ in range(3)))
    await Reaper(wire, salvager=reader).sweep()
    assert await used(wire) == {("k", MODEL, 2, 11, 2, 4)}


async def test_a_malformed_job_counts_and_a_damaged_count_keeps_no_job(wire: RedisClient) -> None:
    queue, lease = Queue(wire), await a_lease(wire)
    for number in range(3):
        job = a_job(queue)
        await queue.put(job, caller="k")
        if number:
            claim = await claim_one(lease)
            await wire.redis.hset(partition_key(0, "job", claim.job.id), "attempt", "x" if number == 1 else 1)
            end = Terminal(claim.job.id, *DONE, Usage(5, 7))
            await lease.calls([lease.finish_call(Finish(end, claim.run_number, True))])
        else:
            await queue.cancel(job.id)
    assert await used(wire) == {("k", MODEL, 3, 5, 7, 0)}
    for day in days():
        await wire.redis.delete(key := partition_key(0, "usage", str(day.toordinal() - FIRST_DAY), "t", f"{MODEL} k"))
        await wire.redis.lpush(key, "no counts")
    await queue.put(job := a_job(queue), caller="k")
    await queue.cancel(job.id)
    assert (await JobReader(wire).record(job.id)).state is JobState.CANCELLED


async def test_counts_end_a_hundred_days_after_the_day(wire: RedisClient) -> None:
    queue = Queue(wire)
    await queue.put(job := a_job(queue), caller="k")
    await queue.cancel(job.id)
    names = (b"usage", b"usage_names", b"usage_tenants")
    kinds = [key for key in await wire.redis.keys("*:us*") if key.split(b":")[2] in names]
    assert len(kinds) == 3
    for key in kinds:
        assert 99 * 86_400 < await wire.redis.ttl(key) <= 100 * 86_400


async def test_names_beyond_the_most_are_counted_together(wire: RedisClient) -> None:
    queue, lease = Queue(wire), await a_lease(wire)
    callers = [f"oidc:user {number}" for number in range(1_030)]
    for turn in (1, 2):
        await asyncio.gather(*[queue.put(a_job(queue), caller=name) for name in callers])
        while claims := (await lease.claim(0, 200)).jobs:
            held = [each for each in claims if isinstance(each, Claim)]
            ends = [Finish(Terminal(each.job.id, *DONE, Usage(3, 2)), each.run_number, True) for each in held]
            await lease.calls([lease.finish_call(end) for end in ends])
        rows = await listed(UsageCounts(wire).read(days(), "t"))
        sums = [
            sum(column) for column in zip(*[(row.requests, row.prompt, row.completion) for row in rows], strict=True)
        ]
        assert sums == [turn * 1_030, turn * 3_090, turn * 2_060]
        assert sum(row.requests for row in rows if row.key == "(others)") == 30 * turn
        assert len({row.key for row in rows}) == 1_001
