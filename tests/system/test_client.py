"""penstock.client against real processes that are killed, stopped and cut off: each token once and in order."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from batching import said
from flow import until
from house import House, free_port, key_rows, unstarted
from severing import store_cut

from penstock.client import ApiRefusal, AsyncPenstockClient, PenstockClient, StreamEvent, StreamReset

pytestmark = pytest.mark.slow

TOKENS = 300


def chat(text: str, tokens: int = TOKENS, **more: Any) -> dict[str, Any]:
    return {"model": "sim", "messages": [{"role": "user", "content": text}], "max_tokens": tokens, **more}


@contextmanager
def two_doors(folder: Path, *, keys: bool = False, partitions: int = 1) -> Iterator[tuple[House, list[Any], list[str]]]:
    """A worker and two API processes, each with a port of its own."""
    if keys:
        (folder / "penstock.toml").write_text(key_rows(ann="", bob=""))
    with unstarted(folder) as house:
        house.environ |= {"PENSTOCK_REDIS_PARTITIONS": str(partitions), "PENSTOCK_SIM_STEP_MS": "6"}
        house.start("workers")
        ports = [house.port, free_port()]
        doors = [house.start_api(port) for port in ports]
        house.wait_ready()
        yield house, doors, [f"http://127.0.0.1:{port}" for port in ports]


def texts(events: list[StreamEvent]) -> dict[int, str]:
    """The text of each choice."""
    found: defaultdict[int, str] = defaultdict(str)
    for event in events:
        found[event.choice] += event.text
    return {choice: text for choice, text in found.items() if text}


def answers(job: dict[str, Any]) -> dict[int, str]:
    """The same of a job's result."""
    return {
        choice["index"]: choice["message"]["content"] if "message" in choice else choice["text"]
        for choice in job["result"]["choices"]
    }


def killed(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


@pytest.mark.parametrize("body", [
    chat("several", n=3, stream=True),
    {"model": "sim", "endpoint": "/v1/completions", "prompt": ["a", "b b"], "n": 2, "max_tokens": TOKENS},
], ids=["choices", "prompts"])  # fmt: skip
def test_a_stream_survives_the_kill_of_the_process_that_serves_it(body: dict[str, Any], tmp_path: Path) -> None:
    """Twice, the second time while the first process is dead; behind keys, over several partitions."""
    with two_doors(tmp_path, keys=True, partitions=3) as (house, doors, urls), PenstockClient(urls, "ann") as client:
        job, events = client.submit(body), []
        for event in client.stream(job["id"]):
            events.append(event)
            if event.text and doors:
                killed(doors.pop(0))
                if not doors:
                    house.start_api()
        ended = client.wait(job["id"])
        assert texts(events) == answers(ended)
        tokens = sum(event.data["tokens"] for event in events if event.name == "delta")
        assert tokens == ended["usage"]["completion_tokens"]
        assert len({event.id for event in events if event.name != "queue.position"}) == len(events)
        assert client.url == urls[0]
        with PenstockClient(urls, "bob") as other, pytest.raises(ApiRefusal, match="no such job"):
            next(other.stream(job["id"]))


async def test_many_streams_of_an_asyncio_client_survive_together(tmp_path: Path) -> None:
    with two_doors(tmp_path) as (_, doors, urls):
        async with AsyncPenstockClient(urls) as client:
            jobs = await asyncio.gather(*(client.submit(chat(f"ask {number}")) for number in range(20)))
            got: list[list[StreamEvent]] = [[] for _ in jobs]

            async def read(number: int) -> None:
                async for event in client.stream(jobs[number]["id"]):
                    got[number].append(event)

            reading = asyncio.gather(*(read(number) for number in range(20)))
            await until(lambda: all(any(event.text for event in events) for events in got))
            killed(doors[0])
            await reading
            assert [texts(events)[0] for events in got] == [said(f"ask {number}", TOKENS) for number in range(20)]
            ended = await client.wait(jobs[3]["id"], 30)
            assert answers(ended) == {0: said("ask 3", TOKENS)} and (await client.get(jobs[3]["id"])) == ended


def test_a_submit_whose_answer_is_lost_is_queued_once(house: House) -> None:
    """The process had accepted the job; the request came again, under the same key."""
    with store_cut(house.url) as cut:
        url = cut.url.replace("redis://", "http://").removesuffix("/0")
        cut.cut_at(b"202 Accepted", lose=True)
        before = len(json.loads(house.get("/v1/jobs?limit=100")[1])["data"])
        with PenstockClient(url, on_retry=lambda _: cut.mend()) as client:
            job = client.wait(client.submit(chat("once", 4))["id"])
    assert answers(job) == {0: said("once", 4)}
    assert len(json.loads(house.get("/v1/jobs?limit=100")[1])["data"]) == before + 1


@pytest.mark.parametrize("drain_s", [0, 30])
def test_a_process_that_drains_ends_its_streams_or_sends_them_elsewhere(drain_s: int, tmp_path: Path) -> None:
    """SIGTERM: its open streams end within its drain time, and go on at the other process if that is too short."""
    with two_doors(tmp_path) as (house, doors, urls), PenstockClient(urls) as client:
        killed(doors[0])
        doors[0] = house.start_api(PENSTOCK_API_DRAIN_S=str(drain_s))
        job, text = client.submit(chat("drain", 800)), ""
        for event in client.stream(job["id"]):
            if event.text and not text:
                doors[0].send_signal(signal.SIGTERM)
            text += event.text
        assert text == said("drain", 800) and client.url == urls[0 if drain_s else 1]
        assert doors[0].wait(30) == 0


def test_a_stopped_process_is_left_after_its_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGSTOP: the connection stays open and brings nothing."""
    monkeypatch.setattr("penstock.client.SILENCE_S", 1.0)
    with two_doors(tmp_path) as (_, doors, urls), PenstockClient(urls) as client:
        job, text = client.submit(chat("stop")), ""
        for event in client.stream(job["id"]):
            if event.text and not text:
                os.kill(doors[0].pid, signal.SIGSTOP)
            text += event.text
        assert text == said("stop", TOKENS) and client.url == urls[1]
        os.kill(doors[0].pid, signal.SIGCONT)


def test_the_environment_says_where_and_who(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its proxies do not catch requests to this machine."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.setenv("PENSTOCK_URL", house.url)
    with PenstockClient() as client:
        assert client.wait(client.submit(chat("env", 2))["id"])["result"]["choices"][0]["finish_reason"] == "length"


def test_a_text_that_begins_again_is_told_and_never_joined(json_house: House) -> None:
    """The worker and the API process are killed in the middle of JSON, which the engine cannot continue."""
    house = json_house
    doomed = [house.start("workers"), house.start_api()]
    house.wait_ready()
    schema = {"type": "array", "items": {"type": "string"}}
    wanted = {"type": "json_schema", "json_schema": {"name": "texts", "schema": schema}}
    with PenstockClient(house.url) as client:
        job, text = client.submit(chat("200", 300, response_format=wanted) | {"model": "m"}), ""
        with pytest.raises(StreamReset) as reset:
            for event in client.stream(job["id"]):
                text += event.text
                if len(text) > 12 and doomed:
                    killed(doomed.pop(0))
                    killed(doomed.pop(0))
                    house.start("workers")
                    house.start_api()
        again = "".join(event.text for event in client.stream(job["id"], after=reset.value.cursor))
        assert len(json.loads(again)) == 201 and again == answers(client.wait(job["id"]))[0]
    assert not doomed and len(text) < len(again)
