"""The place of a waiting job in the order of the queue, and its reason: one look for all who ask of a tenant."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest
from flow import MODEL, a_job

from streaming.errors import Unavailable
from streaming.jobs import places
from streaming.jobs.lease import Lease
from streaming.jobs.queue import Queue
from streaming.jobs.reader import JobReader
from streaming.jobs.records import JobRecord
from streaming.redis.client import RedisClient


async def waiting(wire: RedisClient, count: int) -> list[str]:
    queue, ids = Queue(wire), []
    for _ in range(count):
        ids.append((await queue.put(a_job(queue))).id)
    return ids


async def looks(wire: RedisClient) -> int:
    stats = await wire.redis.info("commandstats")
    return int(stats.get("cmdstat_fcall", {"calls": 0})["calls"])


async def places_of(reader: JobReader, records: Sequence[JobRecord]) -> list[int]:
    """Looked up together, by a read that may be old."""
    return [each.before for each in await asyncio.gather(*(reader.place(record, 60) for record in records))]


async def test_places_are_exact_and_follow_what_leaves_the_lane(wire: RedisClient) -> None:
    """Claims and cancels bring a job forward; a job that does not wait is at no place."""
    ids, reader, lease = await waiting(wire, 8), JobReader(wire), Lease(wire, MODEL)

    async def positions() -> list[int]:
        return [(await reader.place(await reader.record(job))).before for job in ids]

    assert await positions() == list(range(8))
    await lease.register()
    await lease.claim(0, 3)
    await Queue(wire).cancel(ids[5])
    assert await positions() == [0, 0, 0, 0, 1, 0, 2, 3]


async def test_one_look_serves_all_who_ask_at_the_same_time(wire: RedisClient) -> None:
    """And for a while: but never somebody whose job was put after it."""
    ids, reader = await waiting(wire, 50), JobReader(wire)
    records = [await reader.record(job) for job in ids]
    before = await looks(wire)
    for _ in range(3):
        assert await places_of(reader, records) == list(range(50))
    assert await looks(wire) - before == 1
    later = await reader.record((await waiting(wire, 2))[1])
    assert (await reader.place(later, 60)).before == (await reader.place(later)).before == 51


async def test_beyond_the_bound_every_place_is_the_bound(wire: RedisClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long lane is not read to its end, however often somebody there asks."""
    monkeypatch.setattr(places, "MAX_COUNTED", 10)
    ids, reader = await waiting(wire, 15), JobReader(wire)
    records = [await reader.record(job) for job in ids]
    before = await looks(wire)
    assert await places_of(reader, records) == [*range(10), *[10] * 5]
    assert await looks(wire) - before == 1


async def test_a_look_that_failed_is_not_handed_on(wire: RedisClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """All who waited for it are told; the next one looks anew."""
    (job,) = await waiting(wire, 1)
    reader = JobReader(wire)
    record = await reader.record(job)

    async def unavailable(*_: object) -> None:
        raise Unavailable("away")

    with monkeypatch.context() as patch:
        patch.setattr(wire, "call", unavailable)
        told = await asyncio.gather(*(reader.place(record, 60) for _ in range(3)), return_exceptions=True)
        assert all(isinstance(each, Unavailable) for each in told)
    assert (await reader.place(record, 60)).before == 0


async def test_a_job_is_looked_at_again_without_its_body(wire: RedisClient) -> None:
    """While it waits, with its new place after it was handed back; then its whole record."""
    ids, reader, lease = await waiting(wire, 2), JobReader(wire), Lease(wire, MODEL)
    record = await reader.record(ids[0])
    assert await reader.again(record) == record
    await lease.register()
    await lease.claim(0, 1)
    running = await reader.again(record)
    assert (running.state, running.attempt, running.worker) == ("in_progress", 1, lease.id)
    await lease.release(ids[0], 1)
    back = await reader.again(record)
    assert back.state == "queued" and back.queue == "retry" and (await reader.place(back)).before == 0


async def test_records_may_be_read_without_their_bodies(wire: RedisClient) -> None:
    """All else is the same; a job that is not kept is still none."""
    ids, reader = await waiting(wire, 2), JobReader(wire)
    whole = await reader.records([*ids, "job_00" + 30 * "0"])
    bare = await reader.records([*ids, "job_00" + 30 * "0"], bodies=False)
    assert whole[2] is bare[2] is None
    for record, without in zip(whole[:2], bare[:2], strict=True):
        assert record is not None and without is not None
        assert without.job.prompt != record.job.prompt and without.job.model == record.job.model
        assert replace(without, job=record.job) == record
