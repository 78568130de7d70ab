"""The worker with the simulated engine on a real server: claims, deltas, ends, cancels, drains, losses."""

from __future__ import annotations

import asyncio
import contextlib
import os
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from flow import append, delta, deltas_of
from house import free_port, redis_process
from msgspec.structs import replace

from streaming.errors import Fenced
from streaming.fleet.leader import Leadership
from streaming.fleet.plans import Plans
from streaming.ids import new_job_id
from streaming.jobs.cards import Capabilities, ModelCard
from streaming.jobs.codec import decode_reply, encode
from streaming.jobs.control import Control, Follow
from streaming.jobs.dead_letters import DeadLetters
from streaming.jobs.frames import Frame, Opening
from streaming.jobs.history import NOTHING, History, LoggedRun
from streaming.jobs.job import Chat, ChatTurn, Job, JobState, Sampling, Text
from streaming.jobs.lease import Claim, Claimed, Finish, HeldJob, Lease, UnreadableClaim
from streaming.jobs.queue import Queue
from streaming.jobs.reader import JobReader
from streaming.jobs.reaper import Reaper
from streaming.jobs.records import JobRecord
from streaming.jobs.terminal import Failure, Terminal
from streaming.keys import channel, partition_key
from streaming.priority import Priority
from streaming.redis.client import RedisClient
from streaming.settings import RedisSettings
from telemetry.metrics import Metrics
from telemetry.tracing import Tracing
from workers.attempt import Attempt
from workers.claimer import MAX_PAUSE_S, MIN_PAUSE_S, Claimer, reserved_slots, room, room_for_batch
from workers.engines.base import Piece, Request, Stats, Step
from workers.engines.sim.engine import SimEngine, prompt_text, token_text
from workers.engines.sim.settings import SimSettings
from workers.record import Recorder
from workers.settings import WorkerSettings
from workers.worker import Worker

FAST = SimSettings(step_ms=1, prefill_ms=1, slots=8)
LONG = SimSettings(step_ms=5, prefill_ms=1, slots=8, context=8192)


@pytest.fixture(scope="module")
def recorder() -> Recorder:
    return Recorder("m", Metrics.start("", "worker"), Tracing())


@dataclass
class Running:
    worker: Worker
    stop: asyncio.Event
    task: asyncio.Task[None]
    engine: SimEngine


Start = Callable[..., Awaitable[Running]]


@pytest.fixture
async def start(wire: RedisClient, recorder: Recorder) -> AsyncIterator[Start]:
    """Starts workers; ends them all after the test."""
    started: list[Running] = []

    async def begin(
        sim: SimSettings = FAST, settings: WorkerSettings | None = None, engine: type[SimEngine] = SimEngine
    ) -> Running:
        return await begin_with(engine("m", sim), settings)

    async def begin_with(engine: SimEngine, settings: WorkerSettings | None) -> Running:
        pieces: list[Piece] = []
        running: list[Running] = []
        card = await engine.start(
            lambda step: running[0].worker.on_step(step) if running else pieces.extend(step), lambda _: None
        )
        worker, stop = Worker(wire, engine, card, settings or WorkerSettings(drain_s=5), recorder), asyncio.Event()
        running.append(Running(worker, stop, asyncio.create_task(worker.run(stop)), engine))
        started.append(running[0])
        return running[0]

    yield begin
    for running in started:
        running.task.cancel()
        await asyncio.gather(running.task, return_exceptions=True)
        await running.engine.stop()


def a_job(queue: Queue, text: str = "hello", max_tokens: int = 10, **changes: object) -> Job:
    fields: dict[str, object] = {
        "id": queue.new_id("t"), "model": "m", "tenant": "t", "priority": Priority.STANDARD,
        "prompt": Chat((ChatTurn("user", text),)), "sampling": Sampling(max_tokens=max_tokens),
    }  # fmt: skip
    return Job(**{**fields, **changes})  # type: ignore[arg-type]


def expected(text: str, tokens: int) -> str:
    prompt = prompt_text((ChatTurn("user", text),))
    return "".join(token_text(prompt, index) for index in range(tokens))


