"""Requests of many choices: at most half of a worker is theirs, the other choices wait in it and all of them end."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from flow import deltas_of
from many_choices import job_of, nothing_left, prompts, put_many
from msgspec.structs import replace
from sim_worker import Workshop, ended, failure_of, text_of, until

from penstock.engine import EngineDead, EngineHealth, Piece, Request, Sampling
from streaming.jobs.job import Job, JobState, Text
from streaming.jobs.reader import JobReader
from streaming.order import Priority
from streaming.redis.client import RedisClient
from workers.engines.sim.answers import token_text
from workers.engines.sim.engine import SimEngine
from workers.engines.sim.settings import SimSettings
from workers.settings import WorkerSettings

pytestmark = pytest.mark.slow

SLOW = SimSettings(step_ms=20, prefill_ms=1, slots=8)


class Counted(SimEngine):
    """Notes what it is given, in order, and how much of each job it has at most."""

    def __init__(self, model: str, settings: SimSettings) -> None:
        super().__init__(model, settings)
        self.given: list[str] = []
        self.seeds: dict[int, int | None] = {}
        self.live: Counter[str] = Counter()
        self.most: Counter[str] = Counter()

    async def start(self, on_step, on_phase):  # type: ignore[no-untyped-def]
        def counted(pieces: list[Piece]) -> None:
            for piece in pieces:
                if piece.last:
                    self.live[job_of(piece.id)] -= 1
            on_step(pieces)

        return await super().start(counted, on_phase)

    def submit(self, request: Request) -> None:
        super().submit(request)
        job = job_of(request.id)
        self.given.append(request.id)
        self.seeds[int(request.id.rpartition("/")[2])] = request.sampling.seed
        self.live[job] += 1
        self.most[job] = max(self.most[job], self.live[job])


def said(prompt: str, tokens: int) -> str:
    return "".join(token_text(prompt, index) for index in range(tokens))


async def exact(wire: RedisClient, job: Job, tokens: int) -> None:
    """Every choice has its text, every delta its number, and each prompt is counted once."""
    record = await ended(wire, job.id)
    assert record.state is JobState.COMPLETED and record.terminal is not None
    n, texts = job.sampling.n, job.prompt.texts  # type: ignore[union-attr]
    assert [text_of(record, at) for at in range(job.choices)] == [
        said(texts[at // n], tokens) for at in range(job.choices)
    ]
    assert [row.seq for row in record.terminal.rows] == list(range(1, len(record.terminal.rows) + 1))
    assert record.terminal.usage.completion == tokens * job.choices
    assert record.terminal.usage.prompt == sum(max(1, len(text) // 4) for text in texts)
    assert record.terminal.finishes == ("length",) * job.choices


@pytest.mark.parametrize(("slots", "share"), [(8, 4), (3, 1), (1, 1)])
async def test_one_request_has_half_of_the_slots(shop: Workshop, slots: int, share: int) -> None:
    """At least one; the other choices are started as its own end, in their order, and each with its own seed."""
    running = await shop.start(SimSettings(step_ms=1, prefill_ms=1, slots=slots), engine=Counted)
    job = await shop.put(prompt=prompts(5), sampling=Sampling(max_tokens=6, n=4, seed=100))
    await exact(shop.wire, job, 6)
    engine = running.engine
    assert isinstance(engine, Counted) and engine.most[job.id] == share
    assert [int(each.rpartition("/")[2]) for each in engine.given] == list(range(20))
    assert engine.seeds == {index: 100 + index % 4 for index in range(20)}
    nothing_left(running)


async def test_it_has_half_of_the_cache(shop: Workshop) -> None:
    """Where the KV cache is smaller than the slots would need, half of that is the limit, by estimated sizes."""
    running = await shop.start(SimSettings(step_ms=5, prefill_ms=1, slots=8, kv_tokens=400), engine=Counted)
    job = await put_many(shop.queue, 12, 78)  # of 80 tokens each
    await until(lambda: running.worker._starter.texts == 2)
    other = await shop.put("other", 4)
    assert (await shop.ended(other)).state is JobState.COMPLETED
    assert running.worker._partial
    await exact(shop.wire, job, 78)
    assert isinstance(running.engine, Counted) and running.engine.most[job.id] == 2


@pytest.mark.parametrize(("lines", "choices"), [(20, 1), (6, 10)])
async def test_lane_batch_leaves_the_reserved_slots_free(shop: Workshop, lines: int, choices: int) -> None:
    """However much waits, its lines fill all other slots and not one more; a chat has one at once, and no line ends for
    it."""
    jobs = [await put_many(shop.queue, choices, 400, priority=Priority.BATCH) for _ in range(lines)]
    running = await shop.start(SLOW, WorkerSettings(reserved_slots=2, drain_s=5))
    starter = running.worker._starter
    await until(lambda: starter.texts == 6)
    await asyncio.sleep(0.6)  # a claim more would come within poll_ms
    assert starter.batch_texts == 6 and running.worker.running <= 6 and running.worker.reserved == 2
    held = {id(each) for each in running.engine._running}
    for priority in (Priority.INTERACTIVE, Priority.STANDARD):
        chat = await shop.put("chat", 4, priority=priority)
        assert (await shop.ended(chat)).state is JobState.COMPLETED
    assert {id(each) for each in running.engine._running} == held, "a chat waited for a line to end"
    assert starter.batch_texts == 6 and running.engine.stats().waiting == 0
    for job in jobs[:3]:
        await shop.queue.cancel(job.id)
        await shop.ended(job)
    await until(lambda: starter.texts == 6)  # what is left goes on in their place
    assert starter.batch_texts == 6


@pytest.mark.parametrize("stop", ["cancel", "deadline"])
async def test_its_end_before_its_time_starts_no_choice(shop: Workshop, stop: str) -> None:
    """A cancel and a deadline while choices wait: these are never started, and no reader hears of them."""
    running = await shop.start(SLOW, engine=Counted)
    job = await put_many(shop.queue, 20, 500, deadline_ms=2000 if stop == "deadline" else None)
    await until(lambda: running.worker._starter.texts == 4)
    if stop == "cancel":
        await shop.queue.cancel(job.id)
    record = await shop.ended(job)
    assert (
        record.state is (JobState.CANCELLED if stop == "cancel" else JobState.EXPIRED) and record.terminal is not None
    )
    assert isinstance(running.engine, Counted) and len(running.engine.given) == 4
    assert {row.index for row in record.terminal.rows} <= {0, 1, 2, 3}
    assert record.terminal.usage.prompt == sum(len(f"prompt {at}") // 4 for at in range(4)), "of those that ran"
    await until(lambda: running.engine.stats().running == 0 and running.worker.running == 0)
    nothing_left(running)


class Unsure(Counted):
    """Cannot say of a prompt whether it fits before it is given it."""

    async def check(self, request: Request) -> None: ...


@pytest.mark.parametrize("engine", [Counted, Unsure])
async def test_a_list_with_one_impossible_prompt_fails(shop: Workshop, engine: type[Counted]) -> None:
    """Before the first choice is begun, for every prompt is looked at; where the engine cannot say, when its turn
    comes."""
    running = await shop.start(replace(SLOW, step_ms=2), engine=engine)
    texts = (*prompts(6).texts, "x" * 50_000, "y")
    job = await shop.put(prompt=Text(texts), sampling=Sampling(max_tokens=10))
    record = await shop.ended(job)
    assert failure_of(record).code == "context_length_exceeded" and record.terminal is not None
    assert bool(record.terminal.usage.completion) == bool(running.engine.given) == (engine is Unsure)
    nothing_left(running)
    await exact(shop.wire, await put_many(shop.queue, 9, 5), 5)


async def test_a_drain_hands_over_what_was_not_started(shop: Workshop) -> None:
    """Some choices ended, some under way, some never begun: another worker, with other slots, does the rest."""
    first = await shop.start(SLOW, WorkerSettings(drain_s=0.1))
    job = await shop.put(prompt=prompts(6), sampling=Sampling(max_tokens=25, n=2))
    await until(lambda: _ended_choices(shop.wire, job))
    first.stop.set()
    await first.task
    nothing_left(first)
    assert (await shop.reader.record(job.id)).state is JobState.QUEUED
    await shop.start(SimSettings(step_ms=1, prefill_ms=1, slots=3))
    await exact(shop.wire, job, 25)


async def _ended_choices(wire: RedisClient, job: Job) -> bool:
    reader = JobReader(wire)
    return any(row.finish for row in await deltas_of(reader, await reader.record(job.id)))


class Failing(SimEngine):
    """Raises at the submit of one request, and says all the same that it is well."""

    fails_at, error = 3, EngineDead("gone")
    count = 0

    def submit(self, request: Request) -> None:
        self.count += 1
        if self.count == self.fails_at:
            raise self.error
        super().submit(request)

    def health(self) -> EngineHealth:
        return EngineHealth(True)


async def test_an_engine_that_dies_when_a_later_choice_is_given_ends_the_worker(shop: Workshop) -> None:
    """Nobody hears what the event loop's callbacks raise."""
    running = await shop.start(SLOW, engine=Failing)
    await put_many(shop.queue, 10, 20)
    with pytest.raises(EngineDead, match="gone"):
        await asyncio.wait_for(running.task, 20)


async def test_an_engine_that_raises_when_a_later_choice_is_given_fails_that_job(
    shop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The choice would neither run nor wait, and its job never end; others go on."""
    monkeypatch.setattr(Failing, "fails_at", 7)
    monkeypatch.setattr(Failing, "error", KeyError("odd"))
    running = await shop.start(SLOW, engine=Failing)
    failure = failure_of(await shop.ended(await put_many(shop.queue, 10, 20)))
    assert (failure.code, failure.status) == ("engine_error", 500)
    await until(lambda: not running.worker.running)
    nothing_left(running)
    await exact(shop.wire, await put_many(shop.queue, 9, 5), 5)
