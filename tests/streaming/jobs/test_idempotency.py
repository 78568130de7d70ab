"""Idempotency keys on a real server: how long one lives, whom it leads to, and when it is free again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from flow import a_job, a_lease, claim_one, until
from hypothesis import given
from hypothesis import strategies as st

from streaming.errors import Abandoned, KeyReused
from streaming.ids import idempotency_digest, joined
from streaming.jobs.codec import Terminal
from streaming.jobs.job import JobState
from streaming.jobs.lease import Claim, Finish, Lease
from streaming.jobs.queue import Accepted, Queue
from streaming.jobs.reader import JobReader
from streaming.jobs.reaper import Reaper
from streaming.keys import CATALOGUE, partition_key
from streaming.order import Priority
from streaming.redis.client import RedisClient

pytestmark = pytest.mark.slow

RETENTION_S = 1
HERE, THERE = "penstock:api:here", "penstock:api:there"


@pytest.fixture
async def brief(opened: Callable[..., RedisClient], redis_url: str) -> RedisClient:
    """A wire whose results and keys are kept for a second."""
    return opened(redis_url, lease_ms=1_000, retention_s=RETENTION_S, max_attempts=1)


async def put(queue: Queue, key: str, tenant: str = "t", **changes: Any) -> Accepted:
    job = a_job(queue, id=queue.new_id(tenant, key), tenant=tenant, **changes)
    return await queue.put(job, idempotency_key=key, digest="d")


async def claimed(wire: RedisClient) -> tuple[Lease, Claim]:
    lease = await a_lease(wire)
    return lease, await claim_one(lease)


async def finish(lease: Lease, claim: Claim) -> None:
    end = Terminal(claim.job.id, JobState.COMPLETED, 0, ("stop",))
    await lease.calls([lease.finish_call(Finish(end, claim.run_number, True))])


async def ttl_ms(wire: RedisClient, key: str, tenant: str = "t") -> int:
    """Of a stored key: -1 if it has no expiry, -2 if it is not there."""
    return int(await wire.redis.pttl(partition_key(0, "idem", idempotency_digest(tenant, key))))


async def test_a_key_leads_to_its_job_for_as_long_as_that_waits_and_runs(brief: RedisClient) -> None:
    """Longer than the retention time, which only begins with the job's end; then the key goes with the job's record."""
    queue = Queue(brief)
    first = await put(queue, "k")
    await asyncio.sleep(1.2 * RETENTION_S)
    assert (await put(queue, "k")).id == first.id
    lease, claim = await claimed(brief)
    await asyncio.sleep(1.2 * RETENTION_S)
    await lease.beat(0)
    assert (await put(queue, "k")).id == first.id
    await finish(lease, claim)
    again = await put(queue, "k")
    assert (again.id, again.joined, again.state) == (first.id, True, JobState.COMPLETED)
    assert 0 < await ttl_ms(brief, "k") <= 1000 * RETENTION_S
    assert await brief.redis.pexpiretime(partition_key(0, "job", first.id)) == await brief.redis.pexpiretime(
        partition_key(0, "idem", idempotency_digest("t", "k"))
    )

    async def is_new() -> bool:
        return not (await put(queue, "k")).joined

    await until(is_new)


async def test_whatever_ends_a_job_bounds_the_life_of_its_key(brief: RedisClient) -> None:
    """Cancelled or expired in the queue, given up, cancelled while it runs: no key is left for ever."""
    queue, reaper = Queue(brief), Reaper(brief)
    await put(queue, "given up")
    lease, _ = await claimed(brief)
    await put(queue, "cancelled")
    await put(queue, "expired", max_queue_ms=1)
    assert [await ttl_ms(brief, key) for key in ("given up", "cancelled", "expired")] == [-1, -1, -1]
    await queue.cancel((await put(queue, "cancelled")).id)
    await brief.redis.zadd(partition_key(0, "leases"), {lease.id: 1})

    async def all_bounded() -> bool:
        await reaper.sweep()
        return -1 not in [await ttl_ms(brief, key) for key in ("given up", "cancelled", "expired")]

    await until(all_bounded)


async def test_a_key_whose_job_is_gone_is_free(wire: RedisClient) -> None:
    """Whoever took the record away by hand: the key leads nowhere, so the next request with it computes."""
    queue = Queue(wire)
    first = await put(queue, "k")
    await wire.redis.delete(partition_key(0, "job", first.id))
    second = await put(queue, "k")
    assert not second.joined and second.id != first.id
    assert (await put(queue, "k")).id == second.id


async def test_a_stored_key_of_another_tenants_job_delivers_nothing(wire: RedisClient) -> None:
    """The job found is compared with the caller, too."""
    queue = Queue(wire)
    first = await put(queue, "k", "owner")
    stored = partition_key(0, "idem", idempotency_digest("thief", "k"))
    await wire.redis.set(stored, f"{first.id}:d")
    with pytest.raises(KeyReused):
        await put(queue, "k", "thief")


async def test_a_job_that_lost_its_client_leaves_its_key_free(wire: RedisClient) -> None:
    """Waiting or running: the next request with the key is a new job, and the end of the old one does not touch it."""
    queue, reader = Queue(wire), JobReader(wire)
    waiting = await put(queue, "k", reply_to=HERE)
    assert await queue.abandon(waiting.id, HERE)
    running = await put(queue, "k", reply_to=HERE)
    assert not running.joined and (await reader.record(waiting.id)).state is JobState.CANCELLED
    lease, claim = await claimed(wire)
    assert await queue.abandon(running.id, HERE)
    third = await put(queue, "k", reply_to=HERE)
    assert not third.joined and len({waiting.id, running.id, third.id}) == 3
    await finish(lease, claim)
    assert await ttl_ms(wire, "k") == -1 and (await put(queue, "k", reply_to=HERE)).id == third.id


async def test_a_lost_client_ends_no_job_that_others_wait_for(wire: RedisClient) -> None:
    """Until the last process whose clients followed it has lost them too."""
    queue = Queue(wire)
    job = await put(queue, "k", reply_to=HERE)
    await queue.add_address(job.id, THERE, joining=True)
    assert not await queue.abandon(job.id, HERE)
    assert (await put(queue, "k", reply_to=HERE)).id == job.id
    assert await queue.abandon(job.id, THERE)


async def test_whoever_joins_too_late_is_told(wire: RedisClient) -> None:
    """Between a put that joined and its follow the job may have lost its client: then it must not be waited for."""
    queue = Queue(wire)
    first = await put(queue, "k", reply_to=HERE)
    assert (await put(queue, "k", reply_to=THERE)).joined
    assert await queue.abandon(first.id, HERE)
    with pytest.raises(Abandoned):
        await queue.add_address(first.id, THERE, joining=True)
    assert await queue.add_address(first.id, THERE) is JobState.CANCELLED
    assert not (await put(queue, "k", reply_to=THERE)).joined


async def test_a_put_says_all_that_its_answer_needs(wire: RedisClient) -> None:
    """State, time and epoch of a job that was there, as its record has them."""
    queue, reader = Queue(wire), JobReader(wire)
    await wire.redis.set(partition_key(0, "epoch"), 4)
    first = await put(queue, "k")
    again = await put(queue, "k")
    record = await reader.record(first.id)
    assert first == Accepted(first.id, created_ms=record.created_ms, epoch=5) and record.epoch == 5
    assert again == Accepted(first.id, created_ms=record.created_ms, joined=True, epoch=5)
    await claimed(wire)
    assert (await put(queue, "k")).state is JobState.RUNNING


names = st.text(alphabet="ab:1", max_size=6)


@given(st.lists(names, max_size=3), st.lists(names, max_size=3))
def test_joined_names_can_be_told_apart(some: list[str], others: list[str]) -> None:
    """Two lists of names give one text only if they are the same."""
    assert (joined(*some) == joined(*others)) == (some == others)


@given(names, names, names, names)
def test_tenants_and_keys_never_meet(tenant: str, key: str, other: str, other_key: str) -> None:
    """Not with the border elsewhere, nor with separators inside."""
    assert (idempotency_digest(tenant, key) == idempotency_digest(other, other_key)) == (
        (tenant, key) == (other, other_key)
    )


def test_every_key_of_the_catalogue_tells_its_names_apart() -> None:
    """Free names, separators and priorities within them: different arguments are different keys, of all kinds."""
    free = ["a", "b", "a:b", "b:a", ":", "", "a:", ":a", "m:standard", "standard", "a:standard:batch"]
    made: dict[str, tuple[str, ...]] = {}
    pairs = [(name, str(last)) for name in free for last in Priority]
    arguments: dict[int, list[tuple[str, ...]]] = {
        0: [()],
        1: [(name,) for name in free],
        2: pairs,
        3: [(day, tenant, who) for day in ("1", "20787") for tenant in ("", "a", "b") for who in free],
        4: [(str(len(model)), model, priority, tenant) for model, priority in pairs for tenant in free],
    }
    for key in CATALOGUE:
        for args in arguments[key.pattern.count("{}")]:
            text = partition_key(0, key.name, *args)
            assert text not in made, f"{key.name}{args} is also {made[text]}"
            made[text] = (key.name, *args)
