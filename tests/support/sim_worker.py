"""Workers with the simulated engine, started by a test on a real server and ended after it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import pytest
from flow import deltas_of, until
from msgspec.structs import replace

from penstock.content import TenantRules
from penstock.engine import ChatTurn, Failure, ModelCard, Piece, Request, Sampling, Step
from streaming.jobs.job import Chat, Job, JobState
from streaming.jobs.lease import Claim
from streaming.jobs.queue import Queue
from streaming.jobs.reader import JobReader
from streaming.jobs.reaper import Reaper
from streaming.jobs.records import JobRecord
from streaming.jobs.settings import NO_WEIGHTS
from streaming.keys import partition_key
from streaming.order import Priority
from streaming.redis.client import RedisClient
from telemetry.metrics import Metrics
from telemetry.tracing import Tracing
from workers.engines.sim.answers import prompt_text, token_text
from workers.engines.sim.engine import SimEngine
from workers.engines.sim.settings import SimSettings
from workers.record import Recorder
from workers.settings import WorkerSettings
from workers.worker import Worker

FAST = SimSettings(step_ms=1, prefill_ms=1, slots=8)
LONG = SimSettings(step_ms=5, prefill_ms=1, slots=8, context=8192)


@pytest.fixture(scope="module")
def recorder() -> Recorder:
    return Recorder("m", Metrics.start("", "worker"), Tracing())


@dataclass
class Running:
    worker: Worker
    stop: asyncio.Event
    task: asyncio.Task[None]
    engine: SimEngine


Start = Callable[..., Awaitable[Running]]


@pytest.fixture
async def start(wire: RedisClient, recorder: Recorder) -> AsyncIterator[Start]:
    """Starts workers; ends them all after the test."""
    started: list[Running] = []

    async def begin(
        sim: SimSettings = FAST,
        settings: WorkerSettings | None = None,
        engine: type[SimEngine] = SimEngine,
        weights: Mapping[str, float] = NO_WEIGHTS,
        content: TenantRules | None = None,
    ) -> Running:
        started.append(await begun(wire, engine("m", sim), settings, recorder, weights, content))
        return started[-1]

    yield begin
    await all_ended(started)


async def begun(
    wire: RedisClient,
    engine: Any,
    settings: WorkerSettings | None,
    recorder: Recorder,
    weights: Mapping[str, float] = NO_WEIGHTS,
    content: TenantRules | None = None,
) -> Running:
    """A worker with this engine, which has no request before the worker is there."""
    running: list[Running] = []

    def on_step(pieces: list[Piece]) -> None:
        if running:
            running[0].worker.on_step(pieces)

    card, stop = await engine.start(on_step, lambda _: None), asyncio.Event()
    settings = settings or WorkerSettings(drain_s=5)
    worker = Worker(wire, engine, card, settings, recorder, weights=weights, content=content)
    running.append(Running(worker, stop, asyncio.create_task(worker.run(stop)), engine))
    return running[0]


async def all_ended(started: Sequence[Running]) -> None:
    """These workers, without a drain."""
    for running in started:
        running.task.cancel()
        await asyncio.gather(running.task, return_exceptions=True)
        await running.engine.stop()


def a_job(queue: Queue, text: str = "hello", max_tokens: int = 10, **changes: object) -> Job:
    fields: dict[str, object] = {
        "id": queue.new_id("t"), "model": "m", "tenant": "t", "priority": Priority.STANDARD,
        "prompt": Chat((ChatTurn("user", text),)), "sampling": Sampling(max_tokens=max_tokens),
    }  # fmt: skip
    return Job(**{**fields, **changes})  # type: ignore[arg-type]


def a_claim(job: Job, number: int = 1, **changes: object) -> Claim:
    """As a worker has it, of an attempt and a run of this number."""
    fields: dict[str, object] = {
        "job": job, "partition": 0, "attempt": number, "run_number": number, "created_ms": 1_000, "claimed_ms": 3_000,
        "deadline_ms": None, "reply": (), "earlier_runs": (), "first_frame": 1,
    }  # fmt: skip
    return Claim(**{**fields, **changes})  # type: ignore[arg-type]


async def put_job(queue: Queue, *args: Any, **changes: Any) -> Job:
    """A job that waits."""
    job = a_job(queue, *args, **changes)
    await queue.put(job)
    return job


def expected(text: str, tokens: int) -> str:
    prompt = prompt_text((ChatTurn("user", text),))
    return "".join(token_text(prompt, index) for index in range(tokens))


async def lose_lease(wire: RedisClient, worker: Worker, partition: int = 0) -> None:
    """Let the lease of a running worker pass in one partition, again if a write of the worker has just renewed it."""

    async def taken() -> bool:
        await wire.redis.zadd(partition_key(partition, "leases"), {worker.lease.id: 1})
        await Reaper(wire).sweep()  # the worker's own may come first
        return await wire.redis.hget(partition_key(partition, "worker", worker.lease.id), "state") != b"live"

    await until(taken)


async def has_deltas(wire: RedisClient, job_id: str, count: int) -> bool:
    """Whether so many are logged, at least."""
    reader = JobReader(wire)
    return len(await deltas_of(reader, await reader.record(job_id))) >= count


async def ended(wire: RedisClient, job_id: str) -> JobRecord:
    reader = JobReader(wire)

    async def final() -> JobRecord | None:
        record = await reader.record(job_id)
        return record if record.state.final else None

    return cast(JobRecord, await until(final))


def failure_of(record: JobRecord) -> Failure:
    """Why this job, and no other end, failed."""
    assert record.state is JobState.FAILED and record.terminal is not None and record.terminal.failure is not None
    return record.terminal.failure


def text_of(record: JobRecord, index: int = 0) -> str:
    assert record.terminal is not None
    return "".join(row.text for row in record.terminal.rows if row.index == index)


@dataclass
class Workshop:
    """A queue, the workers that a test starts at it, and what becomes of its jobs."""

    wire: RedisClient
    start: Start

    def __post_init__(self) -> None:
        self.queue, self.reader = Queue(self.wire), JobReader(self.wire)

    async def put(self, *args: Any, **changes: Any) -> Job:
        """A job that waits."""
        return await put_job(self.queue, *args, **changes)

    async def has_deltas(self, job: Job, count: int) -> bool:
        return await has_deltas(self.wire, job.id, count)

    async def ended(self, job: Job) -> JobRecord:
        return await ended(self.wire, job.id)

    async def completed(self, job: Job, text: str, tokens: int) -> JobRecord:
        """Its record, once it has ended with the answer to this text."""
        record = await self.ended(job)
        assert record.state is JobState.COMPLETED and text_of(record) == expected(text, tokens)
        return record


@pytest.fixture
def shop(wire: RedisClient, start: Start) -> Workshop:
    return Workshop(wire, start)


class DeafEngine(SimEngine):
    """Claims to hold its output to JSON, and does not: what llama.cpp does once it has dropped a grammar."""

    def __init__(self, model: str, settings: SimSettings) -> None:
        super().__init__(model, settings)
        self.pasts: dict[str, int] = {}
        """Tokens of earlier attempts, by request."""

    async def start(self, on_step: Step, on_phase: Callable[[str], None]) -> ModelCard:
        card = await super().start(on_step, on_phase)
        return replace(card, capabilities=replace(card.capabilities, json_schema=True, tools_with_schema=True))

    def submit(self, request: Request) -> None:
        self.pasts[request.id] = request.past_tokens
        super().submit(request)
