"""Output of an engine that cannot be stored, and jobs that it gives back: each fails at most its own job."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from msgspec.structs import replace
from sim_worker import FAST, Workshop, a_job, failure_of

from penstock.engine import RETURNED, EngineTimes, ModelCard, Piece, Request, Step
from streaming.jobs.codec import Frame
from streaming.jobs.job import JobState
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
    shop: Workshop, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """Those beside it, and those after it; the cause is in its record, and once in the log."""
    engine = type("SpoilingOne", (Spoiling,), {"spoil": staticmethod(SPOILS[kind])})
    running = await shop.start(FAST, engine=engine)
    bad = a_job(shop.queue, "bad", 20, stream=True)
    running.engine.bad.add(bad.id)
    await shop.queue.put(bad)
    beside = await shop.put("beside", 20, stream=True)
    record = await shop.ended(bad)
    assert (failure_of(record).code, failure_of(record).status) == ("engine_error", 500)
    assert "cannot be stored (" in failure_of(record).message
    assert [row.seq for row in record.terminal.rows] == list(range(1, record.terminal.seq + 1))
    after = await shop.put("after", 20, stream=True)
    for job, text in ((beside, "beside"), (after, "after")):
        await shop.completed(job, text, 20)
    assert [each.message for each in caplog.records].count(failure_of(record).message) == 1


async def test_counts_whose_sum_is_too_large_fail_the_job(shop: Workshop) -> None:
    """Each of them could be stored."""
    spoil = {"spoil": staticmethod(lambda piece: replace(piece, n=2**40))}
    running = await shop.start(FAST, engine=type("SpoilingOne", (Spoiling,), spoil))
    bad = a_job(shop.queue, "bad", 9000)
    running.engine.bad.add(bad.id)
    await shop.queue.put(bad)
    record = await shop.ended(bad)
    assert record.state is JobState.FAILED and record.terminal is not None and record.terminal.usage.completion == 0
    after = await shop.put("after", 20)
    assert (await shop.ended(after)).state is JobState.COMPLETED


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


async def test_a_job_that_is_given_back_is_claimed_again(shop: Workshop) -> None:
    """And no attempt is lost."""
    job = await shop.put()
    await shop.start(FAST, engine=ReturningOnce)
    record = await shop.ended(job)
    assert record.state is JobState.COMPLETED
    assert [each.outcome for each in record.attempts] == ["returned", "completed"]


async def test_a_job_that_is_always_given_back_fails(shop: Workshop) -> None:
    """It may be what brings the engine's servers down."""
    job = await shop.put()
    await shop.start(FAST, engine=Returning)
    record = await shop.ended(job)
    assert (failure_of(record).code, failure_of(record).status) == ("upstream_error", 502)
    assert [each.outcome for each in record.attempts][-2:] == ["returned", "failed"]


class ReturningLate(SimEngine):
    """Gives each job back once, after some tokens."""

    TOKENS = 200

    async def start(self, on_step: Step, on_phase: Callable[[str], None]) -> ModelCard:
        self._counts = Counter[str]()
        return await super().start(lambda pieces: on_step([self._passed(piece) for piece in pieces]), on_phase)

    def _passed(self, piece: Piece) -> Piece:
        job_id = piece.id.partition("/")[0]
        self._counts[job_id] += 1
        return Piece(piece.id, finish=RETURNED) if self._counts[job_id] == self.TOKENS else piece


async def test_a_long_job_that_is_given_back_keeps_what_it_has_generated(
    shop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its worker goes on, and trims its log: the tokens go with the job, however many there are."""
    monkeypatch.setattr("workers.preemption.MAX_PARKED_DELTAS", 10)
    running, frames = await shop.start(FAST, engine=ReturningLate), list[int]()
    release = running.worker.lease.release

    async def noted(job_id: str, number: int, parked: Sequence[Frame] = (), **options: Any) -> None:
        frames.append(len(parked))
        await release(job_id, number, parked, **options)

    monkeypatch.setattr(running.worker.lease, "release", noted)
    job = await shop.put("long", 400)
    record = await shop.completed(job, "long", 400)
    assert [each.outcome for each in record.attempts] == ["returned", "completed"] and frames == [1]
