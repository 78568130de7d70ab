"""Records of a worker's requests: written once the store has the end, and by nobody who did not write it."""

from __future__ import annotations

import asyncio

import pytest
from sim_worker import Workshop, until

from streaming.jobs.job import JobState
from streaming.keys import partition_key
from telemetry.records.schema import Record, RequestRecord
from workers.record import Recorder

pytestmark = pytest.mark.slow


class Kept:
    """Keeps the records in memory."""

    written = dropped = 0

    def __init__(self) -> None:
        self.records: list[Record] = []

    def write(self, record: Record) -> None:
        self.records.append(record)


@pytest.fixture
def kept(recorder: Recorder) -> Kept:
    """The records of the worker that `start` starts."""
    sink = Kept()
    recorder.sink, recorder._process = sink, "worker-1"
    return sink


async def test_a_record_comes_after_the_end(shop: Workshop, kept: Kept) -> None:
    await shop.start()
    job = await shop.put("hello", 10)
    record = await shop.ended(job)
    await until(lambda: bool(kept.records))
    (found,) = kept.records
    assert (found.id, found.state, found.completion_tokens, found.by) == (job.id, "completed", 10, "worker-1")
    stamps = record.stamps
    assert (found.accepted_us, found.claimed_us) == (stamps.accepted, stamps.claimed)
    assert (found.first_us, found.last_us) == (stamps.first_token, stamps.last_token)
    assert found.released_us == stamps.released
    assert abs(found.ended_us - stamps.ended) < 1_000_000


async def test_an_end_that_the_store_refuses_is_not_recorded(shop: Workshop, kept: Kept) -> None:
    """A script has failed the job, because its record was damaged while it ran: the sweep writes its record."""
    await shop.start()
    job = await shop.put("hello", 200)
    key = partition_key(0, "job", job.id)
    while await shop.wire.redis.hget(key, "state") != b"in_progress":
        await asyncio.sleep(0.001)
    await shop.wire.redis.hset(key, "created", "damaged")
    record = await shop.ended(job)
    assert record.state is JobState.FAILED
    other = await shop.put("hello", 5)
    await until(lambda: {job.id, other.id} <= {each.id for each in kept.records if isinstance(each, RequestRecord)})
    found = [each for each in kept.records if isinstance(each, RequestRecord) and each.id == job.id]
    assert [(each.state, each.code) for each in found] == [("failed", "malformed_job")]
