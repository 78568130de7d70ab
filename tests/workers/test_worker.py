"""The worker with the simulated engine on a real server: claims, deltas, ends, cancels, drains, losses."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from sim_worker import LONG, Start, a_claim, a_job, ended, expected, failure_of, put_job, text_of, until

from penstock.engine import Request, Sampling
from streaming.jobs.dead_letters import DeadLetters
from streaming.jobs.history import NOTHING
from streaming.jobs.job import JobState, Text
from streaming.jobs.lease import Claimed, HeldJob
from streaming.jobs.queue import Queue
from streaming.keys import partition_key
from streaming.redis.client import RedisClient
from workers.engines.sim.answers import token_text
from workers.engines.sim.settings import SimSettings
from workers.record import Recorder

pytestmark = pytest.mark.slow


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
    job = await put_job(queue, prompt=Text(("one", "two")), sampling=Sampling(max_tokens=5, n=2))
    record = await ended(wire, job.id)
    assert [text_of(record, index) for index in range(4)] == [
        "".join(token_text(prompt, index) for index in range(5)) for prompt in ("one", "one", "two", "two")
    ]
    whole = expected("stop me", 10)
    stop = whole[12:20]
    stopped = await put_job(queue, "stop me", sampling=Sampling(max_tokens=10, stop=(stop,)))
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
        assert (failure_of(record).code, failure_of(record).status) == (code, 400)
    assert (await ended(wire, fine.id)).state is JobState.COMPLETED


async def test_only_jobs_of_several_prompts_are_checked_before_they_begin(
    wire: RedisClient, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine refuses a single one when it is submitted: its prompt is not read twice."""
    running, queue, checked = await start(), Queue(wire), list[object]()

    async def check(request: Request) -> None:
        checked.append(request.prompt)

    monkeypatch.setattr(running.engine, "check", check)
    sampling = Sampling(n=3)
    for prompt in (a_job(queue).prompt, Text(("one",)), Text(("one", "two"))):
        assert checked == []
        claim = a_claim(a_job(queue, prompt=prompt, sampling=sampling))
        assert await running.worker._starter.refusal(claim) is None
    assert checked == ["one", "two"], "each once"


async def test_cancel_and_deadline_end_a_running_job_and_free_its_slot(wire: RedisClient, start: Start) -> None:
    """The engine forgets the request; what was generated before stays readable."""
    queue = Queue(wire)
    running = await start(SimSettings(step_ms=5, prefill_ms=1, slots=2))
    cancelled, late = a_job(queue, max_tokens=4000), a_job(queue, max_tokens=4000, deadline_ms=300)
    await queue.put(cancelled)
    await queue.put(late)
    await until(lambda: running.engine.stats().running == 2)
    await queue.cancel(cancelled.id)
    assert (await ended(wire, cancelled.id)).state is JobState.CANCELLED
    assert (await ended(wire, late.id)).state is JobState.EXPIRED
    await until(lambda: running.engine.stats().running == 0 and running.worker.running == 0)


async def test_a_cancel_waits_for_no_heartbeat(wire: RedisClient, start: Start) -> None:
    """The worker is told of it; that heartbeats say it too is for words that were lost."""
    queue = Queue(wire)
    running = await start(LONG)
    beat, job = running.worker.lease.beat, a_job(queue, max_tokens=8000)

    async def silent(partition: int) -> dict[str, HeldJob]:
        return {job_id: HeldJob(held.number, cancelled=False) for job_id, held in (await beat(partition)).items()}

    running.worker.lease.beat = silent  # type: ignore[method-assign]
    await queue.put(job)
    await until(lambda: running.engine.stats().running == 1)
    await queue.cancel(job.id)
    assert (await ended(wire, job.id)).state is JobState.CANCELLED


async def test_a_job_cancelled_before_its_claim_is_answered_is_not_computed(wire: RedisClient, start: Start) -> None:
    """The worker hears of the cancel when it does not know the job yet."""
    queue, running = Queue(wire), await start()
    lease, job = running.worker.lease, a_job(queue)
    claim = lease.claim

    async def is_heard() -> bool:
        return running.worker._claimer.early_cancel(job.id) is not None

    async def claimed(partition: int, want: int, **options: Any) -> Claimed:
        answer = await claim(partition, want, **options)
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
        claim = a_claim(job, created_ms=500, claimed_ms=1_000, deadline_ms=due_ms)
        before = loop.time()
        running.worker.begin(claim, NOTHING)
        deadline = running.worker._attempts[job.id].deadline
        assert deadline is not None and before + in_s <= deadline.when() <= loop.time() + in_s


async def test_an_unreadable_body_fails_its_job_alone(wire: RedisClient, start: Start, recorder: Recorder) -> None:
    """Garbage in the record becomes a failed job, which is counted; the worker lives on."""
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
    assert b'penstock_job_failures_total{code="malformed_job"} 1.0' in recorder.metrics.expose()
