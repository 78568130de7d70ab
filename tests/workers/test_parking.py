"""Parked logs: what a job that was put back has generated stays with the job, whatever becomes of its workers' logs."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator

import pytest
from flow import SILENT, a_lease, append, claim_one, delta, deltas_of
from msgspec.structs import replace
from sim_worker import FAST, Workshop, a_job, ended, expected, put_job, text_of, until

from penstock.engine import Sampling
from streaming.jobs.codec import MAX_ROWS_PER_FRAME, Frame, Opening, Run, Section, encode_delta, packed
from streaming.jobs.history import LogName, read_log
from streaming.jobs.job import Job, JobState
from streaming.jobs.lease import PREEMPTED, Claim, Lease
from streaming.jobs.queue import Queue
from streaming.jobs.reader import JobReader
from streaming.jobs.records import JobRecord
from streaming.jobs.relay import Relay, ReorderBuffer
from streaming.keys import partition_key
from streaming.redis.client import RedisClient
from workers.record import Recorder
from workers.settings import WorkerSettings


@pytest.fixture
async def relay(wire: RedisClient) -> AsyncIterator[Relay]:
    relay = Relay(wire)
    await relay.start()
    yield relay
    await relay.stop()


async def read_from(buffer: ReorderBuffer, count: int) -> list[int]:
    """The numbers of the next deltas that a reader gets, at least so many; the job goes on."""
    seen: list[int] = []
    async with asyncio.timeout(30):
        while len(seen) < count:
            rows, terminal = await buffer.take(0.5)
            assert terminal is None
            seen += [row.seq for row in rows]
    return seen


async def claim_of(wire: RedisClient, name: str = "") -> tuple[Lease, Claim]:
    """A new worker's claim of the only waiting job."""
    lease = await a_lease(wire, name)
    return lease, await claim_one(lease)


def parked(lease: Lease, claim: Claim, own: range, copied: range, sections: tuple[Section, ...] = ()) -> list[Frame]:
    """What a worker parks: its own deltas of the run, and copies of those of earlier runs."""
    rows = [delta(-claim.run_number, seq) for seq in copied] + [delta(claim, seq) for seq in own]
    openings = {claim.run_number: Opening(claim.job.id, own.start, sections[-1].run if sections else None)}
    if sections:
        openings[-claim.run_number] = Opening(claim.job.id, copied=sections)
    return [Frame(lease.id, 1, packed(len(rows), b"".join(map(encode_delta, rows))), openings)]


async def put_back_three_times(wire: RedisClient, job: Job) -> list[Run]:
    """Three workers generate two deltas each, and put the job back; nothing is left of their own logs."""
    runs, sections = list[Run](), tuple[Section, ...]()
    for turn in range(3):
        lease, claim = await claim_of(wire)
        own = range(2 * turn + 1, 2 * turn + 3)
        opening = Opening(job.id, own.start, runs[-1] if runs else None)
        await lease.calls([append(lease, {SILENT: [delta(claim, seq) for seq in own]}, (claim.run_number, opening))])
        frames = parked(lease, claim, own, range(1, own.start), sections)
        await lease.release(job.id, claim.run_number, frames, outcome=PREEMPTED)
        await wire.redis.delete(partition_key(0, "log", lease.id))
        runs.append(Run(lease.id, claim.run_number))
        sections = (*sections, Section(own.start, runs[-1]))
    return runs


async def test_it_holds_everything_after_any_number_of_runs(wire: RedisClient) -> None:
    """Deltas, who wrote each, and an attempt log that says why: a cursor of the first run is still one of this job."""
    queue, reader = Queue(wire), JobReader(wire)
    job = await put_job(queue)
    runs = await put_back_three_times(wire, job)
    record = await reader.record(job.id)
    assert record.state is JobState.QUEUED and [each.run for each in record.runs] == runs
    assert [each.frame for each in record.runs] == [0, 0, 0]
    assert [each.outcome for each in record.attempts] == ["preempted"] * 3
    history = await reader.history(job.id, record.runs)
    assert history.whole and [row.ids[0] for row in history.rows] == [1, 2, 3, 4, 5, 6]
    assert history.sections == tuple(Section(2 * turn + 1, run) for turn, run in enumerate(runs))
    assert history.tokens == (2, 2, 2)


