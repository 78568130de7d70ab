"""The position of a waiting job in the order of the queue, and its reason: one look for all who ask of a tenant."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from flow import MODEL, a_job, a_lease, lapse, put_job, until

from streaming.errors import NoCapacity, Unavailable, UnknownJob
from streaming.jobs.codec import encode
from streaming.jobs.job import Endpoint, Job, Text
from streaming.jobs.lease import Claim, Lease
from streaming.jobs.queue import Queue
from streaming.jobs.reader import JobReader
from streaming.jobs.records import REASONS, JobRecord, parse_record
from streaming.jobs.waiting import Backlog, backlog_of
from streaming.keys import partition_key
from streaming.order import LaneDepth, Priority
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
    return [each.before for each in await asyncio.gather(*(reader.position(record, 60) for record in records))]


async def test_places_are_exact_and_follow_what_leaves_the_lane(wire: RedisClient) -> None:
    """Claims and cancels bring a job forward; a job that does not wait is at no place."""
    ids, reader, lease = await waiting(wire, 8), JobReader(wire), Lease(wire, MODEL)

    async def positions() -> list[int]:
        return [(await reader.position(await reader.record(job))).before for job in ids]

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
    assert (await reader.position(later, 60)).before == (await reader.position(later)).before == 51


async def test_beyond_the_bound_every_place_is_the_bound(wire: RedisClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long lane is not read to its end, however often somebody there asks."""
    monkeypatch.setattr("streaming.jobs.waiting.MAX_COUNTED", 10)
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
        told = await asyncio.gather(*(reader.position(record, 60) for _ in range(3)), return_exceptions=True)
        assert all(isinstance(each, Unavailable) for each in told)
    assert (await reader.position(record, 60)).before == 0


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
    assert back.state == "queued" and back.queue == "retry" and (await reader.position(back)).before == 0


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


# --- What becomes of a read of the reader that nobody waits for any more ---


async def test_a_read_that_nobody_waits_for_fails_in_silence(wire: RedisClient) -> None:
    """The last of those who asked has left, and the job is gone: there is nothing to complain of."""
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    reader, gone = JobReader(wire), Queue(wire).new_id("t")
    asking = asyncio.create_task(reader.ended(gone))
    await asyncio.sleep(0)
    asking.cancel()
    await until(lambda: not reader._ended)
    del asking  # it knows the read, which complains once nobody does
    with pytest.raises(UnknownJob):
        await reader.ended(gone)
    gc.collect()
    assert complaints == []


def test_the_letter_of_an_endpoint_of_a_newer_version_is_no_fault() -> None:
    """A process of this version still shows the job, and lists it among others."""
    body = encode(Job(id="j", model="m", tenant="t", priority=Priority.BATCH, prompt=Text(("a",))))
    fields = [b"state", b"queued", b"lane", b"m:batch", b"body", body, b"endpoint", b"?"]
    record = parse_record("j", fields, None)
    assert record is not None and record.endpoint is Endpoint.COMPLETIONS and not record.fault


def test_why_a_script_ended_a_job_has_the_code_that_the_page_lists() -> None:
    """With its status. Only the store's own words for a cancel and for an unreadable record differ from it."""
    page = (Path(__file__).parents[3] / "docs" / "api.md").read_text(encoding="utf-8")
    other = {"cancelled": "job_cancelled", "malformed": "malformed_job"}
    for reason, failure in REASONS.items():
        assert failure.code == other.get(reason, reason)
        assert f"| {failure.status} | `{failure.code}` |" in page


# --- What is told of lanes and deadlines, from a real server ---


async def put(wire: RedisClient, priority: Priority, **limits: int) -> str:
    """A waiting job of model m."""
    return (await put_job(Queue(wire), priority, **limits)).id


async def lane_of(wire: RedisClient, priority: Priority) -> LaneDepth:
    (lane,) = [lane for lane in await Backlog(wire).lanes(["m"]) if lane.priority is priority]
    return lane


