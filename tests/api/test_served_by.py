"""What clients see of an answer that another model gave: in headers, bodies, chunks, jobs, responses and metrics."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from api_in_process import LocalApi, api_in_process
from fake_upstream import ANSWER, MODEL, FakeUpstream, serving
from sim_worker import Running, recorder, until
from upstream_bench import FAST
from upstream_worker import StartUpstream, start_upstream

from streaming.redis.client import RedisClient
from workers.engines.upstream.settings import UpstreamSettings
from workers.record import Recorder

__all__ = ["recorder", "start_upstream"]  # fixtures

HELLO = [{"role": "user", "content": "hi"}]
CALLS: list[dict[str, Any]] = [
    {"tool_calls": [{"index": 0, "id": "x", "type": "function", "function": {"name": "get_time", "arguments": "{}"}}]}
]
TOOL = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}


class Place:
    """An API and a worker of model `sim`, whose server is `own`; `other` is that of its fallback `spare`."""

    def __init__(self, api: LocalApi, start: StartUpstream, own: FakeUpstream, other: FakeUpstream) -> None:
        self.api, self._start, self.own, self.other = api, start, own, other
        self.workers: list[Running] = []

    async def work(self) -> None:
        settings = UpstreamSettings(**FAST, urls=(self.own.url,), fallback=("spare",), name=MODEL)  # type: ignore[arg-type]
        spare = UpstreamSettings(**FAST, urls=(self.other.url,), name=MODEL)  # type: ignore[arg-type]
        running = await self._start(settings, model="sim", others={"spare": spare})
        self.workers.append(running)
        pools: Any = running.engine._pools  # type: ignore[attr-defined]
        await asyncio.wait_for(_ready(lambda: all(pool.ready for pool in pools)), 10)

    async def chat(self, **more: Any) -> Any:
        body = {"model": "sim", "messages": HELLO, "max_tokens": 10} | more
        return await self.api.post("/v1/chat/completions", body)


async def _ready(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


@pytest.fixture
async def place(wire: RedisClient, start_upstream: StartUpstream) -> AsyncIterator[Place]:
    own, other = FakeUpstream("vllm", step_s=0.005), FakeUpstream("vllm", step_s=0.005)
    async with serving(own, other), api_in_process(RedisClient.open(wire.settings)) as api:
        yield Place(api, start_upstream, own, other)


def chunks_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


async def test_an_answer_of_the_model_itself_names_it_in_the_header_alone(place: Place) -> None:
    await place.work()
    whole, stream = await place.chat(), await place.chat(stream=True)
    assert whole.headers["x-served-by"] == stream.headers["x-served-by"] == "sim"
    assert "served_by" not in whole.json() and "served_by" not in stream.text
    job = (await place.api.client.get(f"/v1/jobs/{whole.headers['x-job-id']}")).json()
    assert job["served_by"] == "sim"


async def test_every_form_of_an_answer_says_who_gave_it(place: Place, recorder: Recorder) -> None:
    """Whole and streamed, one choice and several, with usage and without."""
    await place.work()
    await place.own.stop()
    before = tokens_of(recorder)
    whole = await place.chat()
    assert whole.headers["x-served-by"] == whole.json()["served_by"] == "spare"
    assert whole.json()["model"] == "sim" and whole.json()["choices"][0]["message"]["content"] == "".join(ANSWER[:10])
    for usage in (False, True):
        options = {"stream_options": {"include_usage": True}} if usage else {}
        stream = await place.chat(stream=True, n=2, **options)
        assert stream.headers["x-served-by"] == "spare"
        said = [chunk for chunk in chunks_of(stream.text) if "served_by" in chunk]
        assert [chunk["choices"][0]["index"] for chunk in said if chunk["choices"]] in ([0, 1], [1, 0])
        assert [chunk["usage"]["completion_tokens"] for chunk in said if not chunk["choices"]] == (
            [20] if usage else []
        )
        assert {chunk["served_by"] for chunk in said} == {"spare"}
    job = (await place.api.client.get(f"/v1/jobs/{whole.headers['x-job-id']}")).json()
    assert job["served_by"] == job["result"]["served_by"] == "spare"
    listed = (await place.api.client.get("/v1/jobs")).json()["data"]
    assert {each["served_by"] for each in listed} == {"spare"}
    events = (await place.api.client.get(f"/v1/jobs/{whole.headers['x-job-id']}/events")).text
    assert '"served_by":"spare"' in events
    after = tokens_of(recorder)
    grown = {key: after[key] - before.get(key, 0) for key in after}
    assert {key: count for key, count in grown.items() if count} == {
        ("spare", "prompt"): 9.0, ("spare", "completion"): 50.0, ("spare", "cached"): 6.0,
    }  # fmt: skip


async def test_calls_and_responses_say_who_gave_them(place: Place) -> None:
    await place.work()
    await place.own.stop()
    place.other.deltas = CALLS
    called = await place.chat(tools=[TOOL], stream=True)
    assert [chunk["served_by"] for chunk in chunks_of(called.text) if "served_by" in chunk] == ["spare"]
    place.other.deltas = []
    asked = {"model": "sim", "input": "hi", "max_output_tokens": 10}
    response = await place.api.post("/v1/responses", asked)
    assert response.headers["x-served-by"] == response.json()["served_by"] == "spare"
    streamed = chunks_of((await place.api.post("/v1/responses", asked | {"stream": True})).text)
    assert streamed[-1]["response"]["served_by"] == "spare" and "served_by" not in streamed[0]["response"]
    again = (await place.api.client.get(f"/v1/responses/{response.json()['id']}")).json()
    assert again["served_by"] == "spare"


@pytest.mark.slow
async def test_a_lost_workers_answer_is_continued_by_the_model_that_began_it(place: Place, wire: RedisClient) -> None:
    """Although its own model is back."""
    place.own.step_s = place.other.step_s = 0.05
    await place.work()
    await place.own.stop()
    asking = asyncio.create_task(place.chat(max_tokens=60))

    async def begun() -> bool:
        return bool(place.other.sent) and place.other.running == 1

    await until(begun)
    await asyncio.sleep(0.3)
    first = place.workers[0]
    first.task.cancel()
    await asyncio.gather(first.task, return_exceptions=True)
    await first.engine.stop()
    await place.own.start()
    await place.work()
    answer = (await asking).json()
    assert answer["choices"][0]["message"]["content"] == "".join(ANSWER[:60])
    assert (answer["served_by"], answer["usage"]["completion_tokens"]) == ("spare", 60)
    assert not place.own.sent and place.other.sent[-1].continues


def tokens_of(recorder: Recorder) -> dict[tuple[str, str], float]:
    """Tokens by model and kind, as the metrics count them; none that are 0."""
    recorder.metrics.flush()
    page = recorder.metrics.expose().decode()
    found = {}
    for line in page.splitlines():
        if line.startswith("penstock_tokens_total{"):
            labels, value = line.rsplit(" ", 1)
            parts = dict(part.split("=") for part in labels[labels.index("{") + 1 : -1].split(","))
            if float(value):
                found[parts["model"].strip('"'), parts["kind"].strip('"')] = float(value)
    return found
