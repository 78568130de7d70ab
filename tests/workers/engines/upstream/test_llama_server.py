"""The engine `upstream` in front of a real llama-server: what is continued is exact, whoever dies."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from llama_process import LlamaProcess
from sim_worker import Running, ended, put_job, text_of, until
from upstream_worker import StartUpstream, start_upstream

from penstock.engine import ChatTurn, Sampling
from streaming.jobs.job import Chat, Job, JobState, Text
from streaming.jobs.queue import Queue
from streaming.jobs.reader import JobReader
from streaming.jobs.records import JobRecord
from streaming.redis.client import RedisClient
from workers.engines.upstream.settings import UpstreamSettings

__all__ = ["start_upstream"]  # a fixture

pytestmark = pytest.mark.slow

STORY = Text(("Once upon a time there was a fox",))


@pytest.fixture(scope="module")
def llama_process(real_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaProcess]:
    server = LlamaProcess(real_model, tmp_path_factory.mktemp("llama") / "llama.log")
    yield server
    server.kill()


@pytest.fixture
async def llama(llama_process: LlamaProcess) -> LlamaProcess:
    """A server that runs nothing: it is started where the test before has left none."""
    if not llama_process.is_running:
        await asyncio.to_thread(llama_process.start)
    await until(lambda: idle(llama_process))
    return llama_process


def exact(*servers: LlamaProcess) -> UpstreamSettings:
    """Without cached prompts, an interrupted greedy text continues exactly."""
    return UpstreamSettings(urls=tuple(server.url for server in servers), cache_prompt=False)


async def more_than(tokens: int, wire: RedisClient, job: Job) -> bool:
    """Whether so many are logged of a job that runs."""
    reader = JobReader(wire)
    record = await reader.record(job.id)
    if record is None or record.state.final or not record.runs:
        return False
    return sum((await reader.history(job.id, record.runs)).tokens) > tokens


async def idle(server: LlamaProcess) -> bool:
    return await asyncio.to_thread(server.gauge, "requests_processing") == 0


def facts_of(record: JobRecord) -> tuple[str, int, tuple[str, ...], int, int]:
    """What a reader and a bill get of a job."""
    assert record.terminal is not None and record.terminal.failure is None, record.terminal
    end = record.terminal
    return text_of(record), sum(row.n for row in end.rows), tuple(end.finishes), end.usage.prompt, end.usage.completion


def logged_tokens(record: JobRecord) -> list[str]:
    """The tokens of the log-probabilities, in order, of which the API computes offsets."""
    return [each.token for row in record.terminal.rows for each in row.logprobs]


def outcomes(record: JobRecord) -> list[str]:
    return [each.outcome for each in record.attempts]


CUT = {
    "chat": {
        "prompt": Chat((ChatTurn("user", "Tell me about rivers."),)),
        "sampling": Sampling(max_tokens=40, temperature=0),
    },
    "text": {
        "prompt": Text(("Emoji: 😀😃😄 ",)),
        "sampling": Sampling(
            max_tokens=40, temperature=0, top_k=20, min_p=0.1, presence_penalty=0.8, repetition_penalty=1.3,
            logit_bias={28: -100.0, 30: 2.5}, logprobs=2, ignore_eos=True,
        ),
    },
}  # fmt: skip


@pytest.mark.parametrize("case", CUT)
async def test_a_killed_server_shows_in_nothing(
    wire: RedisClient, start_upstream: StartUpstream, llama: LlamaProcess, case: str
) -> None:
    """SIGKILL in the middle, and a new process: text, tokens, finish reason and counts are those of an unbroken
    run, and no attempt was lost."""
    await start_upstream(exact(llama))
    whole = await ended(wire, (await put_job(Queue(wire), **CUT[case])).id)
    job = await put_job(Queue(wire), **CUT[case])
    await until(lambda: more_than(15, wire, job))
    await asyncio.to_thread(llama.kill)
    await asyncio.to_thread(llama.start)
    broken = await ended(wire, job.id)
    assert facts_of(broken) == facts_of(whole)
    assert outcomes(broken) in (["returned", "completed"], ["completed"])  # the second, if it is back at once
    assert logged_tokens(broken) == logged_tokens(whole) and len(logged_tokens(whole)) == (40 if case == "text" else 0)


async def test_a_cancel_reaches_the_server(
    wire: RedisClient, start_upstream: StartUpstream, llama: LlamaProcess
) -> None:
    """Nothing runs there any more, long before its end."""
    await start_upstream(exact(llama))
    before = llama.gauge("tokens_predicted_total")
    job = await put_job(Queue(wire), prompt=STORY, sampling=Sampling(max_tokens=2000, temperature=0))
    await until(lambda: more_than(3, wire, job))
    assert llama.gauge("requests_processing") == 1
    await Queue(wire).cancel(job.id)
    await until(lambda: idle(llama))
    assert (await ended(wire, job.id)).state is JobState.CANCELLED
    assert llama.gauge("tokens_predicted_total") - before < 2000, "it went on to its end"


async def test_every_job_survives_an_outage(
    wire: RedisClient, start_upstream: StartUpstream, llama: LlamaProcess
) -> None:
    """Jobs wait and come while the server is away. Each ends as if nothing had been, and none lost an attempt. Before
    and after, requests wait in our queue and not in the server."""
    running = await start_upstream(exact(llama))
    jobs = [
        await put_job(Queue(wire), prompt=Text((f"The number {n} is",)), sampling=Sampling(max_tokens=12))
        for n in range(8)
    ]
    done = JobReader(wire)

    async def some() -> bool:
        records = [await done.record(job.id) for job in jobs]
        assert await asyncio.to_thread(llama.gauge, "requests_deferred") == 0
        return sum(record.state.final for record in records) >= 2

    await until(some)
    await asyncio.to_thread(llama.kill)
    jobs += [
        await put_job(Queue(wire), prompt=Text((f"The year {n} is",)), sampling=Sampling(max_tokens=12))
        for n in range(4)
    ]
    await until(lambda: not running.engine.stats().accepts and not running.worker.running)
    assert running.engine.health().ok
    await asyncio.sleep(0.6)  # a claim more would come within poll_ms
    assert not running.worker.running
    await asyncio.to_thread(llama.start)
    records = [await ended(wire, job.id) for job in jobs]
    for record in records:
        assert facts_of(record)[2] in (("length",), ("stop",))
        assert set(outcomes(record)) <= {"completed", "returned"}
    assert any("returned" in outcomes(record) for record in records)
    assert not running.task.done()


async def test_the_next_worker_reads_the_generation_of_a_killed_one(
    wire: RedisClient, start_upstream: StartUpstream, llama: LlamaProcess
) -> None:
    """A sampled answer in JSON goes on without a new generation: the server reads no second prompt."""
    first = await start_upstream(exact(llama))
    schema = {"type": "array", "minItems": 40}
    sampling = Sampling(max_tokens=60, temperature=1.0, json_schema=schema)
    job = await put_job(Queue(wire), prompt=Chat((ChatTurn("user", "List rivers as JSON."),)), sampling=sampling)
    await until(lambda: more_than(20, wire, job))
    prompts = llama.gauge("prompt_tokens_total")
    killed(first)
    await start_upstream(exact(llama))
    broken = await ended(wire, job.id)
    assert outcomes(broken) == ["lost", "completed"] and broken.resets == 0
    assert llama.gauge("prompt_tokens_total") == prompts and prompts > 0
    _, tokens, finishes, _, completion = facts_of(broken)
    assert completion == 60 and finishes == ("length",) and tokens == 60


def killed(worker: Running) -> None:
    """As by SIGKILL: it tells the server nothing."""
    worker.task.cancel()
    for running in worker.engine._live.values():  # type: ignore[attr-defined]
        running.task.cancel()