async def test_a_reader_gets_from_it_what_was_never_published(wire: RedisClient, relay: Relay) -> None:
    """One who was there from the start, one who comes while the job waits, and one behind a cursor of the first run."""
    queue = Queue(wire)
    job = a_job(queue, reply_to=relay.address, stream=True)
    there = relay.open(job.id)
    await queue.put(job)
    runs = await put_back_three_times(wire, job)
    authors = [runs[0], runs[0], runs[1], runs[1], runs[2], runs[2]]
    late, behind = relay.open(job.id), relay.open(job.id, 1, runs=runs[:1])
    for buffer, first in ((there, 1), (late, 1), (behind, 2)):
        await relay.subscribe(buffer)
        seen = await read_from(buffer, 7 - first)
        assert seen == list(range(first, 7))
        assert [buffer.author(seq) for seq in seen] == authors[first - 1 :]
        relay.close(buffer)


async def test_a_slow_reader_goes_on_where_it_was(
    wire: RedisClient, relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its buffer fills up again and again: each time, the parked log is read from the next delta's frame on."""
    queue, count = Queue(wire), 20 * MAX_ROWS_PER_FRAME
    job = await put_job(queue, reply_to=relay.address, stream=True)
    lease, claim = await claim_of(wire)
    frames = [
        parked(lease, claim, range(first, first + MAX_ROWS_PER_FRAME), range(0))[0]
        for first in range(1, count, MAX_ROWS_PER_FRAME)
    ]
    opening = {claim.run_number: Opening(job.id)}
    frames = [replace(frame, number=place, openings=opening) for place, frame in enumerate(frames, 1)]
    await lease.release(job.id, claim.run_number, frames, outcome=PREEMPTED)
    read, starts = list[int](), list[int]()

    async def noted(client: RedisClient, partition: int, name: LogName, first: int) -> AsyncGenerator[Frame, None]:
        starts.append(first)
        async for frame in read_log(client, partition, name, first):
            read.append(frame.number)
            yield frame

    monkeypatch.setattr("streaming.jobs.relay.read_log", noted)
    buffer = relay.open(job.id)
    await relay.subscribe(buffer)
    assert await read_from(buffer, count) == list(range(1, count + 1)) and len(starts) > 1, (
        "the buffer was full at least once"
    )
    assert max(Counter(read).values()) <= 3, read


@pytest.mark.parametrize("cancelled", ["before", "after"])
async def test_a_job_that_is_cancelled_keeps_its_parked_tokens(wire: RedisClient, cancelled: str) -> None:
    """Whether the owner cancels it before it is put back or while it waits; then the parked log expires."""
    queue, reader = Queue(wire), JobReader(wire)
    job = await put_job(queue)
    lease, claim = await claim_of(wire)
    if cancelled == "before":
        await queue.cancel(job.id)
    await lease.release(job.id, claim.run_number, parked(lease, claim, range(1, 4), range(0)), outcome=PREEMPTED)
    key = partition_key(0, "parked", job.id)
    if cancelled == "after":
        assert await wire.redis.ttl(key) == -1, "it lives as long as the job waits"
        await queue.cancel(job.id)
    record = await reader.record(job.id)
    assert record.state is JobState.CANCELLED and record.terminal is not None
    assert [row.text for row in record.terminal.rows] == ["<1>", "<2>", "<3>"]
    assert 0 < await wire.redis.ttl(key) <= 60


@pytest.mark.slow
@pytest.mark.parametrize(("choices", "tokens"), [(1, 2500), (3, 400)])
async def test_a_drained_workers_job_goes_on_without_its_log(
    shop: Workshop, recorder: Recorder, monkeypatch: pytest.MonkeyPatch, choices: int, tokens: int
) -> None:
    """Twice put back, by two workers whose logs are lost: the text is that of an undisturbed run, and in the end
    nothing is left of the parked log."""
    put_back = list[str]()
    monkeypatch.setattr(recorder, "released", put_back.append)
    job = await shop.put("long", sampling=Sampling(max_tokens=tokens, n=choices))
    for turn in range(1, 3):
        leaving = await shop.start(FAST, WorkerSettings(drain_s=0.01))

        async def has_more(share: int = turn) -> bool:
            rows = (await shop.reader.history(job.id, (await shop.reader.record(job.id)).runs)).rows
            return len(rows) >= share * tokens * choices // 4

        await until(has_more)
        leaving.stop.set()
        await asyncio.wait_for(leaving.task, 20)
        assert await shop.wire.redis.delete(partition_key(0, "log", leaving.worker.lease.id))
        assert not await shop.wire.redis.exists(partition_key(0, "heirs", leaving.worker.lease.id))
    await shop.start()
    record = await shop.ended(job)
    assert record.state is JobState.COMPLETED and record.attempt == 3 and put_back == [job.id] * 2
    one = await undisturbed(shop.wire, job)
    assert [text_of(record, index) for index in range(choices)] == [text_of(one, index) for index in range(choices)]
    if choices == 1:
        assert text_of(record) == expected("long", tokens)
    assert record.terminal is not None and len(record.terminal.sections) == 3
    assert 0 < await shop.wire.redis.ttl(partition_key(0, "parked", job.id)) <= 60


async def undisturbed(wire: RedisClient, job: Job) -> JobRecord:
    """The record of the same request, run by one worker from its start to its end."""
    queue = Queue(wire)
    again = await put_job(queue, "long", sampling=job.sampling)
    return await ended(wire, again.id)


async def test_a_reader_who_has_a_part_of_the_run_gets_the_rest_from_it(wire: RedisClient, relay: Relay) -> None:
    """The first delta came by the relay; the messages of the next two were lost, and then the worker's log."""
    queue = Queue(wire)
    job = a_job(queue, reply_to=relay.address, stream=True)
    buffer = relay.open(job.id)
    await queue.put(job)
    lease, claim = await claim_of(wire)
    await lease.calls([append(lease, {relay.address: [delta(claim, 1)]}, claim)])
    seen = await read_from(buffer, 1)
    await lease.calls([append(lease, {SILENT: [delta(claim, 2), delta(claim, 3)]}, claim)])
    await lease.release(job.id, claim.run_number, parked(lease, claim, range(1, 4), range(0)), outcome=PREEMPTED)
    await wire.redis.delete(partition_key(0, "log", lease.id))
    seen += await read_from(buffer, 2)
    assert seen == [1, 2, 3] and buffer.author(3) == Run(lease.id, claim.run_number)


async def test_a_late_repetition_of_the_call_changes_nothing(wire: RedisClient) -> None:
    """Its answer was lost, and another worker has claimed the job and gone on meanwhile."""
    queue, reader = Queue(wire), JobReader(wire)
    job = await put_job(queue)
    lease, claim = await claim_of(wire)
    frames = parked(lease, claim, range(1, 3), range(0))
    await lease.release(job.id, claim.run_number, frames, outcome=PREEMPTED)
    heir, again = await claim_of(wire)
    opening = Opening(job.id, 3, Run(lease.id, claim.run_number))
    await heir.calls([append(heir, {SILENT: [delta(again, 3)]}, (again.run_number, opening))])
    await lease.release(job.id, claim.run_number, parked(lease, claim, range(1, 2), range(0)), outcome=PREEMPTED)
    record = await reader.record(job.id)
    assert record.state is JobState.RUNNING
    assert [row.seq for row in await deltas_of(reader, record)] == [1, 2, 3]
