"""Schedules: each due time begins one batch, whoever sees it and whatever was missed; then they rest."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from batching import batch_record, jsonl, line, tools_of
from msgspec.structs import replace

from offline.batch.batch_runner import BatchRunner
from streaming.batches.store import Batches, BatchRecord, BatchState
from streaming.jobs.codec import encode
from streaming.keys import partition_key
from streaming.redis.client import RedisClient

MINUTE_MS = 60_000
DUE = partition_key(0, "due")


class Desk:
    """A schedule of every minute, and an offline process that looks at it when it is told."""

    def __init__(self, wire: RedisClient, folder: Path) -> None:
        self.wire, self.batches, self.tools = wire, Batches(wire), tools_of(wire, folder)
        self.plan = batch_record(id=self.batches.new_id("t"), cron="* * * * *", timezone="UTC", metadata={"a": "b"})

    async def open(self, **changes: Any) -> None:
        self.plan = replace(self.plan, **changes)
        await self.tools.store.require()
        store = self.tools.file_store
        store.prepare()
        store.path(self.plan.input_file).parent.mkdir(parents=True, exist_ok=True)
        store.path(self.plan.input_file).write_bytes(jsonl([line(0)]))
        store.begin_work(self.plan.id, self.plan.input_file)
        store.path(self.plan.input_file).unlink()  # the schedule has its own link
        await self.batches.create(self.plan, "digest", self.plan.file_limit, 100)
        await self.look()

    async def look(self, *, times: int = 1) -> None:
        """As many processes get the notice that it is due, and look at once."""
        await self.wire.redis.zadd(DUE, {self.plan.id: 1}, xx=True)
        notices = {each.batch_id: each.number for each in await self.batches.due(10)}
        runners = [BatchRunner(self.tools, 0) for _ in range(times)]
        await asyncio.gather(*(each.look_at_batch(self.plan.id, notices[self.plan.id]) for each in runners))

    async def become_due(self, ms_ago: int = 0) -> int:
        """Let the schedule's next time be the present, or past."""
        record, key = await self.record(), partition_key(0, "batch", self.plan.id)
        due_ms = await self.wire.now_ms() - ms_ago
        await self.wire.redis.hset(key, "progress", encode(replace(record.progress, next_ms=due_ms)))
        return due_ms

    async def record(self) -> BatchRecord:
        return await self.batches.get(self.plan.id, "t")

    async def begun(self) -> list[BatchRecord]:
        """The batches that it has begun, the newest first."""
        return [each for each in await self.batches.recent("t", None, 100) if not each.batch.cron]


@pytest.fixture
async def desk(wire: RedisClient, tmp_path: Path) -> Desk:
    return Desk(wire, tmp_path)


async def test_it_rests_until_its_next_time(desk: Desk) -> None:
    await desk.open()
    now_ms, record = await desk.wire.now_ms(), await desk.record()
    assert record.state is BatchState.SCHEDULED and not await desk.begun()
    assert now_ms < record.progress.next_ms <= now_ms + MINUTE_MS and record.progress.next_ms % MINUTE_MS == 0
    due = await desk.wire.redis.zscore(DUE, desk.plan.id)
    assert abs(due - record.progress.next_ms) < 1000


async def test_a_time_begins_one_batch_however_many_look(desk: Desk) -> None:
    """It is an ordinary one, of the same input, although the file is gone; and the schedule goes on."""
    await desk.open()
    await desk.become_due()
    await desk.look(times=5)
    (begun,) = await desk.begun()
    assert (begun.state, begun.batch.input_file) == (BatchState.VALIDATING, desk.plan.input_file)
    assert begun.batch.metadata == {"a": "b", "schedule": desk.plan.id}
    store = desk.tools.file_store
    assert store.input_of(begun.batch.id, desk.plan.input_file).read_bytes() == jsonl([line(0)])
    record = await desk.record()
    assert record.progress.last_batch == begun.batch.id and record.progress.next_ms > await desk.wire.now_ms()
    await desk.look()
    assert len(await desk.begun()) == 1


async def test_a_turn_that_was_cut_off_begins_no_second_batch(desk: Desk) -> None:
    """As if the process had died between the two writes."""
    await desk.open()
    due_ms = await desk.become_due()
    await desk.look()
    record, key = await desk.record(), partition_key(0, "batch", desk.plan.id)
    await desk.wire.redis.hset(key, "progress", encode(replace(record.progress, next_ms=due_ms)))
    await desk.look()
    assert len(await desk.begun()) == 1


async def test_times_that_nobody_saw_begin_one_batch(desk: Desk) -> None:
    await desk.open()
    await desk.become_due(ms_ago=100 * MINUTE_MS)
    await desk.look()
    await desk.look()
    assert len(await desk.begun()) == 1


async def test_a_paused_one_begins_none_and_goes_on_after(desk: Desk) -> None:
    await desk.open()
    await desk.batches.request(desk.plan.id, "pause")
    await desk.become_due()
    await desk.look()
    assert not await desk.begun() and (await desk.record()).paused
    await desk.batches.request(desk.plan.id, "resume")
    await desk.become_due()
    await desk.look()
    assert len(await desk.begun()) == 1


async def test_a_cancelled_one_ends_and_leaves_its_batches(desk: Desk) -> None:
    await desk.open()
    await desk.become_due()
    await desk.look()
    assert await desk.batches.request(desk.plan.id, "cancel") is BatchState.SCHEDULED
    await desk.look()
    assert (await desk.record()).state is BatchState.CANCELLED
    assert await desk.wire.redis.zscore(DUE, desk.plan.id) is None
    assert not desk.tools.file_store.work(desk.plan.id).exists()
    assert [each.state for each in await desk.begun()] == [BatchState.VALIDATING]


async def test_a_full_quota_skips_a_time_and_says_so(desk: Desk) -> None:
    await desk.open(file_limit=5000)
    store = desk.tools.file_store
    folders = len(list(store.work(desk.plan.id).parent.iterdir()))
    await desk.wire.redis.hset(partition_key(0, "sizes", "t"), "total", 5000)
    await desk.become_due()
    await desk.look()
    assert len(list(store.work(desk.plan.id).parent.iterdir())) == folders, "the batch that was not begun left its own"
    record = await desk.record()
    assert not await desk.begun() and record.state is BatchState.SCHEDULED
    assert [each.code for each in record.progress.faults] == ["quota_exceeded"]
    await desk.wire.redis.hset(partition_key(0, "sizes", "t"), "total", 0)
    await desk.become_due()
    await desk.look()
    assert len(await desk.begun()) == 1 and not (await desk.record()).progress.faults
