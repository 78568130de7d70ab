"""Adapters in a worker: what its engine lacks fails, and what it hands back goes on with the same adapter."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace
from sim_worker import a_job, all_ended, begun, ended, failure_of, has_deltas, put_job, text_of, until

from penstock.engine import ChatTurn, Sampling, Stats
from streaming.jobs.job import Job
from streaming.jobs.queue import Queue
from streaming.redis.client import RedisClient
from workers.engines.sim.answers import prompt_text, token_text
from workers.engines.sim.engine import SimEngine
from workers.engines.sim.settings import SimSettings
from workers.record import Recorder
from workers.settings import WorkerSettings

pytestmark = pytest.mark.slow

TOKENS = 60


def said(adapter: str, tokens: int = TOKENS) -> str:
    prompt = prompt_text((ChatTurn("user", "hello"),)) + (f"\nadapter={adapter}" if adapter else "")
    return "".join(token_text(prompt, index) for index in range(tokens))


def engine(*adapters: str, step_ms: float = 1, slots: int = 8) -> SimEngine:
    return SimEngine("m", SimSettings(step_ms=step_ms, prefill_ms=1, slots=slots, max_adapters=2), adapters)


async def test_what_the_engine_lacks_fails(wire: RedisClient, recorder: Recorder) -> None:
    """It is never answered by the model alone, even if an older configuration accepted it."""
    queue = Queue(wire)
    lacking, served, plain = [await put_job(queue, adapter=name, v=7) for name in ("law", "sql", "")]
    worker = await begun(wire, engine("sql"), None, recorder)
    failure = failure_of(await ended(wire, lacking.id))
    assert (failure.status, failure.param) == (400, "model")
    for job in (served, plain):
        record = await ended(wire, job.id)
        assert text_of(record) == said(job.adapter, 10) and record.job.full_model == job.full_model
    await all_ended([worker])


async def test_a_handed_back_text_keeps_its_adapter(wire: RedisClient, recorder: Recorder) -> None:
    """Of several choices; the next worker has loaded another one by then."""
    queue, sampling = Queue(wire), Sampling(max_tokens=TOKENS, n=2)
    jobs = [await put_job(queue, adapter=name, v=7, sampling=sampling) for name in ("sql", "law")]
    slow = engine("sql", "law", step_ms=20)
    first = await begun(wire, slow, WorkerSettings(drain_s=0), recorder)
    for job in jobs:
        await until(lambda job=job: has_deltas(wire, job.id, 6))
    first.stop.set()
    await first.task
    second = await begun(wire, engine("law", "sql"), None, recorder)
    for job in jobs:
        record = await ended(wire, job.id)
        assert [text_of(record, index) for index in range(2)] == [said(job.adapter)] * 2
        assert [each.outcome for each in record.attempts] == ["handed_back", "completed"]
    await slow.stop()
    await all_ended([second])


class SilentEngine(SimEngine):
    """Does not say which adapters it has loaded."""

    def stats(self) -> Stats:
        return replace(super().stats(), adapters=())


async def test_what_running_texts_need_counts_as_loaded(wire: RedisClient, recorder: Recorder) -> None:
    """Also of an engine that says nothing of it, or loads an adapter only with the text's turn."""
    queue = Queue(wire)
    silent = SilentEngine("m", SimSettings(step_ms=1, prefill_ms=1, slots=2), ("law", "sql"))
    worker = await begun(wire, silent, WorkerSettings(prefetch=0), recorder)
    running = await put_job(queue, adapter="sql", v=7, max_tokens=5000)
    await until(lambda: has_deltas(wire, running.id, 2))
    jobs: list[Job] = [a_job(queue, adapter=name, v=7) for name in ("law", "sql")]
    await queue.put_parts(jobs)
    law, sql = await asyncio.gather(*(ended(wire, job.id) for job in jobs))
    assert sql.stamps.claimed < law.stamps.claimed
    await all_ended([worker])


async def test_a_worker_takes_what_it_has_loaded_first(wire: RedisClient, recorder: Recorder) -> None:
    """One slot, many turns: fewer loads than with a change at each job, and every job is served."""
    queue, one_slot = Queue(wire), engine("a", "b", "c", slots=1)
    jobs: list[Job] = [a_job(queue, adapter=name, v=7, max_tokens=2) for name in "abc" * 10]
    await queue.put_parts(jobs)
    worker = await begun(wire, one_slot, WorkerSettings(prefetch=0), recorder)
    texts = [text_of(record) for record in await asyncio.gather(*(ended(wire, job.id) for job in jobs))]
    assert texts == [said(job.adapter, 2) for job in jobs]
    assert one_slot.stats().swaps < 12, "in the order of their arrival there would be 30"
    await all_ended([worker])