async def until(condition: Callable[[], Awaitable[bool]], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not await condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        await asyncio.sleep(0.01)


async def ended(wire: RedisClient, job_id: str) -> JobRecord:
    journal = JobReader(wire)

    async def final() -> bool:
        return (await journal.record(job_id)).state.final

    await until(final)
    return await journal.record(job_id)


def text_of(record: JobRecord, index: int = 0) -> str:
    assert record.terminal is not None
    return "".join(row.text for row in record.terminal.rows if row.index == index)


async def test_many_jobs_run_together_and_each_text_is_exact(wire: RedisClient, start: Start) -> None:
    """More jobs than slots: all complete, byte for byte, and every delta is numbered without a gap."""
    queue = Queue(wire)
    await start()
    jobs = [a_job(queue, f"job {number}", 20) for number in range(20)]
    await asyncio.gather(*(queue.put(job) for job in jobs))
    for number, job in enumerate(jobs):
        record = await ended(wire, job.id)
        assert record.state is JobState.COMPLETED and text_of(record) == expected(f"job {number}", 20)
        assert record.terminal is not None and [row.seq for row in record.terminal.rows] == list(range(1, 21))
        assert record.terminal.usage.completion == 20 and record.terminal.finishes == ("length",)
        assert record.created_ms <= record.started_ms <= record.first_ms <= record.done_ms


async def test_choices_prompts_and_stop_strings(wire: RedisClient, start: Start) -> None:
    """Two prompts times two choices are four texts; a stop string cuts each before it."""
    queue = Queue(wire)
    await start()
    job = a_job(queue, prompt=Text(("one", "two")), sampling=Sampling(max_tokens=5, n=2))
    await queue.put(job)
    record = await ended(wire, job.id)
    assert [text_of(record, index) for index in range(4)] == [
        "".join(token_text(prompt, index) for index in range(5)) for prompt in ("one", "one", "two", "two")
    ]
    whole = expected("stop me", 10)
    stop = whole[12:20]
    stopped = a_job(queue, "stop me", sampling=Sampling(max_tokens=10, stop=(stop,)))
    await queue.put(stopped)
    record = await ended(wire, stopped.id)
    assert text_of(record) == whole[: whole.index(stop)]
    assert record.terminal is not None and record.terminal.finishes == ("stop",)


async def test_a_request_the_engine_cannot_run_fails_with_its_reason(wire: RedisClient, start: Start) -> None:
    """Too long, or an option this engine does not have: 400 in the record, and the next job runs."""
    queue = Queue(wire)
    await start()
    too_long, odd, fine = (
        a_job(queue, "x" * 50_000),
        a_job(queue, sampling=Sampling(json_schema={})),
        a_job(queue),
    )
    for job in (too_long, odd, fine):
        await queue.put(job)
    for job, code in ((too_long, "context_length_exceeded"), (odd, "invalid_request_error")):
        record = await ended(wire, job.id)
        assert record.state is JobState.FAILED and record.terminal is not None and record.terminal.failure is not None
        assert (record.terminal.failure.code, record.terminal.failure.status) == (code, 400)
    assert (await ended(wire, fine.id)).state is JobState.COMPLETED


async def test_cancel_and_deadline_end_a_running_job_and_free_its_slot(wire: RedisClient, start: Start) -> None:
    """The engine forgets the request; what was generated before stays readable."""
    queue = Queue(wire)
    running = await start(SimSettings(step_ms=5, prefill_ms=1, slots=2))
    cancelled, late = a_job(queue, max_tokens=4000), a_job(queue, max_tokens=4000, deadline_ms=300)
    await queue.put(cancelled)
    await queue.put(late)

    async def both_run() -> bool:
        return running.engine.stats().running == 2

    await until(both_run)
    await queue.cancel(cancelled.id)
    assert (await ended(wire, cancelled.id)).state is JobState.CANCELLED
    assert (await ended(wire, late.id)).state is JobState.EXPIRED

    async def quiet() -> bool:
        return running.engine.stats().running == 0 and running.worker.running == 0

    await until(quiet)


async def test_a_cancel_waits_for_no_heartbeat(wire: RedisClient, start: Start) -> None:
    """The worker is told of it; that heartbeats say it too is for words that were lost."""
    queue = Queue(wire)
    running = await start(LONG)
    beat, job = running.worker.lease.beat, a_job(queue, max_tokens=8000)

    async def silent(partition: int) -> dict[str, HeldJob]:
        return {job_id: HeldJob(held.number, cancelled=False) for job_id, held in (await beat(partition)).items()}

    running.worker.lease.beat = silent  # type: ignore[method-assign]
    await queue.put(job)

    async def runs() -> bool:
        return running.engine.stats().running == 1

    await until(runs)
    await queue.cancel(job.id)
    assert (await ended(wire, job.id)).state is JobState.CANCELLED


async def test_a_job_cancelled_before_its_claim_is_answered_is_not_computed(wire: RedisClient, start: Start) -> None:
    """The worker hears of the cancel when it does not know the job yet."""
    queue, running = Queue(wire), await start()
    lease, job = running.worker.lease, a_job(queue)
    claim = lease.claim

    async def is_heard() -> bool:
        return running.worker._claimer.was_cancelled(job.id)

    async def claimed(partition: int, want: int, *, alone: bool = False, lowest: int | None = None) -> Claimed:
        answer = await claim(partition, want, alone=alone, lowest=lowest)
        if answer.jobs:
            await queue.cancel(job.id)
            await until(is_heard)
        return answer

    lease.claim = claimed  # type: ignore[method-assign]
    await queue.put(job)
    assert (await ended(wire, job.id)).state is JobState.CANCELLED
    assert running.engine.stats().steps == 0 and not running.task.done()


async def test_a_deadline_is_as_far_off_as_the_store_says(wire: RedisClient, start: Start) -> None:
    """By the store's clock, which may show any time; one that had passed before the claim ends the job at once."""
    running, loop = await start(LONG), asyncio.get_running_loop()
    for due_ms, in_s in ((10_001_000, 10_000.0), (0, 0.0)):
        job = a_job(Queue(wire), max_tokens=4000)
        claim = Claim(
            job=job, partition=0, attempt=1, number=1, created_ms=500, claimed_ms=1_000, deadline_ms=due_ms,
            reply=(), past=(), first_frame=1,
        )  # fmt: skip
        before = loop.time()
        running.worker.begin(claim, NOTHING)
        deadline = running.worker._attempts[job.id].deadline
        assert deadline is not None and before + in_s <= deadline.when() <= loop.time() + in_s


async def test_a_drained_worker_finishes_or_hands_over(wire: RedisClient, start: Start) -> None:
    """Short jobs finish within the grace time; a long one goes on elsewhere from its logged tokens, exactly."""
    queue = Queue(wire)
    first = await start(SimSettings(step_ms=2, prefill_ms=1), WorkerSettings(drain_s=0.3))
    short, long = a_job(queue, "short", 20), a_job(queue, "long", 600)
    await queue.put(short)
    await queue.put(long)

    async def both_run() -> bool:
        return first.engine.stats().running == 2

    await until(both_run)
    first.stop.set()
    await asyncio.wait_for(first.task, 20)
    assert (await ended(wire, short.id)).state is JobState.COMPLETED
    handed = await JobReader(wire).record(long.id)
    assert handed.state is JobState.QUEUED and handed.attempt == 1
    await start()
    record = await ended(wire, long.id)
    assert text_of(record) == expected("long", 600)
    assert len(record.runs) == 2


async def test_a_lost_workers_job_goes_on_where_its_log_ends(wire: RedisClient, start: Start) -> None:
    """A worker that vanishes in mid-sentence is fenced after its lease, and another one completes the same text."""
    queue = Queue(wire)
    lost = await start(SimSettings(step_ms=5, prefill_ms=1))
    job = a_job(queue, "go on", 300)
    await queue.put(job)
    journal = JobReader(wire)

    async def has_tokens() -> bool:
        return len(await deltas_of(journal, await journal.record(job.id))) >= 20

    await until(has_tokens)
    lost.task.cancel()  # neither writes nor beats any more
    with contextlib.suppress(asyncio.CancelledError):
        await lost.task

    async def reaped() -> bool:
        return (await Reaper(wire).sweep()).requeued == 1

    await until(reaped)
    await start()
    record = await ended(wire, job.id)
    assert record.attempt == 2 and text_of(record) == expected("go on", 300)
    assert record.terminal is not None and [row.seq for row in record.terminal.rows] == list(range(1, 301))


async def test_an_unreadable_body_fails_its_job_alone(wire: RedisClient, start: Start) -> None:
    """Garbage in the record becomes a failed job; the worker lives on."""
    queue = Queue(wire)
    broken, fine = a_job(queue), a_job(queue)
    await queue.put(broken)
    await wire.redis.hset(partition_key(0, "job", broken.id), "body", b"\xc1garbage")
    await queue.put(fine)
    await start()
    assert (await ended(wire, fine.id)).state is JobState.COMPLETED

    record = await ended(wire, broken.id)
    assert record.state is JobState.FAILED and record.job.tenant == "t"
    (letter,) = await DeadLetters(wire).recent(10)
    assert letter.job == broken.id and "unreadable" in letter.reason


async def test_a_claim_whose_answer_was_lost_is_handed_back(wire: RedisClient, start: Start) -> None:
    """A job the server counts as this worker's, of which it knows nothing, does not wait for ever."""
    queue = Queue(wire)
    running = await start()
    await until(lambda: _leased(wire, running.worker.lease.id))
    job = a_job(queue, model="other")
    await queue.put(job)
    # The claim as it would be made, its answer thrown away.
    await wire.call("claim", 0, running.worker.lease.id, "other", 1, 1000, "", "", 100)

    async def back() -> bool:
        record = await JobReader(wire).record(job.id)
        return record.state is JobState.QUEUED and record.attempt == 1

    await until(back)


async def _leased(wire: RedisClient, lease: str) -> bool:
    return await wire.redis.zscore(partition_key(0, "leases"), lease) is not None


async def test_a_claim_that_is_slow_to_begin_is_not_taken_for_a_lost_one(wire: RedisClient, start: Start) -> None:
    """Reading what the job's last worker logged outlasts several heartbeats: the job is still begun once, by one."""
    queue, lost = Queue(wire), Lease(wire, "m")
    job = a_job(queue, "slow", 30)
    await queue.put(job)
    await lost.register()
    await lost.claim(0, 1)
    await lost.release(job.id, 1)
    running = await start()
    worker, beats = running.worker, 0
    journal = worker._claimer._journal
    read, beat = journal.history, worker.lease.beat
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
    journal.history = slow  # type: ignore[method-assign]
    record = await ended(wire, job.id)
    assert record.state is JobState.COMPLETED and record.attempt == 2 and len(record.runs) == 2
    assert text_of(record) == expected("slow", 30)


async def test_a_heartbeat_that_meets_the_lease_given_up_is_no_loss(wire: RedisClient, start: Start) -> None:
    """A drained worker has left; a beat that comes after it is refused, and the drain still ends well."""
    running = await start()
    lease, refused = running.worker.lease, asyncio.Event()
    await until(lambda: _leased(wire, lease.id))
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


async def test_a_store_that_lost_frames_gets_them_again(wire: RedisClient, start: Start) -> None:
    """The worker still has every token of its running jobs: the log is made whole and the text stays exact."""
    queue, journal = Queue(wire), JobReader(wire)
    running = await start(SimSettings(step_ms=5, prefill_ms=1))
    job = a_job(queue, "set back", 200)
    await queue.put(job)

    async def has_tokens() -> bool:
        return len(await deltas_of(journal, await journal.record(job.id))) >= 30

    await until(has_tokens)
    # As after a power loss: the last frames are gone, and the worker's frame number with them.
    lease = running.worker.lease.id
    await wire.redis.hset(partition_key(0, "worker", lease), "frame", 10)
    await wire.redis.xtrim(partition_key(0, "log", lease), maxlen=0, approximate=False)
    record = await ended(wire, job.id)
    assert record.attempt == 1 and text_of(record) == expected("set back", 200)


async def test_suspects_run_alone_and_the_innocent_complete(wire: RedisClient, start: Start) -> None:
    """Jobs that lost two workers are run one at a time; nothing runs beside them."""
    queue = Queue(wire)
    jobs = [a_job(queue, f"suspect {number}", 20) for number in range(3)]
    for job in jobs:
        await queue.put(job)
    for _ in range(2):
        lease = Lease(wire, "m")
        await lease.register()
        assert len((await lease.claim(0, 5)).jobs) == 3
        await wire.redis.zadd(partition_key(0, "leases"), {lease.id: 1})
        await Reaper(wire).sweep()
    running = await start()
    most, deadline = 0, time.monotonic() + 30
    while not all([(await JobReader(wire).record(job.id)).state.final for job in jobs]):
        assert not running.task.done() and time.monotonic() < deadline, running.task
        most = max(most, running.worker.running)
        await asyncio.sleep(0.002)
    for number, job in enumerate(jobs):
        record = await ended(wire, job.id)
        assert record.state is JobState.COMPLETED and text_of(record) == expected(f"suspect {number}", 20)
        assert record.attempt == 3
    assert most == 1
    after = a_job(queue, "after", 5)
    await queue.put(after)
    assert (await ended(wire, after.id)).state is JobState.COMPLETED


async def test_the_next_worker_numbers_on_where_the_log_ends(wire: RedisClient, start: Start) -> None:
    """No delta has two authors: what the lost worker has said is never said anew."""
    queue, lost = Queue(wire), Lease(wire, "m")
    job = a_job(queue, "on", 20)
    await queue.put(job)
    await lost.register()
    (claim,) = (await lost.claim(0, 1)).jobs
    assert isinstance(claim, Claim)
    prompt = prompt_text((ChatTurn("user", "on"),))
    rows = [delta(claim, index + 1, token_text(prompt, index)) for index in range(5)]
    await lost.calls([append(lost, {"-": rows}, claim)])
    await wire.redis.zadd(partition_key(0, "leases"), {lost.id: 1})
    assert (await Reaper(wire).sweep()).requeued == 1
    heir = await start()
    assert text_of(await ended(wire, job.id)) == expected("on", 20)
    frames = [frame async for frame in JobReader(wire).frames(0, heir.worker.lease.id, 1)]
    assert [row.seq for frame in frames for row in frame.rows] == list(range(6, 21))


@pytest.mark.parametrize("stream", [True, False])
async def test_a_long_job_does_not_keep_the_whole_log(wire: RedisClient, start: Start, stream: bool) -> None:
    """Its tokens are logged anew now and then and what lies before is trimmed, beside neighbours that come and go; a
    reader from the beginning, and the next worker, find all of them."""
    queue, journal, settings = Queue(wire), JobReader(wire), WorkerSettings(checkpoint_frames=150)
    first = await start(SimSettings(step_ms=1, prefill_ms=1), settings)
    earlier = a_job(queue, "before", 40)
    await queue.put(earlier)
    await ended(wire, earlier.id)
    long = a_job(queue, "long", 3000, stream=stream)
    await queue.put(long)
    log, most = partition_key(0, "log", first.worker.lease.id), 0

    async def far() -> bool:
        nonlocal most
        most = max(most, await wire.redis.xlen(log))
        return len((await journal.history(long.id, (await journal.record(long.id)).runs)).rows) >= 1800

    await until(far, 60)
    written = first.worker.lease.next_frame(0)
    assert most < 0.7 * written, f"{most} of {written} frames were kept"
    record = await journal.record(long.id)
    history = await journal.history(long.id, record.runs)
    assert history.whole and record.runs[0].frame > 150
    first.task.cancel()
    await asyncio.gather(first.task, return_exceptions=True)
    await wire.redis.zadd(partition_key(0, "leases"), {first.worker.lease.id: 1})
    assert (await Reaper(wire).sweep()).requeued == 1
    await start(SimSettings(step_ms=1, prefill_ms=1), settings)
    done = await ended(wire, long.id)
    assert text_of(done) == expected("long", 3000) and done.attempt == 2 and done.epoch == record.epoch


async def test_a_job_whose_log_has_a_hole_begins_anew(wire: RedisClient, start: Start) -> None:
    """Half of what the lost worker logged is gone: neither a splice nor a shorter text, and a new epoch says so."""
    queue, journal, lost = Queue(wire), JobReader(wire), Lease(wire, "m")
    job = a_job(queue, "hole", 20)
    await queue.put(job)
    await lost.register()
    (claim,) = (await lost.claim(0, 1)).jobs
    assert isinstance(claim, Claim)
    for first in (1, 4):
        rows = [delta(claim, seq, "lost") for seq in range(first, first + 3)]
        await lost.calls([append(lost, {"-": rows}, claim)])
    await wire.redis.xdel(partition_key(0, "log", lost.id), "1-0")
    before = (await journal.record(job.id)).epoch
    await wire.redis.zadd(partition_key(0, "leases"), {lost.id: 1})
    assert (await Reaper(wire).sweep()).requeued == 1
    heir = await start()
    record = await ended(wire, job.id)
    assert text_of(record) == expected("hole", 20) and record.terminal is not None
    assert [row.seq for row in record.terminal.rows] == list(range(1, 21))
    assert [logged.run.worker for logged in record.runs] == [heir.worker.lease.id]
    assert record.epoch == before + 1 and record.attempt == 2


@pytest.mark.parametrize("shape", [{"sampling": Sampling(max_tokens=60)}, {"sampling": Sampling(max_tokens=60, n=2)}])
async def test_a_worker_that_is_given_a_job_it_still_runs_lets_the_old_run_go(
    wire: RedisClient, start: Start, shape: dict[str, object]
) -> None:
    """The store forgot its claim, as after a failover: two runs of one job on one engine never mix."""
    queue, journal = Queue(wire), JobReader(wire)
    running = await start(SimSettings(step_ms=20, prefill_ms=1))
    job = a_job(queue, "twice", 60, **shape)
    await queue.put(job)

    async def has_tokens() -> bool:
        return len(await deltas_of(journal, await journal.record(job.id))) >= 10

    await until(has_tokens)
    lane = partition_key(0, "lane", "m", job.priority)
    old = (await journal.record(job.id)).entry
    await wire.redis.xack(lane, "workers", old)
    await wire.redis.xdel(lane, old)
    entry = await wire.redis.xadd(lane, {"job": job.id})
    key = partition_key(0, "job", job.id)
    await wire.redis.hdel(key, "worker", "attempt", "run", "runs", "claimed")
    await wire.redis.hset(key, mapping={"state": "queued", "entry": entry})
    await wire.redis.srem(partition_key(0, "claims", running.worker.lease.id), job.id)
    record = await ended(wire, job.id)
    assert record.terminal is not None and record.attempt == 1
    for index in range(job.choices):
        assert text_of(record, index) == expected("twice", 60)
    assert [row.seq for row in record.terminal.rows] == list(range(1, 60 * job.choices + 1))
    assert record.terminal.usage.completion == 60 * job.choices
    assert len(record.terminal.sections) == 1 and running.worker.running == 0 and not running.worker.texts


async def test_a_run_is_opened_once_to_each_who_listens(wire: RedisClient, start: Start) -> None:
    """The job's id goes out with the first tokens an address gets, then the run's number stands for it."""
    queue = Queue(wire)
    job = a_job(queue, "named", 300, stream=True, reply_to="first")
    await queue.put(job)
    running = await start()
    lease, journal = running.worker.lease, JobReader(wire)

    async def logged() -> list[dict[str, Frame]]:
        entries = await wire.redis.xrange(partition_key(0, "log", lease.id))
        steps = [{key.decode(): decode_reply(data) for key, data in fields.items()} for _, fields in entries]
        return cast(list[dict[str, Frame]], steps)

    async def begun() -> bool:
        return len(await logged()) > 20

    await until(begun)
    await queue.follow(job.id, "second")
    await ended(wire, job.id)
    steps = await logged()
    for address in ("first", "second"):
        frames = [step[address] for step in steps if address in step]
        (number,) = frames[0].openings
        assert frames[0].openings == {number: Opening(job.id)} and {row.stream for row in frames[0].rows} == {number}
        again = [frame for frame in frames[1:] if frame.openings]
        assert len(again) == (address == "first"), "the first listener hears it once more when another comes"
        assert {row.stream for frame in frames for row in frame.rows} == {number}
    assert len(await deltas_of(journal, await journal.record(job.id))) == 300


async def test_the_last_write_of_a_drain_keeps_what_is_handed_back(wire: RedisClient, start: Start) -> None:
    """It trims nothing that the next worker, or a reader who resumes, has to read."""
    queue, journal = Queue(wire), JobReader(wire)
    job = a_job(queue, "handed", 4000)
    await queue.put(job)
    leaving = await start(FAST, WorkerSettings(drain_s=0.2))
    lease, gate = leaving.worker.lease, asyncio.Event()

    async def has_tokens() -> bool:
        return len(await deltas_of(journal, await journal.record(job.id))) >= 200

    await until(has_tokens)
    write = lease.calls

    async def held_up(calls: object) -> None:
        await gate.wait()
        await write(calls)  # type: ignore[arg-type]

    lease.calls = held_up  # type: ignore[method-assign]
    lease.begin = lambda *_: False  # type: ignore[method-assign,assignment]  # so that all goes that way
    leaving.stop.set()

    async def handed_back() -> bool:
        return leaving.worker.running == 0

    await until(handed_back)
    gate.set()
    await asyncio.wait_for(leaving.task, 20)
    record = await journal.record(job.id)
    seqs = [row.seq for row in await deltas_of(journal, record)]
    assert record.state is JobState.QUEUED and seqs == list(range(1, len(seqs) + 1)) and len(seqs) > 200


async def test_slots_are_kept_for_higher_lanes(wire: RedisClient, start: Start) -> None:
    """However much waits in lane batch, it leaves them empty, and a chat is begun at once; of several choices too."""
    slow = SimSettings(step_ms=20, prefill_ms=1, slots=8)
    running = await start(slow, WorkerSettings(reserved_slots=2, drain_s=5))
    queue = Queue(wire)

    async def six_run() -> list[object]:
        async def so() -> bool:
            return len(running.engine._batch.running) == 6

        await until(so)
        return list(running.engine._batch.running)

    for number in range(20):
        await queue.put(a_job(queue, f"line {number}", 400, priority=Priority.BATCH))
    held = {id(each) for each in await six_run()}
    await asyncio.sleep(0.6)
    assert running.worker.running == 6 and running.worker.reserved == 2
    chats = [await queue.put(a_job(queue, f"chat {number}", 3, priority=priority))
             for number, priority in enumerate((Priority.INTERACTIVE, Priority.STANDARD))]  # fmt: skip
    for chat in chats:
        assert (await ended(wire, chat.id)).state is JobState.COMPLETED
    assert {id(each) for each in running.engine._batch.running} == held, "a chat waited for a line to end"


@pytest.mark.parametrize(
    ("slots", "wanted", "kept"),
    [(256, None, 4), (4, None, 1), (2, None, 1), (1, None, 0), (8, 0, 0), (8, 3, 3), (8, 99, 7)],
)
def test_how_many_slots_are_kept(slots: int, wanted: int | None, kept: int) -> None:
    """One in sixty-four, at least one, never all."""
    assert reserved_slots(slots, wanted) == kept


@pytest.mark.parametrize(
    ("stats", "texts", "fit"),
    [
        (Stats(slots=8), 0, 10),
        (Stats(slots=8), 9, 1),
        (Stats(slots=8), 12, -2),
        (Stats(slots=64, kv_tokens=1000), 0, 4),
        (Stats(slots=64, kv_tokens=1000, waiting=1), 63, 3),
        (Stats(slots=64, kv_tokens=1000, waiting=2), 10, 0),
    ],
)
def test_how_many_jobs_fit(stats: Stats, texts: int, fit: int) -> None:
    """Slots and a prefetch of two; where the KV cache is the limit, few at once, and none while what came waits."""
    assert room(stats, texts, 2) == fit


@pytest.mark.parametrize(("batch_texts", "more"), [(0, 6), (6, 0), (7, 0)])
def test_how_many_lines_of_a_batch_fit(batch_texts: int, more: int) -> None:
    """The slots kept for others stay empty; with none kept there is no limit."""
    assert room_for_batch(8, 2, batch_texts) == more
    assert room_for_batch(8, 0, batch_texts) is None


# --- several shapes --------------------------------------------------------------------------------------------------


async def hold(wire: RedisClient, running: Running, for_ms: int) -> None:
    """As the leader says it: again and again, for who does not listen yet hears nothing."""
    lead = await Leadership(wire).claim("s", 60_000)

    async def heard() -> bool:
        assert await Plans(wire).publish(lead, [], holds={running.worker.lease.id: for_ms})
        await asyncio.sleep(0.05)
        return running.worker._claimer._is_held(0) == (for_ms > 0)

    await until(heard)


async def test_a_held_worker_leaves_new_jobs_to_others_and_finishes_its_own(wire: RedisClient, start: Start) -> None:
    """Ten jobs go to the other worker; once it may again, the held one takes the next."""
    queue = Queue(wire)
    held = await start(SimSettings(step_ms=5, prefill_ms=1, slots=8))
    long = a_job(queue, "long", 200)
    await queue.put(long)
    await until(lambda: _runs(held, 1))
    await hold(wire, held, 60_000)
    other = await start()
    for number in range(10):
        job = a_job(queue, f"job {number}")
        await queue.put(job)
        record = await ended(wire, job.id)
        assert record.terminal is not None and record.terminal.worker == other.worker.lease.id
    record = await ended(wire, long.id)
    assert record.terminal is not None and (record.terminal.worker, record.attempt) == (held.worker.lease.id, 1)
    other.stop.set()
    await other.task
    await hold(wire, held, 0)
    last = a_job(queue)
    await queue.put(last)
    assert (await ended(wire, last.id)).state is JobState.COMPLETED


async def test_a_hold_that_is_not_said_again_is_over(wire: RedisClient, start: Start) -> None:
    """With no scheduler left, a job waits no longer than the hold was for."""
    queue, running = Queue(wire), await start()
    await hold(wire, running, 400)
    job = a_job(queue)
    await queue.put(job)
    assert (await ended(wire, job.id)).state is JobState.COMPLETED


async def test_whoever_may_have_to_run_suspects_is_not_held_from_them(wire: RedisClient, start: Start) -> None:
    """One worker of a model runs them; were it held, nobody would. The same while it does not know whether it is that
    one, for its last claim was not answered."""
    running = await start()
    await hold(wire, running, 60_000)
    claimer = running.worker._claimer
    assert claimer._wanted(0) == 0
    for partitions in (claimer._suspects, claimer._unanswered):
        partitions.add(0)
        assert claimer._wanted(0) > 0
        partitions.clear()


async def _runs(running: Running, jobs: int) -> bool:
    return running.worker.running == jobs


async def test_a_job_of_a_newer_version_waits_for_a_newer_worker(wire: RedisClient, start: Start) -> None:
    """It is put back unclaimed, without a dead letter and without spinning, and what this worker can read behind it
    runs."""
    queue = Queue(wire)
    newer = [a_job(queue, max_queue_ms=3_600_000) for _ in range(3)]
    for job in newer:
        await queue.put(job)
        fields = msgspec.msgpack.decode(encode(job))
        body = msgspec.msgpack.encode(fields | {"v": 2, "prompt": {"kind": "new"}})
        await wire.redis.hset(partition_key(0, "job", job.id), "body", body)
    running = await start(SimSettings(step_ms=1, prefill_ms=1, slots=2))
    fine = [a_job(queue) for _ in range(5)]
    for job in fine:
        await queue.put(job)
    for job in fine:
        assert (await ended(wire, job.id)).state is JobState.COMPLETED
    before = (await wire.redis.info("commandstats"))["cmdstat_xreadgroup"]["calls"]
    await asyncio.sleep(2)
    assert (await wire.redis.info("commandstats"))["cmdstat_xreadgroup"]["calls"] - before < 40
    for job in newer:
        async with asyncio.timeout(20):  # it may be in a claim just now
            while (record := await JobReader(wire).record(job.id)).state is not JobState.QUEUED:
                await asyncio.sleep(0.01)
        assert (record.attempt, record.runs, record.started_ms) == (0, (), 0) and record.fault
        assert await wire.redis.zscore(partition_key(0, "timers"), job.id) is not None
    assert await DeadLetters(wire).recent(10) == [] and running.worker.running == 0
    await queue.cancel(newer[0].id)
    running.stop.set()
    await asyncio.wait_for(running.task, 20)  # nothing of them is held


async def test_a_job_that_a_newer_worker_began_waits_for_one(wire: RedisClient, start: Start) -> None:
    """Its body can be read, the log of its first attempt cannot: it is not begun anew, and not failed."""
    queue, lost = Queue(wire), Lease(wire, "m")
    job = a_job(queue, max_tokens=5)
    await queue.put(job)
    await lost.register()
    await lost.claim(0, 1)
    frame = msgspec.msgpack.encode(["f2", lost.id, 1, {}])
    await wire.redis.xadd(partition_key(0, "log", lost.id), {"-": frame}, id="1-0")
    await lost.release(job.id, 1)
    await start()
    fine = a_job(queue)
    await queue.put(fine)
    assert (await ended(wire, fine.id)).state is JobState.COMPLETED
    async with asyncio.timeout(20):
        while (record := await JobReader(wire).record(job.id)).state is not JobState.QUEUED:
            await asyncio.sleep(0.01)
    assert record.attempt == 1 and [logged.run.worker for logged in record.runs] == [lost.id]


@pytest.mark.parametrize("spoiled", ["runs", "body"])
async def test_a_record_spoiled_between_two_attempts_ends_no_worker(
    wire: RedisClient, start: Start, spoiled: str
) -> None:
    """The second claim finds a record it cannot read, or a job that has failed since; the worker goes on."""
    queue, lost = Queue(wire), Lease(wire, "m")
    job = a_job(queue)
    await queue.put(job)
    await lost.register()
    await lost.claim(0, 1)
    await lost.release(job.id, 1)
    await wire.redis.hset(partition_key(0, "job", job.id), spoiled, b"\xc1x")
    running, fine = await start(), a_job(queue)
    await queue.put(fine)
    assert (await ended(wire, fine.id)).state is JobState.COMPLETED
    assert (await ended(wire, job.id)).state is JobState.FAILED and not running.task.done()
    (letter,) = await DeadLetters(wire).recent(10)
    assert letter.job == job.id and "unreadable" in letter.reason


async def test_a_store_that_is_away_at_the_start_is_waited_for(tmp_path: Path, recorder: Recorder) -> None:
    """The model is loaded: a store that comes late, or goes while the lease is taken, is no reason to load it again."""
    port, workers = free_port(), list[Worker]()
    wire = RedisClient.open(RedisSettings(url=f"redis://127.0.0.1:{port}/0", lease_ms=1_000, timeout_s=0.5))
    engine, stop = SimEngine("m", FAST), asyncio.Event()
    card = await engine.start(lambda step: [worker.on_step(step) for worker in workers], lambda _: None)
    worker = Worker(wire, engine, card, WorkerSettings(), recorder)
    workers.append(worker)
    task = asyncio.create_task(worker.run(stop))
    await asyncio.sleep(1)
    assert not task.done()
    with redis_process(tmp_path, port):
        queue = Queue(wire)
        job = a_job(queue)
        await queue.put(job)
        assert (await ended(wire, job.id)).state is JobState.COMPLETED
        stop.set()
        await asyncio.wait_for(task, 20)
    await engine.stop()
    await wire.close()


async def test_a_worker_that_never_reached_the_store_ends_when_told(recorder: Recorder) -> None:
    """Nothing is drained where nothing was begun."""
    wire = RedisClient.open(RedisSettings(url=f"redis://127.0.0.1:{free_port()}/0", timeout_s=0.5))
    engine, stop = SimEngine("m", FAST), asyncio.Event()
    worker = Worker(wire, engine, await engine.start(lambda _: None, lambda _: None), WorkerSettings(), recorder)
    task = asyncio.create_task(worker.run(stop))
    await asyncio.sleep(0.3)
    assert not task.done()
    stop.set()
    await asyncio.wait_for(task, 20)
    await engine.stop()
    await wire.close()


GGUF_HEAD = b"GGUF" + struct.pack("<IQQ", 3, 0, 2)


def gguf_text(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


BAD_CONTEXT = (
    gguf_text(b"general.architecture") + struct.pack("<I", 8) + gguf_text(b"llama")
    + gguf_text(b"llama.context_length") + struct.pack("<I", 8) + gguf_text(b"many")
)  # fmt: skip


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "Check the path"),
        (b"", "Delete it and get it again"),
        (b"not a model", "Delete it and get it again"),
        (GGUF_HEAD + b"\xff" * 8, "Delete it and get it again"),
        (GGUF_HEAD + BAD_CONTEXT, "Get it again"),
        ("data folder", "choose another data directory"),
    ],
)
def test_weights_that_cannot_be_had_are_told_and_the_fix(
    tmp_path: Path, content: bytes | str | None, words: str
) -> None:
    """A worker process with no file, a damaged file, or nowhere to keep the default model: one line, no traceback."""
    path = tmp_path / "model.gguf"
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    environ["PENSTOCK_REDIS_URL"] = f"redis://127.0.0.1:{free_port()}/0"
    toml = 'models.m.engine = "llamacpp"\n'
    if isinstance(content, str):
        path.write_bytes(b"")  # a file where the folder would be
    else:
        toml += f'models.m.options.path = "{path}"\n'
        if content is not None:
            path.write_bytes(content)
    (tmp_path / "penstock.toml").write_text(toml)
    command = [sys.executable, "-m", "workers", "--data-dir", str(path)]
    ran = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode in (2, 75) and words in ran.stderr and "Traceback" not in ran.stderr


