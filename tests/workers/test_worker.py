"""The worker with the simulated engine on a real server: claims, deltas, ends, cancels, drains, losses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from flow import deltas_of
from sim_worker import (
    FAST,
    LONG,
    Workshop,
    a_claim,
    a_job,
    expected,
    failure_of,
    lose_lease,
    put_job,
    text_of,
    until,
)

from penstock.engine import Sampling
from streaming.errors import Fenced, Unavailable
from streaming.ids import new_job_id
from streaming.jobs.dead_letters import DeadLetters
from streaming.jobs.history import NOTHING, History, LoggedRun
from streaming.jobs.job import Job, JobState
from streaming.jobs.lease import Claimed, HeldJob, Lease
from streaming.jobs.queue import Queue
from streaming.jobs.reader import JobReader
from streaming.keys import partition_key
from streaming.redis.client import RedisClient
from streaming.redis.settings import RedisSettings
from workers.engines.sim.engine import SimEngine
from workers.engines.sim.settings import SimSettings
from workers.held_jobs import BeatComparison
from workers.record import Recorder
from workers.settings import WorkerSettings
from workers.worker import Worker

pytestmark = pytest.mark.slow


async def test_many_jobs_run_together_and_each_text_is_exact(shop: Workshop) -> None:
    """More jobs than slots: all complete, byte for byte, and every delta is numbered without a gap."""
    await shop.start()
    jobs = [a_job(shop.queue, f"job {number}", 20) for number in range(20)]
    await asyncio.gather(*(shop.queue.put(job) for job in jobs))
    for number, job in enumerate(jobs):
        record = await shop.completed(job, f"job {number}", 20)
        assert record.terminal is not None and [row.seq for row in record.terminal.rows] == list(range(1, 21))
        assert record.terminal.usage.completion == 20 and record.terminal.finishes == ("length",)
        assert record.created_ms <= record.started_ms <= record.first_ms <= record.done_ms


async def test_cancel_and_deadline_end_a_running_job_and_free_its_slot(shop: Workshop) -> None:
    """The engine forgets the request; what was generated before stays readable."""
    running = await shop.start(SimSettings(step_ms=5, prefill_ms=1, slots=2))
    cancelled, late = [await shop.put(max_tokens=4000, deadline_ms=due_ms) for due_ms in (None, 1500)]
    await until(lambda: running.engine.stats().running == 2)
    await shop.queue.cancel(cancelled.id)
    assert (await shop.ended(cancelled)).state is JobState.CANCELLED
    assert (await shop.ended(late)).state is JobState.EXPIRED
    await until(lambda: running.engine.stats().running == 0 and running.worker.running == 0)


async def test_a_cancel_waits_for_no_heartbeat(shop: Workshop) -> None:
    """The worker is told of it; that heartbeats say it too is for words that were lost."""
    running = await shop.start(LONG)
    beat = running.worker.lease.beat

    async def silent(partition: int) -> dict[str, HeldJob]:
        return {job_id: HeldJob(held.run_number, cancelled=False) for job_id, held in (await beat(partition)).items()}

    running.worker.lease.beat = silent  # type: ignore[method-assign]
    job = await shop.put(max_tokens=8000)
    await until(lambda: running.engine.stats().running == 1)
    await shop.queue.cancel(job.id)
    assert (await shop.ended(job)).state is JobState.CANCELLED


async def test_a_job_cancelled_before_its_claim_is_answered_is_not_computed(shop: Workshop) -> None:
    """The worker hears of the cancel when it does not know the job yet."""
    running = await shop.start()
    lease, job = running.worker.lease, a_job(shop.queue)
    claim = lease.claim

    async def is_heard() -> bool:
        return bool(running.worker._claimer.early(job.id))

    async def claimed(partition: int, want: int, **options: Any) -> Claimed:
        answer = await claim(partition, want, **options)
        if answer.jobs:
            await shop.queue.cancel(job.id)
            await until(is_heard)
        return answer

    lease.claim = claimed  # type: ignore[method-assign]
    await shop.queue.put(job)
    assert (await shop.ended(job)).state is JobState.CANCELLED
    assert running.engine.stats().steps == 0 and not running.task.done()


async def test_a_deadline_is_as_far_off_as_the_store_says(shop: Workshop) -> None:
    """By the store's clock, which may show any time; one that had passed before the claim ends the job at once."""
    running, loop = await shop.start(LONG), asyncio.get_running_loop()
    for due_ms, in_s in ((10_001_000, 10_000.0), (0, 0.0)):
        job = a_job(shop.queue, max_tokens=4000)
        claim = a_claim(job, created_ms=500, claimed_ms=1_000, deadline_ms=due_ms)
        before = loop.time()
        running.worker.begin(claim, NOTHING)
        deadline = running.worker._attempts[job.id].deadline
        assert deadline is not None and before + in_s <= deadline.when() <= loop.time() + in_s


