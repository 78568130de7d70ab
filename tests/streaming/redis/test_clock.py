"""Redis time as a process tells it by itself, within the bound it states; and the notes of when answers were sent."""

from __future__ import annotations

import time

from flow import a_job
from hypothesis import given
from hypothesis import strategies as st

from streaming.ids import partition_of
from streaming.jobs.queue import Queue
from streaming.jobs.reader import JobReader
from streaming.jobs.records import MAX_AT_ONCE, Delivered, Deliveries
from streaming.keys import partition_key
from streaming.redis.client import RedisClient
from streaming.redis.clock import Clock, ClockOffset, better, measured


@given(st.integers(-(10**15), 10**15), st.integers(0, 10**6), st.integers(0, 10**6))
def test_the_truth_lies_within_the_bound(truth: int, there: int, back: int) -> None:
    """However unequal the ways to the server and back are."""
    sent = 5_000_000
    offset = measured(sent, sent + there + truth, sent + there + back)
    assert abs(offset.value - truth) <= offset.error <= (there + back) // 2 + 2


def test_the_narrower_of_two_is_gone_by_until_it_is_contradicted() -> None:
    """An old narrow one beats a fresh wide one; age widens it; a clock that was set ends it."""
    narrow, wide = ClockOffset(1_000, 50, 0), ClockOffset(1_300, 400, 0)
    assert better(None, wide, 0) is wide
    assert better(narrow, wide, 0) is narrow and better(wide, narrow, 0) is narrow
    later = 10_000_000
    assert narrow.error_at(later) == 50 + 500
    assert better(narrow, ClockOffset(1_300, 400, later), later).taken == later
    assert better(narrow, ClockOffset(900_000, 400, 0), 0).value == 900_000


async def test_it_tells_the_servers_time(wire: RedisClient) -> None:
    """Before and after a question to the server, within its bound; and nothing before it was ever compared."""
    clock = Clock(wire)
    assert clock.at(time.monotonic(), 0) == 0 == clock.error_us(0)
    await clock.renew()
    assert clock.at(0.0, 0) == 0, "a time that is not known stays so"
    (place,) = await wire.homes()
    before = clock.at(time.monotonic(), 0)
    server = await wire.time_us(place)
    after = clock.at(time.monotonic(), 0)
    bound = clock.error_us(0)
    assert 0 < bound < 1_000_000 and before - bound <= server <= after + bound


async def test_deliveries_are_noted_once_and_only_for_jobs_that_are_kept(wire: RedisClient) -> None:
    """More than go into one script; a second note changes nothing; a job that is gone does not come back as a key."""
    queue, deliveries, reader = Queue(wire), Deliveries(wire), JobReader(wire)
    jobs = [a_job(queue) for _ in range(MAX_AT_ONCE + 3)]
    for job in jobs[:3]:
        await queue.put(job)
    for number, job in enumerate(jobs):
        deliveries.note(job.id, Delivered(first_got=number + 1, clock_us=7))
    assert deliveries.of(jobs[1].id) == Delivered(first_got=2, clock_us=7)
    await deliveries.write()
    assert deliveries.of(jobs[1].id) is None
    assert (await reader.record(jobs[1].id)).delivered == Delivered(first_got=2, clock_us=7)
    deliveries.note(jobs[1].id, Delivered(first_got=99))
    await deliveries.write()
    assert (await reader.record(jobs[1].id)).delivered == Delivered(first_got=2, clock_us=7)
    gone = jobs[5].id
    assert not await wire.redis.exists(partition_key(partition_of(gone) or 0, "job", gone))


async def test_times_divide_a_millisecond(wire: RedisClient) -> None:
    """Accepted in microseconds of the server's own clock, and still in whole milliseconds for everybody else."""
    queue, clock = Queue(wire), Clock(wire)
    await clock.renew()
    before = clock.at(time.monotonic(), 0) - clock.error_us(0)
    job = a_job(queue)
    accepted = await queue.put(job)
    after = clock.at(time.monotonic(), 0) + clock.error_us(0)
    record = await JobReader(wire).record(job.id)
    assert record.stamps.accepted is not None and before <= record.stamps.accepted <= after
    assert accepted.created_ms == record.created_ms == record.stamps.accepted // 1000