async def test_a_reader_who_comes_while_the_history_is_read_is_heard(wire: RedisClient, start: Start) -> None:
    """The claim is under way, its reply addresses are read already: the follow is remembered until the job begins."""
    queue, lost = Queue(wire), Lease(wire, "m")
    job = a_job(queue, "late", 30, stream=True)
    await queue.put(job)
    await lost.register()
    await lost.claim(0, 1)
    await lost.release(job.id, 1)
    running = await start()
    journal, reading, followed = running.worker._claimer._journal, asyncio.Event(), asyncio.Event()
    read, obey = journal.records, running.worker._obey

    async def slow(job_ids: Sequence[str], *, bodies: bool = True) -> list[JobRecord | None]:
        reading.set()
        await followed.wait()
        return await read(job_ids, bodies=bodies)

    def obeyed(control: Control) -> None:
        obey(control)
        if isinstance(control, Follow):
            followed.set()

    journal.records = slow  # type: ignore[method-assign]
    running.worker._obey = obeyed  # type: ignore[method-assign]
    address = channel("api", "reader")
    async with wire.subscribe(address) as subscription:
        await asyncio.wait_for(reading.wait(), 20)
        await queue.follow(job.id, address)
        reply = decode_reply(await asyncio.wait_for(subscription.message(), 20))
        assert isinstance(reply, Frame) and job.id in [each.job for each in reply.openings.values()]


