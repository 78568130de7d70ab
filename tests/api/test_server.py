"""The server's own loop: it ends when told, not at its next look, and its answers' date goes on."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing

import pytest
import uvicorn
from house import House
from starlette.types import Receive, Scope, Send

from api import server
from api.server import ApiServer
from streaming.fleet.processes import Fleet
from streaming.redis.client import RedisClient
from streaming.redis.settings import RedisSettings


async def hello(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body"})


@asynccontextmanager
async def served() -> AsyncIterator[tuple[int, asyncio.Task[None]]]:
    """Its port, and what ends when it does."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        it = ApiServer(uvicorn.Config(hello, log_config=None, lifespan="off"))
        task = asyncio.create_task(it.serve(sockets=[listener]))
        async with asyncio.timeout(30):
            while not it.started:
                await asyncio.sleep(0.01)
            yield listener.getsockname()[1], task
            it.handle_exit(signal.SIGTERM, None)
            await asyncio.wait({task})


def date_of(port: int) -> str | None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request("GET", "/")
        return connection.getresponse().getheader("date")
    finally:
        connection.close()


@pytest.fixture
def raised() -> Iterator[list[int]]:
    """The signals that the server raises again once it has ended, as it does."""
    numbers: list[int] = []
    former = signal.signal(signal.SIGTERM, lambda number, _: numbers.append(number))
    yield numbers
    signal.signal(signal.SIGTERM, former)


async def test_a_signal_ends_it_although_it_looks_around_once_an_hour(
    monkeypatch: pytest.MonkeyPatch, raised: list[int]
) -> None:
    monkeypatch.setattr(server, "TICK_INTERVAL_S", 3600.0)
    async with served() as (port, task):
        assert await asyncio.to_thread(date_of, port)
        os.kill(os.getpid(), signal.SIGTERM)
        await task
        assert raised == [signal.SIGTERM]


async def test_the_date_of_its_answers_is_made_anew(monkeypatch: pytest.MonkeyPatch, raised: list[int]) -> None:
    monkeypatch.setattr(server, "TICK_INTERVAL_S", 0.05)
    async with served() as (port, _):
        first = await asyncio.to_thread(date_of, port)
        while await asyncio.to_thread(date_of, port) == first:
            await asyncio.sleep(0.1)


async def test_a_process_that_lets_its_streams_end_is_shown_as_draining(empty_house: House) -> None:
    """To whoever told it to end, and wonders why it is still there."""
    empty_house.start("workers", PENSTOCK_SIM_STEP_MS="50")
    process = empty_house.start_api()
    empty_house.wait_ready()
    body = {"model": "sim", "messages": [{"role": "user", "content": "x"}], "max_tokens": 4000, "stream": True}
    wire = RedisClient.open(RedisSettings(url=empty_house.redis_url))

    async def states() -> list[str]:
        return [each.state for each in await Fleet(wire).processes("api")]

    with closing(http.client.HTTPConnection("127.0.0.1", empty_house.port, timeout=60)) as connection:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        assert connection.getresponse().status == 200
        assert await states() == ["ready"]
        process.terminate()
        async with asyncio.timeout(30):
            while await states() != ["draining"]:
                await asyncio.sleep(0.01)
    await wire.close()
