"""Output of an engine that cannot be stored: it fails its own job, and no other one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from msgspec.structs import replace
from sim_worker import FAST, Start, a_job, ended, expected, failure_of, text_of

from penstock.engine import EngineTimes, ModelCard, Piece, Sampling, Step
from streaming.jobs.job import JobState, Text
from streaming.jobs.queue import Queue
from streaming.redis.client import RedisClient
from workers.engines.sim.engine import SimEngine

HUGE = 10**30


SPOILS: dict[str, Callable[[Piece], Piece]] = {
    "prompt_tokens": lambda piece: replace(piece, prompt_tokens=HUGE) if piece.prompt_tokens else piece,
    "cached_tokens": lambda piece: replace(piece, cached_tokens=HUGE) if piece.prompt_tokens else piece,
    "last_prompt_tokens": lambda piece: replace(piece, prompt_tokens=HUGE if piece.last else 0),
    "ids": lambda piece: replace(piece, ids=(HUGE,)),
    "a_later_id": lambda piece: piece if piece.prompt_tokens else replace(piece, ids=(HUGE,)),
    "n": lambda piece: replace(piece, n=HUGE),
    "n_of_64_bits": lambda piece: replace(piece, n=2**63),
    "text": lambda piece: replace(piece, text="\ud800"),
    "times": lambda piece: replace(piece, times=EngineTimes(HUGE, HUGE, HUGE)) if piece.last else piece,
    "endless_times": lambda piece: replace(piece, times=EngineTimes(1e400, 1e400, 1e400)) if piece.last else piece,
}


class Spoiling(SimEngine):
    """Gives values that cannot be stored for the requests whose text has the word "spoil"."""

    spoil: Callable[[Piece], Piece]

    async def start(self, on_step: Step, on_phase: Callable[[str], None]) -> ModelCard:
        def spoiled(pieces: list[Piece]) -> None:
            on_step([self.spoil(piece) if piece.id.partition("/")[0] in self.bad else piece for piece in pieces])

        self.bad = set[str]()
        return await super().start(spoiled, on_phase)


@pytest.mark.parametrize("kind", SPOILS)
async def test_it_fails_its_own_job_and_the_others_go_on(
    wire: RedisClient, start: Start, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """Those beside it, and those after it; the cause is in its record, and once in the log."""
    queue, engine = Queue(wire), type("SpoilingOne", (Spoiling,), {"spoil": staticmethod(SPOILS[kind])})
    running = await start(FAST, engine=engine)
    bad, beside, after = (a_job(queue, text, 20, stream=True) for text in ("bad", "beside", "after"))
    running.engine.bad.add(bad.id)
    await queue.put(bad)
    await queue.put(beside)
    record = await ended(wire, bad.id)
    assert (failure_of(record).code, failure_of(record).status) == ("engine_error", 500)
    assert "cannot be stored (" in failure_of(record).message
    assert [row.seq for row in record.terminal.rows] == list(range(1, record.terminal.seq + 1))
    await queue.put(after)
    for job, text in ((beside, "beside"), (after, "after")):
        other = await ended(wire, job.id)
        assert other.state is JobState.COMPLETED and text_of(other) == expected(text, 20)
    assert [each.message for each in caplog.records].count(failure_of(record).message) == 1


async def test_it_fails_a_job_of_several_texts(wire: RedisClient, start: Start) -> None:
    """Its other texts end with it, and the worker drains."""
    queue = Queue(wire)
    spoil = {"spoil": staticmethod(lambda piece: replace(piece, ids=(HUGE,)) if piece.id.endswith("/2") else piece)}
    running = await start(FAST, engine=type("SpoilingOne", (Spoiling,), spoil))
    bad = a_job(queue, prompt=Text(("one", "two")), sampling=Sampling(max_tokens=50, n=2))
    running.engine.bad.add(bad.id)
    await queue.put(bad)
    assert (await ended(wire, bad.id)).state is JobState.FAILED
    running.stop.set()
    async with asyncio.timeout(20):
        await running.task


async def test_counts_whose_sum_is_too_large_fail_the_job(wire: RedisClient, start: Start) -> None:
    """Each of them could be stored."""
    queue = Queue(wire)
    spoil = {"spoil": staticmethod(lambda piece: replace(piece, n=2**40))}
    running = await start(FAST, engine=type("SpoilingOne", (Spoiling,), spoil))
    bad, after = a_job(queue, "bad", 9000), a_job(queue, "after", 20)
    running.engine.bad.add(bad.id)
    await queue.put(bad)
    record = await ended(wire, bad.id)
    assert record.state is JobState.FAILED and record.terminal is not None and record.terminal.usage.completion == 0
    await queue.put(after)
    assert (await ended(wire, after.id)).state is JobState.COMPLETED