@pytest.mark.parametrize("draining", [False, True])
async def test_a_lease_lost_in_one_partition_abandons_no_job_of_another(
    redis_url: str, recorder: Recorder, draining: bool
) -> None:
    """Fenced in one of two partitions, before or in its drain: the other's jobs finish, and none counts as lost."""
    wire = RedisClient.open(RedisSettings(url=redis_url, lease_ms=1_000, partitions=2))
    queue, reasons, stop, workers = Queue(wire), list[str](), asyncio.Event(), list[Worker]()
    engine = SimEngine("m", SimSettings(step_ms=5, prefill_ms=1, slots=8))
    card = await engine.start(lambda step: [worker.on_step(step) for worker in workers], lambda _: None)
    worker = Worker(wire, engine, card, WorkerSettings(drain_s=20), recorder, reasons.append)
    workers.append(worker)
    task = asyncio.create_task(worker.run(stop))
    jobs = [a_job(queue, "x", 300, id=new_job_id(partition)) for partition in (0, 1)]
    for job in jobs:
        await queue.put(job)

    async def both_run() -> bool:
        return engine.stats().running == 2

    await until(both_run)
    if draining:
        stop.set()
    await wire.redis.zadd(partition_key(0, "leases"), {worker.lease.id: 1})
    await Reaper(wire).sweep()  # the worker's own may come first
    with pytest.raises(Fenced, match=r"\[0\]"):
        await asyncio.wait_for(task, 30)
    taken, kept = [await JobReader(wire).record(job.id) for job in jobs]
    assert (taken.state, kept.state) == (JobState.QUEUED, JobState.COMPLETED) and text_of(kept) == expected("x", 300)
    assert await wire.redis.hget(partition_key(1, "job", jobs[1].id), "losses") is None
    assert reasons == ["its lease in partition 0 was taken"]
    assert await wire.redis.zscore(partition_key(1, "leases"), worker.lease.id) is None
    await engine.stop()
    await wire.close()