async def test_suspects_wait_as_others_do(wire: RedisClient) -> None:
    """Else a pool would sleep while only they are left, and nobody would ever run them."""
    await put(wire, Priority.STANDARD)
    for _ in range(wire.settings.max_attempts - 1):
        lost = await a_lease(wire)
        assert len((await lost.claim(0, 1)).jobs) == 1
        await lapse(wire, lost)
    assert await wire.redis.exists(partition_key(0, "suspects", "m", "standard"))
    assert (await lane_of(wire, Priority.STANDARD)).waiting == 1


async def test_jobs_ever_put_are_counted(wire: RedisClient) -> None:
    """By lane; a claim changes what waits, not what came; nor does a job that is handed back come again."""
    for _ in range(3):
        await put(wire, Priority.STANDARD)
    await put(wire, Priority.BATCH)
    lease = await a_lease(wire)
    claimed = await lease.claim(0, 2)
    lane = await lane_of(wire, Priority.STANDARD)
    assert (lane.added, lane.waiting, lane.running) == (3, 1, 2)
    job = claimed.jobs[0]
    assert isinstance(job, Claim)
    await lease.release(job.job.id, job.run_number)
    lane = await lane_of(wire, Priority.STANDARD)
    assert (lane.added, lane.waiting, lane.running) == (3, 2, 1)
    assert (await lane_of(wire, Priority.BATCH)).added == 1
    assert (await lane_of(wire, Priority.INTERACTIVE)).added == 0


async def test_the_nearest_deadlines_are_told(wire: RedisClient) -> None:
    """With their lane and age, nearest first; claimed jobs and jobs without one are left out."""
    assert (await wire.ask(backlog_of([], wire.partitions))).due == []
    await put(wire, Priority.INTERACTIVE, deadline_ms=30_000)
    lease = await a_lease(wire)
    await lease.claim(0, 1)
    await put(wire, Priority.STANDARD)
    await put(wire, Priority.BATCH, deadline_ms=60_000)
    await put(wire, Priority.STANDARD, max_queue_ms=20_000, deadline_ms=90_000)
    due = (await wire.ask(backlog_of([], wire.partitions))).due
    assert [(each.model, each.priority) for each in due] == [("m", Priority.STANDARD), ("m", Priority.BATCH)]
    assert 0 < due[0].in_ms <= 20_000 < due[1].in_ms <= 60_000
    assert all(0 <= each.age_ms < 20_000 for each in due)


async def test_the_oldest_waiting_job_is_none_that_runs(wire: RedisClient) -> None:
    """What a worker was given stays in the lane until its end, before all that wait."""
    lease = await a_lease(wire)
    await put(wire, Priority.STANDARD)
    await lease.claim(0, 1)
    given_ms = await wire.now_ms()
    await until(lambda: _later(wire, given_ms))
    await put(wire, Priority.STANDARD)
    _, lanes, _ = await wire.call("lanes", 0, 0, "m")
    ((waiting, running, oldest_ms, _),) = [lane for lane in lanes if lane[0] or lane[1]]
    assert (waiting, running) == (1, 1) and oldest_ms > given_ms


async def _later(wire: RedisClient, than_ms: int) -> bool:
    return await wire.now_ms() > than_ms


async def test_the_next_job_of_each_tenant_is_told_with_its_wait(wide: RedisClient) -> None:
    """However many wait behind it; of all partitions, the longest wait. A claimed job waits no more."""
    queue = Queue(wide)
    for tenant, number in (("a", 12), ("b", 1)):
        for _ in range(number):
            await put_job(queue, Priority.BATCH, id=queue.new_id(tenant), tenant=tenant)
        await asyncio.sleep(0.03)
    lanes = Backlog(wide)
    found = await lanes.ages(["m", "other"])
    waits = found["m", Priority.BATCH]
    assert set(waits) == {"a", "b"} and waits["a"] >= waits["b"] + 30 >= 60
    assert found["m", Priority.INTERACTIVE] == found["other", Priority.BATCH] == {}
    lease = await a_lease(wide)
    claimed = 0
    while claimed < 13:
        for partition in range(4):
            claimed += len((await lease.claim(partition, 16)).jobs)
    assert (await lanes.ages(["m"]))["m", Priority.BATCH] == {}


