"""Workers before a full KV cache, on a real server: what does not fit waits in the worker, and nothing is lost."""

from __future__ import annotations

import msgspec
import pytest
from sim_worker import Running, Workshop, ended, expected, failure_of, text_of, until

from streaming.jobs.job import Job, JobState
from streaming.order import Priority
from streaming.redis.client import RedisClient
from workers import slot_shares as victims
from workers.engines.sim.settings import SimSettings
from workers.settings import WorkerSettings

pytestmark = pytest.mark.slow

FULL = SimSettings(step_ms=2, prefill_ms=1, slots=8, kv_tokens=400, kv_policy="MAX_UTILIZATION")


async def _holds(running: Running, jobs: int) -> bool:
    return running.worker.running == jobs


async def _runs(running: Running, texts: int) -> bool:
    return len(running.worker._starter.running) == texts


@pytest.mark.parametrize("gate", [True, False])
async def test_with_the_gate_a_full_cache_evicts_nothing(shop: Workshop, gate: bool) -> None:
    """Twelve answers of which three fit; every text is whole in both cases."""
    jobs = [await shop.put(f"job {number}", 120) for number in range(12)]
    running = await shop.start(FULL, WorkerSettings(gate=gate, drain_s=5))
    for number, job in enumerate(jobs):
        await shop.completed(job, f"job {number}", 120)
    evictions = running.engine.stats().evictions
    assert evictions == 0 if gate else evictions > 0


@pytest.mark.parametrize("lane", [Priority.BATCH, Priority.STANDARD])
async def test_a_waiting_job_does_not_hold_back_chats_that_fit(shop: Workshop, lane: Priority) -> None:
    """It waits at the gate beside a long job; a chat is claimed, begins at once and ends before both."""
    running = await shop.start(msgspec.structs.replace(FULL, step_ms=10), WorkerSettings(drain_s=0))
    long = await shop.put("long", 250)
    await until(lambda: _runs(running, 1))
    large = await shop.put("large", 200, priority=lane)
    await until(lambda: _holds(running, 2))
    chat = await shop.put("chat", 20, priority=Priority.INTERACTIVE)
    assert (await shop.ended(chat)).state is JobState.COMPLETED
    assert await _runs(running, 1) and await _holds(running, 2), "the others were not over"
    for job in (long, large):
        assert (await shop.ended(job)).state is JobState.COMPLETED


@pytest.mark.parametrize("way", ["cancel", "deadline"])
async def test_a_job_that_waits_at_the_gate_ends_at_once(shop: Workshop, way: str) -> None:
    """No choice of it runs whose end could end it, and the next job takes its turn."""
    running = await shop.start(msgspec.structs.replace(FULL, step_ms=20), WorkerSettings(drain_s=0))
    await shop.put("long", 250)
    await until(lambda: _runs(running, 1))
    waits = await shop.put("waits", 200, deadline_ms=400 if way == "deadline" else None)
    if way == "cancel":
        await until(lambda: _holds(running, 2))
        await shop.queue.cancel(waits.id)
    record = await shop.ended(waits)
    assert record.state is (JobState.CANCELLED if way == "cancel" else JobState.EXPIRED)
    assert await _runs(running, 1)
    after = await shop.put("after", 5)
    assert (await shop.ended(after)).state is JobState.COMPLETED
    assert not running.worker._starter.waiting and not running.worker._starter._at_gate


async def test_a_chat_with_a_long_prompt_takes_the_place_of_as_many_batch_jobs_as_it_needs(shop: Workshop) -> None:
    """Seven lines of 50 tokens fill the cache, and beside 250 tokens of prompt that run for longer only one fits.
    The engine counts each prompt as it was estimated, so that it does not matter how many it has counted."""
    lines = [await shop.put(f"line no {number}", 50, priority=Priority.BATCH) for number in range(7)]
    running = await shop.start(msgspec.structs.replace(FULL, step_ms=40), WorkerSettings(drain_s=20))
    await until(lambda: _runs(running, 7))
    chat = await shop.put("chat" * 250, 60, priority=Priority.INTERACTIVE)
    await shop.completed(chat, "chat" * 250, 60)
    records = [await shop.ended(job) for job in lines]
    assert [text_of(each) for each in records] == [expected(f"line no {number}", 50) for number in range(7)]
    preempted = [attempt for each in records for attempt in each.attempts if attempt.outcome == "preempted"]
    assert len(preempted) == 6


@pytest.mark.parametrize("policy", ["MAX_UTILIZATION", "GUARANTEED_NO_EVICT"])
async def test_what_can_never_fit_is_refused_at_once(shop: Workshop, policy: str) -> None:
    """A prompt above the cache is the engine's to refuse, whatever runs; chats are still claimed."""
    running = await shop.start(msgspec.structs.replace(FULL, step_ms=20, kv_policy=policy), WorkerSettings(drain_s=0))
    await shop.put("long", 300)
    await until(lambda: _runs(running, 1))
    await _is_refused(shop.wire, await shop.put("x" * 2400, 50))
    chat = await shop.put("chat", 5, priority=Priority.INTERACTIVE)
    assert (await shop.ended(chat)).state is JobState.COMPLETED
    assert await _runs(running, 1), "the long job was over"


async def _is_refused(wire: RedisClient, job: Job) -> None:
    record = await ended(wire, job.id)
    assert (failure_of(record).code, failure_of(record).status) == ("context_length_exceeded", 400)


async def test_a_batch_job_gives_way_as_soon_as_it_has_run_for_long_enough(
    shop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was put back for a first chat. A second one waits at the gate until it may be preempted again, no longer."""
    monkeypatch.setattr(victims, "MIN_RUN_S", 1.0)
    running = await shop.start(msgspec.structs.replace(FULL, step_ms=10), WorkerSettings(drain_s=0))
    line = await shop.put("line", 250, priority=Priority.BATCH)
    for _ in range(2):
        await until(lambda: _runs(running, 1))
        chat = await shop.put("chat" * 250, 120, priority=Priority.INTERACTIVE)
        assert (await shop.ended(chat)).state is JobState.COMPLETED
    record = await shop.reader.record(line.id)
    assert not record.state.final, "the line was over"
    assert [each.outcome for each in record.attempts].count("preempted") == 2


async def test_a_job_at_the_gate_is_overtaken_only_while_what_ran_before_it_runs(shop: Workshop) -> None:
    """The first chat keeps it out for longer; the second, which would fit, begins behind it."""
    running = await shop.start(msgspec.structs.replace(FULL, step_ms=20), WorkerSettings(drain_s=5))
    short = await shop.put("x" * 720, 40)
    await until(lambda: _runs(running, 1))
    large = await shop.put("x" * 600, 60)
    await until(lambda: _holds(running, 2))
    first = await shop.put("x" * 360, 200, priority=Priority.INTERACTIVE)
    await until(lambda: _runs(running, 2))
    await shop.ended(short)
    assert await _runs(running, 1), "the large job did not wait for the chat"
    second = await shop.put("chat", 5, priority=Priority.INTERACTIVE)
    ends = [(await shop.ended(job)).terminal for job in (first, large, second)]
    released = [end.generated.released for end in ends if end is not None and end.generated is not None]
    assert len(released) == 3 and released == sorted(released)
