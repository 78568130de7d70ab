"""Jobs of many choices, and what a worker holds of them."""

from __future__ import annotations

from sim_worker import Running, a_job

from penstock.engine import Sampling
from streaming.jobs.job import Job, Text
from streaming.jobs.queue import Queue


def job_of(request_id: str) -> str:
    return request_id.partition("/")[0]


def prompts(count: int) -> Text:
    return Text(tuple(f"prompt {number}" for number in range(count)))


def many(queue: Queue, choices: int, tokens: int, **changes: object) -> Job:
    """A job of so many prompts."""
    return a_job(queue, prompt=prompts(choices), sampling=Sampling(max_tokens=tokens), **changes)


async def put_many(queue: Queue, choices: int, tokens: int, **changes: object) -> Job:
    """One that waits."""
    job = many(queue, choices, tokens, **changes)
    await queue.put(job)
    return job


def nothing_left(running: Running) -> None:
    worker = running.worker
    assert (worker.running, worker._starter.texts, worker._starter.batch_texts, worker._partial) == (0, 0, 0, {})
