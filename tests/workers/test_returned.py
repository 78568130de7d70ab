"""Jobs that an engine gives back: how often, and what becomes of one that it never runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from sim_worker import FAST, Start, ended, failure_of, put_job

from penstock.engine import RETURNED, ModelCard, Piece, Request, Step
from streaming.jobs.job import JobState
from streaming.jobs.queue import Queue
from streaming.redis.client import RedisClient
from workers.engines.sim.engine import SimEngine
from workers.preemption import MAX_KNOWN, MAX_RETURNS, ReturnCounts


def test_a_job_may_come_back_often_and_any_time_with_new_tokens() -> None:
    counts = ReturnCounts()
    assert all(counts.note("j", 5) for _ in range(MAX_RETURNS)) and not counts.note("j", 5)
    assert all(counts.note("k", deltas) for deltas in range(5 * MAX_RETURNS))
    for number in range(2 * MAX_KNOWN):
        counts.note(f"x{number}", 0)
    assert len(counts._counts) == MAX_KNOWN


class Returning(SimEngine):
    """Gives back what it gets, the first time or always."""

    always = True
    _seen = False

    async def start(self, on_step: Step, on_phase: Callable[[str], None]) -> ModelCard:
        self._deliver_to = on_step
        return await super().start(on_step, on_phase)

    def submit(self, request: Request) -> None:
        if self.always or not self._seen:
            self._seen = True
            asyncio.get_running_loop().call_soon(self._deliver_to, [Piece(request.id, finish=RETURNED)])
        else:
            super().submit(request)


class ReturningOnce(Returning):
    always = False


async def test_a_job_that_is_given_back_is_claimed_again(wire: RedisClient, start: Start) -> None:
    """And no attempt is lost."""
    job = await put_job(Queue(wire))
    await start(FAST, engine=ReturningOnce)
    record = await ended(wire, job.id)
    assert record.state is JobState.COMPLETED
    assert [each.outcome for each in record.attempts] == ["returned", "completed"]


async def test_a_job_that_is_always_given_back_fails(wire: RedisClient, start: Start) -> None:
    """It may be what brings the engine's servers down."""
    job = await put_job(Queue(wire))
    await start(FAST, engine=Returning)
    record = await ended(wire, job.id)
    assert (failure_of(record).code, failure_of(record).status) == ("upstream_error", 502)
    assert [each.outcome for each in record.attempts][-2:] == ["returned", "failed"]