async def test_a_lease_lost_everywhere_ends_the_worker_at_once(wire: RedisClient, start: Start) -> None:
    """There is nothing left to drain, however long the grace time is."""
    queue = Queue(wire)
    running = await start(SimSettings(step_ms=20, prefill_ms=1), WorkerSettings(drain_s=600))
    job = a_job(queue, max_tokens=4000)
    await queue.put(job)

    async def runs() -> bool:
        return running.engine.stats().running == 1

    await until(runs)
    await wire.redis.zadd(partition_key(0, "leases"), {running.worker.lease.id: 1})
    await Reaper(wire).sweep()
    with pytest.raises(Fenced):
        await asyncio.wait_for(running.task, 20)


async def test_the_late_end_of_an_earlier_run_does_not_end_the_run_held_now(wire: RedisClient, start: Start) -> None:
    """The answer to an old run's finish may come after the same worker has claimed the job again."""
    queue = Queue(wire)
    running = await start(SimSettings(step_ms=20, prefill_ms=1))
    job = a_job(queue, max_tokens=4000)
    await queue.put(job)

    async def runs() -> bool:
        return running.engine.stats().running == 1

    await until(runs)
    number = running.worker._attempts[job.id].number
    old = Finish(Terminal(job.id, JobState.COMPLETED, 0, ("stop",)), number - 1, False)
    running.worker._on_written((old,))
    assert running.worker.running == 1
    await queue.cancel(job.id)
    record = await ended(wire, job.id)
    assert record.state is JobState.CANCELLED and record.attempt == 1 and running.worker.running == 0


