"""The engine `upstream` in front of another Penstock, as real processes: its jobs are read on, and cancelled."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from functools import partial
from math import isnan
from pathlib import Path
from typing import Any

import pytest
from house import House, serving
from sim_worker import Running, ended, failure_of, put_job, recorder, text_of, until
from upstream_worker import StartUpstream, start_upstream

from penstock.engine import ChatTurn, Sampling
from penstock.tools import Tool, Tools
from streaming.jobs.job import Chat, Job, JobState, Text, Tokens
from streaming.jobs.queue import Queue
from streaming.jobs.reader import JobReader
from streaming.redis.client import RedisClient
from workers.engines.sim.answers import token_text
from workers.engines.upstream.settings import UpstreamSettings

__all__ = ["recorder", "start_upstream"]  # fixtures

pytestmark = pytest.mark.slow

TALK = Chat((ChatTurn("user", "Tell me about rivers."),))


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    with serving(tmp_path, "workers", PENSTOCK_SIM_STEP_MS="20") as house:
        yield house


def in_front_of(house: House) -> UpstreamSettings:
    return UpstreamSettings(urls=(house.url,))


def jobs_of(house: House) -> list[dict[str, Any]]:
    return json.loads(house.get("/v1/jobs?limit=100")[1])["data"]


async def shown(wire: RedisClient, job: Job, tokens: int) -> None:
    """Until so many tokens are logged."""
    reader = JobReader(wire)

    async def enough() -> bool:
        record = await reader.record(job.id)
        logged = record is not None and record.runs
        return bool(logged) and sum((await reader.history(job.id, record.runs)).tokens) > tokens  # type: ignore[union-attr]

    await until(enough)


def killed(worker: Running) -> None:
    """As by SIGKILL: it tells the server nothing."""
    worker.task.cancel()
    for running in worker.engine._live.values():  # type: ignore[attr-defined]
        running.task.cancel()


async def test_the_death_of_a_worker_begins_no_second_job(
    wire: RedisClient, start_upstream: StartUpstream, house: House
) -> None:
    """Nor does that of the other Penstock's API process: its job has the text, and each token counts once. With the
    penalty, no text would be continued in the middle."""
    first = await start_upstream(in_front_of(house))
    job = await put_job(Queue(wire), prompt=TALK, sampling=Sampling(max_tokens=150, repetition_penalty=1.3))
    await shown(wire, job, 10)
    killed(first)
    await start_upstream(in_front_of(house))
    await shown(wire, job, 30)
    house._processes[-1].kill()
    house._processes[-1].wait()
    await asyncio.to_thread(house.start_api)
    record = await ended(wire, job.id)
    assert record.state is JobState.COMPLETED and record.resets == 0, record.terminal
    (theirs,) = await asyncio.to_thread(jobs_of, house)
    result = json.loads(house.get(f"/v1/jobs/{theirs['id']}/result")[1])
    assert text_of(record) == result["choices"][0]["message"]["content"]
    counted = record.terminal.usage.prompt, record.terminal.usage.completion
    assert counted == (result["usage"]["prompt_tokens"], result["usage"]["completion_tokens"])


async def test_each_choice_goes_on_as_the_job_that_it_was(
    wire: RedisClient, start_upstream: StartUpstream, house: House
) -> None:
    """Two prompts with two choices each, and calls of tools beside them: as many jobs there as choices."""
    first = await start_upstream(in_front_of(house))
    tool = Tool("f", "", {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]})
    tools = Tools(choice="required", offered=(tool,))
    texts = await put_job(Queue(wire), prompt=Text(("one", "two")), sampling=Sampling(max_tokens=120, n=2))
    called = await put_job(Queue(wire), prompt=TALK, sampling=Sampling(max_tokens=100), tools=tools)
    await shown(wire, texts, 40)
    killed(first)
    await start_upstream(in_front_of(house))
    record, calls = await ended(wire, texts.id), await ended(wire, called.id)
    assert (record.state, record.resets, calls.state) == (JobState.COMPLETED, 0, JobState.COMPLETED), calls.terminal
    for index, prompt in enumerate(("one", "one", "two", "two")):
        assert text_of(record, index) == "".join([token_text(prompt, each) for each in range(120)])
    assert record.terminal is not None and record.terminal.usage.completion == 480
    assert len(await asyncio.to_thread(jobs_of, house)) == 5


async def test_a_job_that_is_cancelled_before_its_first_token_is_cancelled_there(
    wire: RedisClient, start_upstream: StartUpstream, tmp_path: Path
) -> None:
    """Its server has sent nothing yet, not even the id of its job."""
    with serving(tmp_path, "workers", PENSTOCK_SIM_PREFILL_MS="20000") as house:
        await start_upstream(in_front_of(house))
        job = await put_job(Queue(wire), prompt=TALK, sampling=Sampling(max_tokens=20))

        async def there(cancelled: bool) -> bool:
            found = await asyncio.to_thread(jobs_of, house)
            return [each["status"] == "cancelled" for each in found] == [cancelled]

        await until(partial(there, cancelled=False))
        await Queue(wire).cancel(job.id)
        assert (await ended(wire, job.id)).state is JobState.CANCELLED
        await until(partial(there, cancelled=True))


async def test_an_adapter_there_is_an_adapter_here(
    wire: RedisClient, start_upstream: StartUpstream, tmp_path: Path
) -> None:
    """By its full name, also when the worker dies: the other Penstock's job is read on."""
    row = '[models.sim]\nengine = "sim"\nadapters = { sql = "/sql" }\noptions.step_ms = 20.0\n'
    (tmp_path / "penstock.toml").write_text(row)
    with serving(tmp_path, "workers") as house:
        start = partial(start_upstream, in_front_of(house), adapters={"mine": "sim:sql"})
        first = await start()
        jobs = [await put_job(Queue(wire), max_tokens=80, adapter=name, v=7) for name in ("mine", "none")]
        await shown(wire, jobs[0], 10)
        killed(first)
        await start()
        assert text_of(await ended(wire, jobs[0].id)) == "".join(
            [token_text("user: hello\nadapter=sql", each) for each in range(80)]
        )
        assert "serves mine" in failure_of(await ended(wire, jobs[1].id)).message
        assert [each["model"] for each in await asyncio.to_thread(jobs_of, house)] == ["sim:sql"]