async def test_an_unreadable_body_fails_its_job_alone(shop: Workshop, recorder: Recorder) -> None:
    """Garbage in the record becomes a failed job, which is counted; the worker lives on."""
    broken = await shop.put()
    await shop.wire.redis.hset(partition_key(0, "job", broken.id), "body", b"\xc1garbage")
    fine = await shop.put()
    await shop.start()
    assert (await shop.ended(fine)).state is JobState.COMPLETED
    record = await shop.ended(broken)
    assert record.state is JobState.FAILED and record.job.tenant == "t"
    (letter,) = await DeadLetters(shop.wire).recent(10)
    assert letter.job == broken.id and "unreadable" in letter.reason
    assert b'penstock_job_failures_total{code="malformed_job"} 1.0' in recorder.metrics.expose()


async def test_the_last_write_of_a_drain_keeps_what_is_handed_back(shop: Workshop) -> None:
    """Until a job is put back, the log has all that a shop.reader, or another worker after a loss, has to read."""
    job = await shop.put("handed", 4000)
    leaving = await shop.start(FAST, WorkerSettings(drain_s=0.2))
    lease, gate = leaving.worker.lease, asyncio.Event()
    await until(lambda: shop.has_deltas(job, 200))
    write, release, seqs = lease.calls, lease.release, list[int]()

    async def looked_at(*args: Any, **options: Any) -> None:
        seqs.extend([row.seq for row in await deltas_of(shop.reader, await shop.reader.record(job.id))])
        await release(*args, **options)

    async def held_up(calls: object) -> None:
        await gate.wait()
        await write(calls)  # type: ignore[arg-type]

    lease.calls = held_up  # type: ignore[method-assign]
    lease.release = looked_at  # type: ignore[method-assign]
    lease.send_nowait = lambda *_: False  # type: ignore[method-assign]  # so that all goes that way
    leaving.stop.set()
    await until(lambda: leaving.worker.running == 0)
    gate.set()
    await asyncio.wait_for(leaving.task, 20)
    record = await shop.reader.record(job.id)
    assert record.state is JobState.QUEUED and seqs == list(range(1, len(seqs) + 1)) and len(seqs) > 200
    assert [row.seq for row in await deltas_of(shop.reader, record)] == seqs


@dataclass
class TwoPartitions:
    """A worker of two partitions, which runs a long job in each."""

    wire: RedisClient
    worker: Worker
    task: asyncio.Task[None]
    stop: asyncio.Event
    jobs: list[Job]
    reasons: list[str]
    """For which it was cordoned."""


@asynccontextmanager
async def two_partitions(redis_url: str, recorder: Recorder, drain_s: float) -> AsyncIterator[TwoPartitions]:
    wire = RedisClient.open(RedisSettings(url=redis_url, lease_ms=1_000, partitions=2))
    queue, reasons, stop, workers = Queue(wire), list[str](), asyncio.Event(), list[Worker]()
    engine = SimEngine("m", SimSettings(step_ms=5, prefill_ms=1, slots=8))
    card = await engine.start(lambda step: [worker.on_step(step) for worker in workers], lambda _: None)
    worker = Worker(wire, engine, card, WorkerSettings(drain_s=drain_s), recorder, reasons.append)
    workers.append(worker)
    task = asyncio.create_task(worker.run(stop))
    jobs = [await put_job(queue, "x", 300, id=new_job_id(partition)) for partition in (0, 1)]
    await until(lambda: engine.stats().running == 2)
    try:
        yield TwoPartitions(wire, worker, task, stop, jobs, reasons)
    finally:
        task.cancel()
        await engine.stop()
        await wire.close()


