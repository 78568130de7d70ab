"""How long the start of a machine waits for its store."""

from __future__ import annotations

import asyncio
import io
import os
import re
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cli import up as machine
from cli.deployment import load_deployment
from cli.instance import DataDir
from cli.output import ProgressLine
from cli.supervisor import Program
from cli.up import Machine, Screen
from streaming.errors import Loading
from streaming.redis.client import RedisClient
from streaming.redis.settings import RedisSettings
from streaming.store.identity import enter_store

LOADING = b"-LOADING Redis is loading the dataset in memory\r\n"


@pytest.fixture
async def loading_url() -> AsyncIterator[str]:
    """A server that answers every command by saying that it reads its data."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while sent := await reader.read(65536):
            writer.write(LOADING * len(re.findall(rb"\*\d+\r\n", sent)))
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"


@pytest.fixture
def starting(tmp_path: Path) -> Machine:
    """A machine whose store is not entered."""
    home = DataDir(tmp_path / "data")
    home.make_private()
    home.prepare()
    deployment = load_deployment({("up", "engine"): "sim"}, {}, tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return Machine(deployment, home, [listener], Screen(ProgressLine(io.StringIO(), {}, quiet=True)))


async def test_redis_that_reads_its_data_says_so(loading_url: str) -> None:
    client = RedisClient.open(RedisSettings(url=loading_url))
    try:
        with pytest.raises(Loading):
            await enter_store(client)
    finally:
        await client.close()


async def test_a_redis_that_reads_its_data_is_waited_for(
    starting: Machine, wire: RedisClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With no time left for one that does not answer."""
    answers = [Loading("it reads its data")] * 3

    async def enter(client: RedisClient) -> None:
        if answers:
            raise answers.pop()

    monkeypatch.setattr(machine, "enter_store", enter)
    monkeypatch.setattr(machine, "ANSWER_TIMEOUT_S", -1.0)
    monkeypatch.setattr(machine, "ANSWER_RETRY_DELAY_S", 0.0)
    await starting._enter(wire, "redis://user:secret@there:1/0")
    assert answers == []


async def test_what_cannot_be_shown_ends_neither_supervision_nor_drain(starting: Machine, tmp_path: Path) -> None:
    """The reader of stderr, a `tee`, has exited: a process that dies is started again, and drained in the end."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        starting._screen.progress = ProgressLine(stream, {})
        program = Program(role="worker", id="worker-1", argv=("sleep", "600"), log=tmp_path / "log", env={})
        child = starting._supervisor.start(program)
        async with asyncio.timeout(30):
            await starting._supervisor.until(lambda: child.status.pid is not None)
            assert child.status.pid is not None
            os.kill(child.status.pid, signal.SIGKILL)
            await starting._supervisor.until(lambda: child.status.restarts == 1 and child.status.pid is not None)
            starting._interrupt()
            await starting._stop()
    assert starting._supervisor.children == {}
