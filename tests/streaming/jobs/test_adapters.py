"""Adapters in the order of the queue: what a worker has loaded goes first, within a tenant's turn and for a while."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from flow import MODEL, a_lease

from penstock.engine import Sampling
from streaming.ids import new_job_id
from streaming.jobs.job import JOB_VERSION, Job, Text
from streaming.jobs.lease import Claim, Lease
from streaming.jobs.queue import Queue
from streaming.jobs.reader import JobFilter, Summaries
from streaming.keys import partition_key
from streaming.order import Priority
from streaming.redis.client import RedisClient

pytestmark = pytest.mark.slow

AHEAD, PASSES = 8, 8


def job_of(adapter: str, tenant: str = "t", **settings: Any) -> Job:
    settings = {"priority": Priority.STANDARD, "sampling": Sampling(max_tokens=10)} | settings
    job_id = new_job_id(0)
    return Job(id=job_id, model=MODEL, tenant=tenant, prompt=Text(("",)), adapter=adapter, v=JOB_VERSION, **settings)


async def claimed(lease: Lease, want: int, loaded: Sequence[str] | None) -> list[Job]:
    found = (await lease.claim(0, want, adapters=loaded)).jobs
    return [claim.job for claim in found if isinstance(claim, Claim)]


async def order_of(wire: RedisClient, jobs: Sequence[Job], loaded: Sequence[str] | None, want: int = 1) -> str:
    """The adapters of jobs that are put, then claimed `want` at a time."""
    await Queue(wire).put_parts(jobs)
    lease, found = await a_lease(wire), list[Job]()
    while more := await claimed(lease, want, loaded):
        found += more
    assert {job.id for job in found} == {job.id for job in jobs}, "each job is claimed, once"
    return "".join([job.adapter or "-" for job in found])


async def test_what_is_loaded_goes_first(wire: RedisClient) -> None:
    """Also the model without an adapter, which needs no load; among equals the order is that of the arrival."""
    assert await order_of(wire, [job_of(each) for each in ("x", "y", "a", "", "a")], ["a"]) == "a-axy"


async def test_a_part_of_a_loaded_name_is_not_loaded(wire: RedisClient) -> None:
    """Names may have the characters of a pattern, too."""
    jobs = [job_of(each) for each in ("law", "a.c", "sql-2")]
    assert await order_of(wire, jobs, ["claw", "law-2", "abc", "sql-2"]) == "sql-2lawa.c"


async def test_shares_of_tenants_stay(wire: RedisClient) -> None:
    """A tenant that crowds a worker gets no more places because its adapters are loaded."""
    await Queue(wire).put_parts([job_of(each, "many") for each in "aaa"])
    lease = await a_lease(wire)
    found = (await lease.claim(0, 3, shared=1, crowding=["many"], adapters=["a"])).jobs
    assert len(found) == 1


async def test_a_worker_without_adapters_keeps_the_order(wire: RedisClient) -> None:
    assert await order_of(wire, [job_of(each) for each in "xyaa"], None) == "xyaa"


async def test_a_claim_of_many_counts_what_it_has_chosen_as_loaded(wire: RedisClient) -> None:
    """The job behind it needs no further load."""
    assert await order_of(wire, [job_of(each) for each in "xyxyx"], [], want=5) == "xxxyy"


async def test_a_job_is_passed_over_a_few_times_only(wire: RedisClient) -> None:
    """Then the first one begins, whatever is loaded, and the next one is the first."""
    found = await order_of(wire, [job_of(each) for each in "xy" + 40 * "a"], ["a"])
    assert found == PASSES * "a" + "x" + PASSES * "a" + "y" + (40 - 2 * PASSES) * "a"


async def test_only_the_next_jobs_are_looked_at(wire: RedisClient) -> None:
    far = "x" + AHEAD * "y" + "a"
    assert await order_of(wire, [job_of(each) for each in far], ["a"]) == "xa" + AHEAD * "y"


async def test_turns_of_tenants_and_lanes_stay(wire: RedisClient) -> None:
    """A tenant whose turn it is gets its job, although the other one's adapter is loaded; so does a higher lane."""
    jobs = [job_of("a", "many") for _ in range(4)] + [job_of("x", "few") for _ in range(4)]
    urgent = job_of("y", priority=Priority.INTERACTIVE)
    await Queue(wire).put_parts([*jobs, urgent])
    lease = await a_lease(wire)
    first = await claimed(lease, 1, ["a"])
    assert [job.id for job in first] == [urgent.id]
    turns = [job.tenant for _ in range(8) for job in await claimed(lease, 1, ["a"])]
    assert turns == ["few", "many"] * 4


@pytest.mark.parametrize("limit", [{"deadline_ms": 60_000}, {"max_queue_ms": 60_000}])
async def test_a_job_with_a_limit_is_not_passed_over(wire: RedisClient, limit: dict[str, int]) -> None:
    assert await order_of(wire, [job_of("x", **limit), job_of("a"), job_of("a")], ["a"]) == "xaa"


@pytest.mark.parametrize(("field", "value"), [("state", "odd"), ("queue_deadline", "1"), ("deadline", "odd")])
async def test_a_record_that_cannot_be_claimed_stops_nobody(wire: RedisClient, field: str, value: str) -> None:
    """One that would go first, but is malformed or has expired: the others are claimed, in their order."""
    jobs = [job_of("x"), job_of("a"), job_of("a"), job_of("x")]
    await Queue(wire).put_parts(jobs)
    await wire.redis.hset(partition_key(0, "job", jobs[1].id), field, value)
    lease = await a_lease(wire)
    found = [job.id for _ in range(4) for job in await claimed(lease, 1, ["a"])]
    assert found == [jobs[2].id, jobs[0].id, jobs[3].id]


async def test_a_key_that_is_no_hash_stops_nobody(wire: RedisClient) -> None:
    jobs = [job_of("x"), job_of("a"), job_of("a")]
    await Queue(wire).put_parts(jobs)
    key = partition_key(0, "job", jobs[1].id)
    await wire.redis.delete(key)
    await wire.redis.set(key, "odd")
    lease = await a_lease(wire)
    assert [job.id for _ in range(3) for job in await claimed(lease, 1, ["a"])] == [jobs[2].id, jobs[0].id]


async def test_lists_name_the_adapter(wire: RedisClient) -> None:
    """A filter for a model has its adapters, too; one for an adapter has it alone."""
    jobs = [job_of(each) for each in ("", "a", "x")]
    for job in jobs:
        await Queue(wire).put(job)

    async def listed(model: str) -> set[str]:
        page = await Summaries(wire).recent(["t"], None, 10, JobFilter(model=model))
        return {record.job.full_model for record in page.jobs}

    every = {MODEL, f"{MODEL}:a", f"{MODEL}:x"}
    assert (await listed(""), await listed(MODEL), await listed(f"{MODEL}:a")) == (every, every, {f"{MODEL}:a"})
    assert await listed(f"{MODEL}:none") == set()
