"""The past of a job's texts: as engines and servers get it, and with its prompt where that is echoed, once."""

from __future__ import annotations

import asyncio
from typing import Any

from msgspec.structs import replace
from sim_worker import FAST, Workshop, a_claim, a_job, text_of, until

from penstock.engine import Sampling
from streaming.jobs.codec import Delta, Run, Section
from streaming.jobs.history import History
from streaming.jobs.job import Job, Text
from streaming.jobs.queue import Queue
from streaming.order import Priority
from workers.attempt import Attempt
from workers.engines.sim.answers import token_text


def echoed(queue: Queue, *prompts: str, n: int = 1, tokens: int = 10) -> Job:
    plain = a_job(queue, prompts[0], tokens)
    fields: dict[str, Any] = {name: getattr(plain, name) for name in ("id", "model", "tenant", "priority")}
    return Job(**fields, prompt=Text(prompts), sampling=Sampling(max_tokens=tokens, n=n), echo=True)


def generated(prompt: str, tokens: int) -> str:
    return "".join([token_text(prompt, index) for index in range(tokens)])


async def test_the_next_worker_shows_it_no_second_time(shop: Workshop) -> None:
    """Each text begins with its prompt. The engine goes on after what it generated, and not after the prompt."""
    first = await shop.start(replace(FAST, step_ms=20))
    job = echoed(shop.queue, "once upon ", "a time ", n=2, tokens=60)
    await shop.queue.put(job)

    async def some() -> bool:
        record = await shop.reader.record(job.id)
        return sum((await shop.reader.history(job.id, record.runs)).tokens) > 20

    await until(some)
    first.task.cancel()
    await asyncio.gather(first.task, return_exceptions=True)
    await shop.start()
    record = await shop.ended(job)
    assert [each.outcome for each in record.attempts] == ["lost", "completed"]
    for index, prompt in enumerate(("once upon ", "once upon ", "a time ", "a time ")):
        assert text_of(record, index) == prompt + generated(prompt, 60)
    assert record.terminal is not None and record.terminal.usage.completion == 240, "a prompt counts as no token of it"


PLAIN = Job(id="j", model="m", tenant="t", priority=Priority.BATCH, prompt=Text(("one", "three")))
SECTIONS = (Section(1, Run("a", 4)), Section(3, Run("b", 4)))
ROWS = [Delta(1, 1, "one x", (7,), 0, 1), Delta(1, 2, "one", (8,), 0, 1), Delta(1, 3, " z", (9,), 0, 1)]


def test_an_answer_has_the_name_of_the_run_that_began_it() -> None:
    """Runs of two workers may have the same number. What nobody has begun is begun by this run."""

    def begun_by(*rows: Delta) -> list[str]:
        history = History(rows=list(rows), sections=SECTIONS if rows else ())
        requests = Attempt(a_claim(PLAIN, 9, worker="c"), history).requests()
        return [requests[index].begun_by for index in range(2)]

    assert begun_by(*ROWS, Delta(1, 4, "a", (1,), 1, 1)) == ["a/4", "b/4"]
    assert begun_by(*ROWS)[1] == "c/9" and begun_by() == ["c/9", "c/9"]