# --- A job that must not queue is accepted only if a worker would begin it at once, by what the last clai ---

LANES = {priority.value: priority for priority in Priority}


async def is_let_in(queue: Queue, tenant: str = "t", lane: Priority = Priority.STANDARD) -> bool:
    """Whether such a job is accepted now. One that was is taken back, and nothing else changes but the lists of workers
    that have room."""
    job = a_job(queue, lane, tenant=tenant)
    try:
        await queue.put(job, must_run=True)
    except NoCapacity:
        return False
    await queue.cancel(job.id)
    return True


async def test_places_that_are_reserved_from_lane_batch_are_not_free_for_it(wire: RedisClient) -> None:
    queue, lease = Queue(wire), await a_lease(wire)
    await lease.claim(0, 2, lowest=0)
    assert not await is_let_in(queue, lane=Priority.BATCH)
    assert await is_let_in(queue, lane=Priority.STANDARD)
    await lease.claim(0, 2, lowest=0)
    assert await is_let_in(queue, lane=Priority.INTERACTIVE)
    await lease.claim(0, 2, lowest=1)
    assert await is_let_in(queue, lane=Priority.BATCH), "a place is free for it again"


async def test_jobs_that_a_kept_place_is_kept_from_do_not_hold_up_others(wire: RedisClient) -> None:
    """The flood waits, and a job of another tenant begins at once: in the lane of the flood or in a higher one."""
    queue, lease = Queue(wire), await a_lease(wire)
    await queue.put(a_job(queue, tenant="flood"))

    async def claim() -> None:
        assert (await lease.claim(0, 2, shared=0, crowding=("flood",))).jobs == []

    for lane, free in ((Priority.BATCH, False), (Priority.STANDARD, True), (Priority.INTERACTIVE, True)):
        await claim()
        assert await is_let_in(queue, "light", lane) is free
        await claim()
        assert not await is_let_in(queue, "flood", lane)
    await claim()
    light = a_job(queue, tenant="light")
    await queue.put(light, must_run=True)
    (claimed,) = (await lease.claim(0, 2, shared=0, crowding=("flood",))).jobs
    assert isinstance(claimed, Claim) and claimed.job.id == light.id


async def test_while_others_wait_a_place_for_anyone_is_theirs(wire: RedisClient) -> None:
    queue, lease, other = Queue(wire), await a_lease(wire), await a_lease(wire)
    await lease.claim(0, 1)
    await other.claim(0, 1)
    await queue.put(a_job(queue, tenant="first"))
    assert not await is_let_in(queue, "second")


async def test_a_chat_is_let_in_where_batch_work_gives_way_unless_its_tenant_crowds_the_worker(
    wire: RedisClient,
) -> None:
    queue, lease = Queue(wire), await a_lease(wire)
    await lease.claim(0, 2, free=0, lowest=0, shared=0, crowding=("flood",))
    assert not await is_let_in(queue, "flood", Priority.INTERACTIVE)
    assert not await is_let_in(queue, "light", Priority.STANDARD)
    assert await is_let_in(queue, "light", Priority.INTERACTIVE)


@pytest.mark.parametrize("lane", LANES)
async def test_the_worker_that_would_begin_the_job_is_woken(wire: RedisClient, lane: str) -> None:
    """Not the one that said last that it has room, if that is not for this job."""
    queue, taker, other = Queue(wire), await a_lease(wire), await a_lease(wire)
    controls = taker.controls()
    await anext(controls)  # it listens
    waiting = asyncio.create_task(anext(controls))
    await taker.claim(0, 1)
    since = await wire.now_ms()
    while await wire.now_ms() == since:
        await asyncio.sleep(0.001)
    await other.claim(0, 1, lowest=0, shared=0, crowding=("t",))
    await queue.put(a_job(queue, LANES[lane]), must_run=True)
    await asyncio.wait_for(waiting, 30)
    idle = await wire.redis.zrange(partition_key(0, "idle", "m"), 0, -1)
    assert idle == [other.id.encode()]
    await controls.aclose()  # type: ignore[attr-defined]
