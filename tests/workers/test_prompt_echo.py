"""Echo: each text begins with its prompt, once, whichever workers generate it; no engine continues the prompt twice."""

from __future__ import annotations

import asyncio
from typing import Any

from msgspec.structs import replace
from sim_worker import FAST, Start, a_job, ended, text_of, until

from penstock.engine import Sampling
from streaming.jobs.job import Job, Text
from streaming.jobs.queue import Queue
from streaming.jobs.reader import JobReader
from streaming.redis.client import RedisClient
from workers.engines.sim.answers import token_text


def echoed(queue: Queue, *prompts: str, n: int = 1, tokens: int = 10) -> Job:
    plain = a_job(queue, prompts[0], tokens)
    fields: dict[str, Any] = {name: getattr(plain, name) for name in ("id", "model", "tenant", "priority")}
    return Job(**fields, prompt=Text(prompts), sampling=Sampling(max_tokens=tokens, n=n), echo=True)


def generated(prompt: str, tokens: int) -> str:
    return "".join([token_text(prompt, index) for index in range(tokens)])


async def test_each_text_begins_with_its_prompt(wire: RedisClient, start: Start) -> None:
    """In the first delta of each choice, which counts as many tokens as without."""
    queue = Queue(wire)
    await start()
    job = echoed(queue, "one ", "two ", n=2)
    await queue.put(job)
    record = await ended(wire, job.id)
    for index, prompt in enumerate(("one ", "one ", "two ", "two ")):
        assert text_of(record, index) == prompt + generated(prompt, 10)
    assert record.terminal is not None and record.terminal.usage.completion == 40


async def test_the_next_worker_shows_it_no_second_time(wire: RedisClient, start: Start) -> None:
    """The engine goes on after what it generated, and not after the prompt."""
    queue = Queue(wire)
    first = await start(replace(FAST, step_ms=20))
    job = echoed(queue, "once upon ", "a time ", tokens=60)
    await queue.put(job)
    reader = JobReader(wire)

    async def some() -> bool:
        record = await reader.record(job.id)
        return bool(record is not None and record.runs and sum((await reader.history(job.id, record.runs)).tokens) > 20)

    await until(some)
    first.task.cancel()
    await asyncio.gather(first.task, return_exceptions=True)
    await start()
    record = await ended(wire, job.id)
    assert [each.outcome for each in record.attempts] == ["lost", "completed"]
    for index, prompt in enumerate(("once upon ", "a time ")):
        assert text_of(record, index) == prompt + generated(prompt, 60)
