"""Batches on the wire: one process works on one at a time, is fenced when overtaken, and no batch is forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from batching import batch_record
from flow import until
from msgspec.structs import replace

from streaming.batches.store import (
    LEASES_HELD,
    LEASES_UNTIL_NEXT_NOTICE,
    Batch,
    BatchCommand,
    Batches,
    BatchLease,
    BatchProgress,
    BatchState,
    Files,
    StoredFile,
)
from streaming.errors import Fenced, KeyReused, Superseded, UnknownBatch
from streaming.ids import line_job_id, partition_of
from streaming.redis.client import RedisClient

pytestmark = pytest.mark.slow

LEASE_MS = 400


@pytest.fixture
async def wire(opened: Callable[..., RedisClient], redis_url: str) -> RedisClient:
    """Leases short enough to wait for."""
    return opened(redis_url, lease_ms=LEASE_MS, partitions=3)


@pytest.fixture
def batches(wire: RedisClient) -> Batches:
    return Batches(wire)


async def made(batches: Batches, tenant: str = "t", *, key: str = "", **more: Any) -> Batch:
    batch = batch_record(id=batches.new_id(tenant, key), tenant=tenant, **more)
    await batches.create(batch, "digest")
    return batch


async def held(batches: Batches) -> BatchLease:
    """The next batch that is due."""
    ((batch_id, notice, _),) = await until(lambda: batches.due(10))
    return await batches.hold(batch_id, notice)


async def test_a_new_batch_is_due_once(batches: Batches) -> None:
    """Told at once, not again while it is fresh, and again when nothing came of it."""
    batch = await made(batches)
    assert await batches.due(10) == [(batch.id, 1, "due")]
    assert await batches.due(10) == []
    began = asyncio.get_running_loop().time()
    assert await until(lambda: batches.due(10)) == [(batch.id, 2, "unanswered")]
    assert asyncio.get_running_loop().time() - began > LEASES_UNTIL_NEXT_NOTICE * LEASE_MS / 1000 * 0.8
    with pytest.raises(Superseded, match="stale"):
        await batches.hold(batch.id, 1)  # a message that came late
    assert (await batches.hold(batch.id, 2)).batch == batch


async def test_one_works_on_it_at_a_time(batches: Batches) -> None:
    """Until it has said nothing for a while; then it is refused, and the next one has it."""
    await made(batches)
    first = await held(batches)
    for _ in range(6):
        await asyncio.sleep(LEASE_MS / 2000)
        await batches.save(first, BatchState.IN_PROGRESS, BatchProgress(total=5))
        assert await batches.due(10) == []
    ((batch_id, number, reason),) = await until(lambda: batches.due(10))
    assert reason == "lapsed", "its worker was lost"
    second = await batches.hold(batch_id, number)
    assert second.epoch == first.epoch + 1 and second.progress.total == 5
    assert second.now_ms - first.now_ms > LEASES_HELD * LEASE_MS
    with pytest.raises(Fenced):
        await batches.save(first, BatchState.COMPLETED, BatchProgress())
    await batches.save(second, BatchState.IN_PROGRESS, BatchProgress(total=6))


@pytest.mark.parametrize("command", ["resume", "cancel"])
async def test_a_wish_that_comes_as_a_paused_turn_ends_is_not_slept_through(
    batches: Batches, command: BatchCommand
) -> None:
    """Whoever works on it has heard of the pause and not of this yet when it lays it aside for long."""
    batch = await made(batches)
    hold = await held(batches)
    await batches.request(batch.id, "pause")
    assert (await batches.save(hold, BatchState.IN_PROGRESS, BatchProgress())).paused
    await batches.request(batch.id, command)
    assert not (await batches.save(hold, BatchState.IN_PROGRESS, BatchProgress(), rest_ms=3_600_000)).paused
    assert [notice.batch_id for notice in await batches.due(10)] == [batch.id]


async def test_the_end_is_the_end(batches: Batches, wire: RedisClient) -> None:
    """A final state never changes, its files are known with it, and it is due no more."""
    batch = await made(batches, token_limit=10)
    hold = await held(batches)
    assert await batches.reserve(hold, 10) == (True, 0)
    file = StoredFile(id=Files(wire).new_id("t"), tenant="t", name="o", size=1, purpose="batch_output",
                      created_ms=hold.now_ms, expires_ms=hold.now_ms + 60_000)  # fmt: skip
    await batches.save(hold, BatchState.COMPLETED, BatchProgress(total=1, completed=1), keep_s=60, files=[file])
    with pytest.raises(Fenced):
        await batches.save(hold, BatchState.FINALIZING, BatchProgress())
    assert await Files(wire).get(file.id, "t") == file
    assert (await batches.get(batch.id, "t")).state is BatchState.COMPLETED
    assert await batches.request(batch.id, "cancel") is BatchState.COMPLETED
    assert await batches.due(10) == []
    other = await made(batches, token_limit=10)
    assert await batches.reserve(await held(batches), 10) == (True, 0), other  # its tokens are given back


async def test_what_the_owner_wants_is_heard(batches: Batches) -> None:
    """Cancelling is not undone by a word about progress; a command makes it due at once."""
    batch = await made(batches)
    hold = await held(batches)
    assert await batches.request(batch.id, "pause") is BatchState.VALIDATING
    verdict = await batches.save(hold, BatchState.IN_PROGRESS, BatchProgress())
    assert verdict.paused and verdict.state is BatchState.IN_PROGRESS
    await batches.save(hold, BatchState.IN_PROGRESS, BatchProgress(), rest_ms=3_600_000)
    await batches.request(batch.id, "resume")
    hold = await held(batches)
    assert not hold.paused
    await batches.request(batch.id, "cancel")
    for state in (BatchState.IN_PROGRESS, BatchState.FINALIZING):
        assert (await batches.save(hold, state, BatchProgress())).state is BatchState.CANCELLING
    record = await batches.get(batch.id, "t")
    assert record.state is BatchState.CANCELLING and record.cancelling_ms > 0
    assert (await batches.save(hold, BatchState.CANCELLED, BatchProgress())).state is BatchState.CANCELLED


async def test_the_quota_counts_all_batches_of_a_tenant(batches: Batches) -> None:
    """And nobody else's; as lines end, room comes back."""
    holds = []
    for _ in range(2):
        await made(batches, token_limit=100)
        holds.append(await held(batches))
    first, second = holds
    assert await batches.reserve(first, 60) == (True, 0)
    assert await batches.reserve(first, 60) == (True, 0)  # once more after a lost answer
    assert await batches.reserve(second, 60) == (False, 60)
    await batches.save(first, BatchState.IN_PROGRESS, BatchProgress(), tokens=30)
    assert await batches.reserve(second, 60) == (True, 30)
    await made(batches, "somebody else", token_limit=100)
    assert await batches.reserve(await held(batches), 100) == (True, 0)
    assert await batches.totals(["nobody"]) == (3, 0)
    assert await batches.totals(["t"]) == (3, 90) and await batches.totals(["t", "somebody else"]) == (3, 190)