async def test_a_job_that_one_heartbeat_leaves_out_goes_on(wire: RedisClient, start: Start) -> None:
    """Only where two heartbeats in a row do not name a job has the server taken it away."""
    queue = Queue(wire)
    running = await start(SimSettings(step_ms=20, prefill_ms=1))
    job = a_job(queue, "seen", 100)
    await queue.put(job)
    beat, left_out = running.worker.lease.beat, 0

    async def beaten(partition: int) -> dict[str, HeldJob]:
        nonlocal left_out
        held = await beat(partition)
        if not left_out and job.id in held and job.id in running.worker._attempts:
            left_out += 1
            del held[job.id]
        return held

    running.worker.lease.beat = beaten  # type: ignore[method-assign]
    record = await ended(wire, job.id)
    assert left_out == 1 and record.state is JobState.COMPLETED
    assert record.attempt == 1 and text_of(record) == expected("seen", 100)


class Hands:
    """A worker as its claimer sees it, which begins nothing."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.reserved = self.batch_texts = 0
        self.capabilities = Capabilities()

    def stats(self) -> Stats:
        return Stats(running=0, waiting=0, slots=8)

    async def refusal(self, _: Job) -> None:
        return None

    def begin(self, claim: Claim, _: History, refusal: object = None) -> None:
        self.begun.append(claim.job.id)


def a_claimer(wire: RedisClient, lease: Lease) -> tuple[Claimer, Hands]:
    hands = Hands()
    return Claimer(lease, JobReader(wire), WorkerSettings(), cast(Any, hands), asyncio.Event()), hands


async def test_what_is_heard_of_a_job_is_kept_until_no_claim_can_bring_it(wire: RedisClient) -> None:
    """Two claims are under way: the end of one forgets no reader and no cancel of the job that the other brings."""
    lease, gates = Lease(wire, "m"), [asyncio.Event(), asyncio.Event()]

    async def claim(partition: int, *_: object, **__: object) -> Claimed:
        await gates[partition].wait()
        return Claimed([], suspects=False)

    lease.claim = claim  # type: ignore[method-assign]
    claimer, _ = a_claimer(wire, lease)
    claims = [asyncio.create_task(claimer._claim(partition, 1)) for partition in (0, 1)]
    while not (claimer.may_bring(0) and claimer.may_bring(1)):
        await asyncio.sleep(0)
    claimer.note_follow("j", "reader")
    claimer.note_cancel("j")
    gates[0].set()
    await claims[0]
    assert claimer.followers("j") == ["reader"] and claimer.was_cancelled("j")
    gates[1].set()
    await claims[1]
    assert claimer.followers("j") == () and not claimer.was_cancelled("j")


async def test_a_worker_that_finds_only_newer_jobs_claims_less_and_less_often(wire: RedisClient) -> None:
    """The pause doubles with every such claim, up to its limit, and is short again after a job it can read."""
    lease = Lease(wire, "m")

    async def decline(_: Sequence[UnreadableClaim]) -> None:
        return

    lease.decline = decline  # type: ignore[method-assign]
    claimer, _ = a_claimer(wire, lease)
    pauses = []
    for _ in range(12):
        await claimer._begin_jobs(0, [UnreadableClaim("j", 1, "newer", newer=True)])
        pauses.append(claimer._pause_s)
    assert pauses == [min(MIN_PAUSE_S * 2 ** (place + 1), MAX_PAUSE_S) for place in range(12)]
    assert pauses[2] == 4 * pauses[0] and pauses[-1] == MAX_PAUSE_S
    await claimer._begin_jobs(0, [])
    assert claimer._pause_s == MIN_PAUSE_S


@pytest.mark.parametrize("has_ended", [False, True])
async def test_a_job_that_ends_between_its_claim_and_its_reading_is_not_begun(
    wire: RedisClient, has_ended: bool
) -> None:
    """The worker was taken for dead and the job cancelled while the log of the first attempt was being read."""
    queue, first, second = Queue(wire), Lease(wire, "m"), Lease(wire, "m")
    job = a_job(queue)
    await queue.put(job)
    for lease in (first, second):
        await lease.register()
    await first.claim(0, 1)
    await first.release(job.id, 1)
    (claim,) = (await second.claim(0, 1)).jobs
    assert isinstance(claim, Claim)
    if has_ended:
        await queue.cancel(job.id)
        await wire.redis.zadd(partition_key(0, "leases"), {second.id: 1})
        await Reaper(wire).sweep()
        assert (await JobReader(wire).record(job.id)).state is JobState.CANCELLED
    claimer, hands = a_claimer(wire, second)
    assert await claimer._begin_continued([claim]) == []
    assert hands.begun == ([] if has_ended else [job.id])


# --- JSON ------------------------------------------------------------------------------------------------------------


class DeafEngine(SimEngine):
    """Claims to hold its output to JSON, and does not: what llama.cpp does once it has dropped a grammar."""

    def __init__(self, model: str, settings: SimSettings) -> None:
        super().__init__(model, settings)
        self.pasts: dict[str, int] = {}
        """Tokens of earlier attempts, by request."""

    async def start(self, on_step: Step, on_phase: Callable[[str], None]) -> ModelCard:
        card = await super().start(on_step, on_phase)
        return replace(card, capabilities=replace(card.capabilities, json_schema=True))

    def submit(self, request: Request) -> None:
        self.pasts[request.id] = request.past_tokens
        super().submit(request)


@pytest.mark.parametrize("stop", [(), ("never",)])
@pytest.mark.parametrize("n", [1, 2])
async def test_an_answer_that_is_not_the_json_asked_for_fails(
    wire: RedisClient, start: Start, stop: tuple[str, ...], n: int
) -> None:
    """Cut by its length or not, streamed or not; jobs that ask for nothing are as before."""
    queue = Queue(wire)
    await start(engine=DeafEngine)
    jobs = [
        a_job(queue, sampling=Sampling(max_tokens=10, json_schema={}, stop=stop, n=n), stream=stream)
        for stream in (False, True)
    ]
    plain = a_job(queue)
    for job in (*jobs, plain):
        await queue.put(job)
    for job in jobs:
        record = await ended(wire, job.id)
        assert record.state is JobState.FAILED and record.terminal is not None
        assert record.terminal.failure is not None and record.terminal.failure.code == "constraint_violated"
    assert (await ended(wire, plain.id)).state is JobState.COMPLETED


async def test_a_job_whose_answer_is_being_checked_ends_whatever_the_check_does(
    wire: RedisClient, start: Start
) -> None:
    """Cancelled, out of time, or with a check that breaks: the check of one never holds a job for ever."""
    queue, running = Queue(wire), await start(engine=DeafEngine)
    checked = Sampling(max_tokens=10, json_schema={})
    cancelled, late, broken = (a_job(queue, sampling=checked, **more) for more in ({}, {"deadline_ms": 1500}, {}))

    async def failure(attempt: Attempt) -> Failure | None:
        if attempt.job.id == broken.id:
            raise LookupError("nobody thought of this")
        await asyncio.Event().wait()
        return None

    running.worker._checks.failure = failure  # type: ignore[method-assign]
    for job in (cancelled, late, broken):
        await queue.put(job)

    async def is_checked() -> bool:
        held = running.worker._attempts.get(cancelled.id)
        return held is not None and held.is_checked

    await until(is_checked)
    await queue.cancel(cancelled.id)
    states = [(await ended(wire, job.id)).state for job in (cancelled, late, broken)]
    assert states == [JobState.CANCELLED, JobState.EXPIRED, JobState.FAILED]
    record = await JobReader(wire).record(broken.id)
    assert record.terminal is not None and record.terminal.failure is not None
    assert record.terminal.failure.code == "constraint_unchecked" and running.worker.running == 0


async def test_a_job_that_was_dropped_is_not_ended_by_its_check(
    wire: RedisClient, start: Start, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another worker has it by then: its end is neither written nor counted by the one that has lost it."""
    queue, running = Queue(wire), await start(engine=DeafEngine)
    worker, gate = running.worker, asyncio.Event()
    job = a_job(queue, sampling=Sampling(max_tokens=10, json_schema={}))
    counted: list[str] = []
    written: list[Finish] = []
    monkeypatch.setattr(recorder, "ended", lambda attempt, _: counted.append(attempt.job.id))

    async def failure(_: Attempt) -> Failure | None:
        await gate.wait()
        return None

    worker._checks.failure = failure  # type: ignore[method-assign]
    worker._writers[0].finish = written.append  # type: ignore[method-assign]
    await queue.put(job)

    async def is_checked() -> bool:
        held = worker._attempts.get(job.id)
        return held is not None and held.is_checked

    await until(is_checked)
    check = worker._attempts[job.id].check
    assert check is not None
    worker._drop(job.id, "the test says so")
    gate.set()
    await asyncio.wait_for(check, 20)
    assert counted == [] and written == []


