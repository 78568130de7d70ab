"""What `penstock up` says of processes that end and of their jobs, and how long its start waits for the store."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import socket
from pathlib import Path

import pytest
from msgspec.structs import replace

from cli import up as machine
from cli.deployment import load_deployment
from cli.instance import DataDir
from cli.output import ProgressLine
from cli.supervisor import Child, Program, counts_after
from cli.up import Machine, Screen
from streaming.errors import Loading, Unavailable
from streaming.redis.client import RedisClient


def watched(role: str = "worker") -> tuple[Child, io.StringIO, Screen]:
    """A process, what the screen says of it, and the screen."""
    program = Program(role=role, id=f"{role}-1", argv=(), log=Path(f"{role}-1.log"), env={})
    stream = io.StringIO()
    return Child(program, lambda _child: None), stream, Screen(ProgressLine(stream, {}))


def test_a_crash_loop_is_reported_once() -> None:
    """After each single death; again once it was ready in between."""
    child, stream, screen = watched()

    def says(cause: str) -> list[str]:
        before = len(stream.getvalue())
        counts = counts_after(child.status, was_ready=True, ran_s=1.0)
        child.status = replace(child.status, state="restarting", cause=cause, **counts)
        screen.noticed(child, starting=False)
        return [line.partition(" (")[0] for line in stream.getvalue()[before:].splitlines()[:2]]

    assert [[line[9:] for line in says("killed by SIGKILL")] for _ in range(2)] == [["worker-1 ended"]] * 2
    loop = ["error: worker-1 ended 3 times in a row", "cause: killed by SIGKILL"]
    assert says("killed by SIGKILL") == loop and says("no device") == []
    child.status = replace(child.status, state="ready")
    screen.noticed(child, starting=False)
    assert says("no device") == ["error: worker-1 ended 5 times in a row", "cause: no device"]


def test_who_comes_back_is_told_with_the_time_that_it_took() -> None:
    """Once for each loss that was told, and never at the first start."""
    child, stream, screen = watched("api")

    def said(state: str, **changes: object) -> str:
        before = len(stream.getvalue())
        child.status = replace(child.status, state=state, **changes)
        screen.noticed(child, starting=False)
        return stream.getvalue()[before:]

    assert said("ready", pid=1) == ""
    for _ in range(2):
        counts = counts_after(child.status, was_ready=True, ran_s=1.0)
        assert "api-1 ended" in said("restarting", pid=None, cause="killed by SIGKILL", **counts)
        assert "api-1 is ready again after 0." in said("ready", pid=2) and said("ready", pid=2) == ""


@pytest.fixture
def starting(tmp_path: Path) -> Machine:
    """A machine whose store is not entered."""
    home = DataDir(tmp_path / "data")
    home.make_private()
    home.prepare()
    deployment = load_deployment({("up", "engine"): "sim"}, {}, tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return Machine(deployment, home, [listener], Screen(ProgressLine(io.StringIO(), {}, quiet=True)))


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


async def test_ctrl_c_ends_the_wait_for_redis(
    starting: Machine, wire: RedisClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def enter(client: RedisClient) -> None:
        starting._interrupt()
        raise Unavailable("it does not answer")

    monkeypatch.setattr(machine, "enter_store", enter)
    monkeypatch.setattr(machine, "ANSWER_RETRY_DELAY_S", 0.0)
    async with asyncio.timeout(60):
        await starting._enter(wire, "redis://there:1/0")


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
            os.kill(child.status.pid, signal.SIGKILL)
            await starting._supervisor.until(lambda: child.status.restarts == 1 and child.status.pid is not None)
            starting._interrupt()
            await starting._stop()
    assert starting._supervisor.children == {}
