"""Answers that must be JSON: checked before their job ends, whatever the check does."""

from __future__ import annotations

import asyncio

import pytest
from sim_worker import LONG, DeafEngine, Running, Workshop, a_job, failure_of, until

from penstock.engine import ChatTurn, Failure, Sampling
from penstock.tools import Tool, ToolCall, Tools
from streaming.jobs.job import Chat, Job, JobState
from streaming.jobs.lease import Finish
from workers.attempt import Attempt
from workers.engines.sim.settings import SimSettings
from workers.record import Recorder

pytestmark = pytest.mark.slow


def is_checked(running: Running, job: Job) -> bool:
    """Whether the worker holds the job only because its answer is being checked."""
    held = running.worker._attempts.get(job.id)
    return held is not None and held.is_checked


@pytest.mark.parametrize("stop", [(), ("never",)])
@pytest.mark.parametrize("n", [1, 2])
async def test_an_answer_that_is_not_the_json_asked_for_fails(shop: Workshop, stop: tuple[str, ...], n: int) -> None:
    """Cut by its length or not, streamed or not; jobs that ask for nothing are as before."""
    await shop.start(engine=DeafEngine)
    sampling = Sampling(max_tokens=10, json_schema={}, stop=stop, n=n)
    jobs = [await shop.put(sampling=sampling, stream=stream) for stream in (False, True)]
    plain = await shop.put()
    for job in jobs:
        assert failure_of(await shop.ended(job)).code == "constraint_violated"
    assert (await shop.ended(plain)).state is JobState.COMPLETED


async def test_beside_tools_the_text_is_checked_and_calls_need_none(shop: Workshop) -> None:
    """The engine answers with a call, or with text after a call's result, which is not the JSON asked for."""
    schema = Sampling(max_tokens=200, json_schema={})
    await shop.start(engine=DeafEngine)
    called = (ChatTurn("assistant", "", (ToolCall("c", "f", "{}"),)), ChatTurn("tool", "noon", call_id="c"))
    asked, tools = ChatTurn("user", "call f"), Tools(offered=(Tool("f"),))
    calls = await shop.put(prompt=Chat((asked,)), tools=tools, sampling=schema)
    text = await shop.put(prompt=Chat((asked, *called)), tools=tools, sampling=schema)
    record = await shop.ended(calls)
    assert record.state is JobState.COMPLETED and record.terminal is not None
    assert record.terminal.finishes == ("tool_calls",)
    assert failure_of(await shop.ended(text)).code == "constraint_violated"


async def test_a_job_whose_answer_is_being_checked_ends_whatever_the_check_does(shop: Workshop) -> None:
    """Cancelled, out of time, or with a check that breaks: the check of one never holds a job for ever."""
    running = await shop.start(engine=DeafEngine)
    checked = Sampling(max_tokens=10, json_schema={})
    cancelled, late, broken = (a_job(shop.queue, sampling=checked, **more) for more in ({}, {"deadline_ms": 1500}, {}))

    async def failure(attempt: Attempt) -> Failure | None:
        if attempt.job.id == broken.id:
            raise LookupError("nobody thought of this")
        await asyncio.Event().wait()
        return None

    running.worker._checker.answer_failure = failure  # type: ignore[method-assign]
    for job in (cancelled, late, broken):
        await shop.queue.put(job)
    await until(lambda: is_checked(running, cancelled))
    await shop.queue.cancel(cancelled.id)
    states = [(await shop.ended(job)).state for job in (cancelled, late, broken)]
    assert states == [JobState.CANCELLED, JobState.EXPIRED, JobState.FAILED]
    record = await shop.reader.record(broken.id)
    assert failure_of(record).code == "constraint_unchecked" and running.worker.running == 0


async def test_a_job_that_was_dropped_is_not_ended_by_its_check(
    shop: Workshop, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another worker has it by then: its end is neither written nor counted by the one that has lost it."""
    running = await shop.start(engine=DeafEngine)
    worker, gate = running.worker, asyncio.Event()
    job = a_job(shop.queue, sampling=Sampling(max_tokens=10, json_schema={}))
    counted: list[str] = []
    written: list[Finish] = []
    monkeypatch.setattr(recorder, "ended", lambda attempt, _: counted.append(attempt.job.id))

    async def failure(_: Attempt) -> Failure | None:
        await gate.wait()
        return None

    worker._checker.answer_failure = failure  # type: ignore[method-assign]
    worker._writers[0].finish = written.append  # type: ignore[method-assign]
    await shop.queue.put(job)
    await until(lambda: is_checked(running, job))
    check = worker._attempts[job.id].check
    worker._drop(job.id, "the test says so")
    gate.set()
    await asyncio.wait_for(check, 20)
    assert counted == [] and written == []


async def test_a_schema_that_cannot_be_used_ends_its_job_at_once(shop: Workshop) -> None:
    """Not only when all its tokens are computed."""
    await shop.start(LONG, engine=DeafEngine)
    job = await shop.put(sampling=Sampling(max_tokens=3000, json_schema={"type": "nope"}))
    record = await shop.ended(job)
    assert (failure_of(record).status, failure_of(record).param) == (400, "response_format")
    assert record.terminal.usage.completion < 3000


async def test_a_schema_that_cannot_be_used_ends_its_job_also_at_the_gate(shop: Workshop) -> None:
    """The engine never gets it, so no last piece ends it."""
    running = await shop.start(SimSettings(step_ms=5, slots=1, kv_tokens=8192), engine=DeafEngine)
    long = await shop.put(max_tokens=4000)
    await until(lambda: running.engine.stats().running == 1)
    job = await shop.put(sampling=Sampling(max_tokens=10, json_schema={"type": "nope"}))
    record = await shop.ended(job)
    assert (failure_of(record).status, failure_of(record).param) == (400, "response_format")
    await until(lambda: list(running.worker._attempts) == [long.id])
    assert not running.worker._starter.waiting