async def test_a_drain_hands_back_beside_a_partition_that_is_away(
    redis_url: str, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other's job waits again at once, and it counts no loss; the drain ends."""
    async with two_partitions(redis_url, recorder, drain_s=0) as two:
        release = two.worker.lease.release

        async def away_in_one(job_id: str, *args: Any, **options: Any) -> None:
            if job_id == two.jobs[0].id:
                raise Unavailable("away")
            await release(job_id, *args, **options)

        monkeypatch.setattr(two.worker.lease, "release", away_in_one)
        two.stop.set()
        await asyncio.wait_for(two.task, 30)
        record = await JobReader(two.wire).record(two.jobs[1].id)
        assert record.state is JobState.QUEUED and [each.outcome for each in record.attempts] == ["handed_back"]


@pytest.mark.parametrize("draining", [False, True])
async def test_a_lease_lost_in_one_partition_abandons_no_job_of_another(
    redis_url: str, recorder: Recorder, draining: bool
) -> None:
    """Fenced in one of two partitions, before or in its drain: the other's jobs finish, and none counts as lost."""
    async with two_partitions(redis_url, recorder, drain_s=20) as two:
        wire, jobs = two.wire, two.jobs
        if draining:
            two.stop.set()
        await lose_lease(wire, two.worker)
        with pytest.raises(Fenced, match=r"\[0\]"):
            await asyncio.wait_for(two.task, 30)
        taken, kept = [await JobReader(wire).record(job.id) for job in jobs]
        assert (taken.state, kept.state) == (JobState.QUEUED, JobState.COMPLETED)
        assert text_of(kept) == expected("x", 300)
        assert await wire.redis.hget(partition_key(1, "job", jobs[1].id), "losses") is None
        assert two.reasons == ["its lease in partition 0 was taken"]
        assert await wire.redis.zscore(partition_key(1, "leases"), two.worker.lease.id) is None


async def test_a_claim_whose_lease_is_lost_meanwhile_begins_nothing(shop: Workshop) -> None:
    """The logs of its jobs were being read meanwhile; another worker has them by then."""
    running, job = await shop.start(), a_job(shop.queue)
    running.worker._lost.add(0)
    running.worker.begin(a_claim(job), NOTHING)
    assert not running.worker.running and not running.worker._starter.texts


async def test_a_job_that_ends_while_its_worker_leaves_is_not_handed_back(
    shop: Workshop, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its end is written behind the drain's time: it has its record and its line in the log."""
    written, handed_back, gate = list[str](), list[str](), asyncio.Event()
    monkeypatch.setattr(recorder, "written", lambda ends, *_: written.extend([end.job for _, end in ends]))
    monkeypatch.setattr(recorder, "released", handed_back.append)
    leaving = await shop.start(FAST, WorkerSettings(drain_s=0))
    lease = leaving.worker.lease
    write = lease.calls

    async def held_up(calls: object) -> None:
        await gate.wait()
        await write(calls)  # type: ignore[arg-type]

    lease.calls = held_up  # type: ignore[method-assign]
    lease.send_nowait = lambda *_: False  # type: ignore[method-assign]  # so that all goes that way
    job = await shop.put()
    await until(lambda: any(attempt.over for attempt in leaving.worker._attempts.values()))
    leaving.stop.set()
    await asyncio.sleep(0.2)
    gate.set()
    await asyncio.wait_for(leaving.task, 20)
    assert (await shop.reader.record(job.id)).state is JobState.COMPLETED
    assert (written, handed_back) == ([job.id], [])


async def test_a_lease_lost_everywhere_ends_the_worker_at_once(shop: Workshop) -> None:
    """There is nothing left to drain, however long the grace time is."""
    running = await shop.start(SimSettings(step_ms=20, prefill_ms=1), WorkerSettings(drain_s=600))
    await shop.put(max_tokens=4000)
    await until(lambda: running.engine.stats().running == 1)
    await lose_lease(shop.wire, running.worker)
    with pytest.raises(Fenced):
        await asyncio.wait_for(running.task, 20)


async def test_a_claim_whose_answer_was_lost_is_handed_back(shop: Workshop) -> None:
    """A job the server counts as this worker's, of which it knows nothing, does not wait for ever."""
    running = await shop.start()
    await until(lambda: _leased(shop.wire, running.worker.lease.id))
    job = await shop.put(model="other")
    # The claim as it would be made, its answer thrown away.
    await shop.wire.call("claim", 0, running.worker.lease.id, "other", 1, 1000, "", "", 100)

    async def back() -> bool:
        record = await shop.reader.record(job.id)
        return record.state is JobState.QUEUED and record.attempt == 1

    await until(back)


async def _leased(wire: RedisClient, lease: str) -> bool:
    return await wire.redis.zscore(partition_key(0, "leases"), lease) is not None


async def test_a_claim_that_is_slow_to_begin_is_not_taken_for_a_lost_one(shop: Workshop) -> None:
    """Reading what the job's last worker logged outlasts several heartbeats: the job is still begun once, by one."""
    lost = Lease(shop.wire, "m")
    job = await shop.put("slow", 30)
    await lost.register()
    await lost.claim(0, 1)
    await lost.release(job.id, 1)
    running = await shop.start()
    worker, beats = running.worker, 0
    reader = worker._claimer._reader
    read, beat = reader.history, worker.lease.beat
    several = asyncio.Event()

    async def counted(partition: int) -> dict[str, HeldJob]:
        nonlocal beats
        held = await beat(partition)
        beats += job.id in held
        if beats == 4:
            several.set()
        return held

    async def slow(job_id: str, runs: Sequence[LoggedRun]) -> History:
        await several.wait()
        return await read(job_id, runs)

    worker.lease.beat = counted  # type: ignore[method-assign]
    reader.history = slow  # type: ignore[method-assign]
    record = await shop.ended(job)
    assert record.state is JobState.COMPLETED and record.attempt == 2 and len(record.runs) == 2
    assert text_of(record) == expected("slow", 30)


async def test_a_heartbeat_that_meets_the_lease_given_up_is_no_loss(shop: Workshop) -> None:
    """A drained worker has left; a beat that comes after it is refused, and the drain still ends well."""
    running = await shop.start()
    lease, refused = running.worker.lease, asyncio.Event()
    await until(lambda: _leased(shop.wire, lease.id))
    leave, beat = lease.leave, lease.beat

    async def left() -> int:
        held = await leave()
        await asyncio.wait_for(refused.wait(), 20)
        return held

    async def beaten(partition: int) -> dict[str, HeldJob]:
        try:
            return await beat(partition)
        except Fenced:
            refused.set()
            raise

    lease.leave, lease.beat = left, beaten  # type: ignore[method-assign]
    running.stop.set()
    await asyncio.wait_for(running.task, 20)
    assert refused.is_set()


def test_a_job_whose_end_is_being_written_is_not_dropped() -> None:
    """The store has ended it already, and the answer to that is on its way: it is no job that was taken away."""
    ending, running = (
        SimpleNamespace(job=SimpleNamespace(id=name), run_number=1, over=name == "ending")
        for name in ("ending", "running")
    )
    held: Any = SimpleNamespace(of=lambda partition: [ending, running])
    comparison = BeatComparison(held, 0)
    assert comparison.taken({}) == set(), "it may have been claimed since"
    assert comparison.taken({}) == {("running", 1)}


def test_a_job_of_which_the_worker_knows_nothing_is_a_stray_in_the_second_beat() -> None:
    """And not while a claim is in flight, which may bring it: it is counted from its reply on."""
    held: Any = SimpleNamespace(holds=lambda job_id, number: (job_id, number) == ("held", 1))
    comparison, counted = BeatComparison(held, 0), {"held": HeldJob(1, False), "stray": HeldJob(2, False)}
    found = [comparison.strays(counted, may_claim=claims) for claims in (False, False, True, False, False)]
    assert found == [set(), {("stray", 2)}, set(), set(), {("stray", 2)}]


async def test_a_request_the_engine_cannot_run_fails_with_its_reason(shop: Workshop) -> None:
    """An option that this engine does not have: 400 in the record, and the next job runs."""
    await shop.start()
    odd, fine = await shop.put(sampling=Sampling(json_schema={})), await shop.put()
    record = await shop.ended(odd)
    assert (failure_of(record).code, failure_of(record).status) == ("invalid_request_error", 400)
    assert (await shop.ended(fine)).state is JobState.COMPLETED