async def test_the_same_key_is_the_same_batch(batches: Batches) -> None:
    """For the same tenant and the same body."""
    batch = await made(batches, key="k")
    await batches.request(batch.id, "pause")
    assert await batches.create(batch, "digest") == await batches.get(batch.id, "t")
    with pytest.raises(KeyReused):
        await batches.create(replace(batch, tenant="other"), "digest")
    with pytest.raises(KeyReused):
        await batches.create(batch, "another")
    assert batches.new_id("t", "k") == batch.id != batches.new_id("other", "k")


async def test_nobody_sees_anothers(batches: Batches) -> None:
    """Not by id, not in lists, and an id of anything else is none."""
    batch = await made(batches)
    for name, tenant in (
        (batch.id, "x"),
        ("batch_zz", "t"),
        (f"file-{batch.id[6:]}", "t"),
        ("batch_ff" + "0" * 30, "t"),
    ):
        with pytest.raises(UnknownBatch):
            await batches.get(name, tenant)
    assert await batches.recent("x", None, 10) == []
    others = [f"file-{batch.id[6:]}", "batch_zz", "batch_ff" + "0" * 30]
    assert list(await batches.states([*others, batch.id])) == [batch.id]


async def test_lists_come_in_pages(batches: Batches) -> None:
    """Newest first, none twice, none left out, also of those made in one millisecond."""
    for _ in range(25):
        await made(batches)
    seen: list[str] = []
    after = None
    while page := await batches.recent("t", after, 7):
        seen += [record.batch.id for record in page]
        after = page[-1].batch.id
    assert len(seen) == len(set(seen)) == 25
    times = [(await batches.get(name, "t")).created_ms for name in seen]
    assert times == sorted(times, reverse=True)


async def test_a_list_continues_after_a_batch_that_was_forgotten(batches: Batches) -> None:
    """At its place; a batch of another tenant is no cursor, kept or forgotten."""
    for _ in range(3):
        await made(batches)
    kept, gone, last = [record.batch.id for record in await batches.recent("t", None, 10)]
    notices = {batch: notice for batch, notice, _ in await until(lambda: batches.due(10))}
    await batches.save(await batches.hold(gone, notices[gone]), BatchState.FAILED, BatchProgress(), keep_s=0)
    assert await until(lambda: batches.forget_expired(10)) == [gone]
    for name in (kept, gone):
        assert [record.batch.id for record in await batches.recent("t", name, 10)] == [last]
        with pytest.raises(UnknownBatch):
            await batches.recent("x", name, 10)


async def test_what_expired_is_forgotten(batches: Batches, wire: RedisClient) -> None:
    """Records of ended batches and of files, and nothing else."""
    batch = await made(batches)
    hold = await held(batches)
    files = Files(wire)
    now = await wire.now_ms()
    file = StoredFile(
        id=files.new_id("t"), tenant="t", name="f", size=1, purpose="batch", created_ms=now, expires_ms=now
    )
    await files.put(file)
    await batches.save(hold, BatchState.FAILED, BatchProgress(), keep_s=0)
    running = await made(batches)
    assert await until(lambda: files.expired(10)) == [(file.id, "t")]
    await files.forget(file.id, "t")
    assert await files.expired(10) == [] and await files.recent("t", None, 10) == []
    assert await until(lambda: batches.forget_expired(10)) == [batch.id]
    assert [record.batch.id for record in await batches.recent("t", None, 10)] == [running.id]


def test_a_lines_job_is_the_same_whoever_asks() -> None:
    """And differs by batch, line and attempt; its partition is one there is."""
    ids = {line_job_id(batch, line, attempt, 3) for batch in "ab" for line in range(50) for attempt in range(3)}
    assert len(ids) == 300
    assert {partition_of(each) for each in ids} == {0, 1, 2}
    assert line_job_id("a", 1, 0, 3) == "job_026a8bfaa2db98618ce6c976c41c8444"