@pytest.mark.parametrize("prompt", [Text(("Water is carried.",)), Tokens(((3, 1, 4, 1, 5),))], ids=["text", "ids"])
@pytest.mark.parametrize("limit", [0, 4])
async def test_a_prompt_has_the_rows_that_its_server_gives_it(
    start_upstream: StartUpstream, wire: RedisClient, house: House, prompt: Text | Tokens, limit: int
) -> None:
    """As asked there directly, before the first token, or alone."""
    await start_upstream(in_front_of(house))
    sampling = Sampling(max_tokens=limit, logprobs=2, prompt_logprobs=True)
    job = await put_job(Queue(wire), prompt=prompt, sampling=sampling, echo=True)
    record = await ended(wire, job.id)
    asked = {"model": "sim", "prompt": prompt.texts[0] if isinstance(prompt, Text) else prompt.ids[0]}
    asked |= {"max_tokens": limit, "logprobs": 2, "echo": True}
    (choice,) = json.loads(house.post("/v1/completions", asked)[2])["choices"]
    assert record.terminal is not None and record.state is JobState.COMPLETED
    rows = [row for delta in record.terminal.rows for row in delta.logprobs]
    assert [row.token for row in rows] == choice["logprobs"]["tokens"]
    assert [row.logprob for row in rows[1:]] == choice["logprobs"]["token_logprobs"][1:] and isnan(rows[0].logprob)
    assert text_of(record) == choice["text"] and record.terminal.usage.completion == limit