async def test_a_schema_that_cannot_be_used_ends_its_job_at_once(wire: RedisClient, start: Start) -> None:
    """Not only when all its tokens are computed."""
    queue = Queue(wire)
    await start(LONG, engine=DeafEngine)
    job = a_job(queue, sampling=Sampling(max_tokens=3000, json_schema={"type": "nope"}))
    await queue.put(job)
    record = await ended(wire, job.id)
    assert record.terminal is not None and record.terminal.failure is not None
    assert (record.terminal.failure.status, record.terminal.failure.param) == (400, "response_format")
    assert record.terminal.usage.completion < 3000


async def test_json_that_another_worker_began_is_computed_from_its_first_token(wire: RedisClient, start: Start) -> None:
    """A job without a schema goes on behind the logged tokens."""
    queue = Queue(wire)
    plain, schema = a_job(queue, max_tokens=400), a_job(queue, sampling=Sampling(max_tokens=400, json_schema={}))
    first = await start(LONG, WorkerSettings(drain_s=0), engine=DeafEngine)
    for job in (plain, schema):
        await queue.put(job)
    journal = JobReader(wire)

    async def begun() -> bool:
        return all([len(await deltas_of(journal, await journal.record(job.id))) > 3 for job in (plain, schema)])

    await until(begun)
    first.stop.set()
    await first.task
    second = await start(engine=DeafEngine)
    assert isinstance(second.engine, DeafEngine)
    for job in (plain, schema):
        record = await ended(wire, job.id)
        assert text_of(record) == expected("hello", 400)
        assert record.terminal is not None and record.terminal.usage.completion == 400
    pasts = {job.id: past for name, past in second.engine.pasts.items() for job in (plain, schema) if job.id in name}
    assert pasts[plain.id] > 3 and pasts[schema.id] == 0
