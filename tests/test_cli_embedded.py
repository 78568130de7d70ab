"""The embedded server: its settings, its password, its file, and its end."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from house import eventually
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.retry import Retry

from cli.child import Child, Program
from cli.embedded import Embedded, end_orphan, find_server, machine_memory
from cli.errors import Problem
from cli.supervisor import Supervisor

WAIT_S = 30.0
MEMORY = 64 << 20


def prepared(folder: Path) -> Embedded:
    server = find_server()
    assert server is not None
    return Embedded.prepare(server, folder, MEMORY)


def start(supervisor: Supervisor, embedded: Embedded) -> Child:
    program = Program(
        role="redis",
        id="redis-1",
        argv=embedded.argv,
        log=embedded.folder / "log",
        env=dict(os.environ),
        cwd=embedded.folder,
        probe=embedded.probe,
    )
    return supervisor.start(program)


async def ready(supervisor: Supervisor, child: Child) -> int:
    async with asyncio.timeout(WAIT_S):
        await supervisor.until(lambda: child.status.state == "ready")
    assert child.status.pid is not None
    return child.status.pid


@pytest.fixture
async def supervisor() -> AsyncIterator[Supervisor]:
    supervisor = Supervisor(lambda child: None)
    yield supervisor
    supervisor.kill("redis")
    await supervisor.stop("redis")


def test_the_memory_of_a_container_is_its_own(tmp_path: Path) -> None:
    """A control group's limit counts where it is less than the machine's; without one the machine's does."""
    limit = tmp_path / "memory.max"
    whole = machine_memory(limit)
    assert whole > 1 << 28
    limit.write_text("max\n")
    assert machine_memory(limit) == whole
    limit.write_text("104857600\n")
    assert machine_memory(limit) == 100 << 20


async def test_it_runs_with_the_settings_of_a_queue(supervisor: Supervisor, tmp_path: Path) -> None:
    """Append-only file, a memory limit, no eviction, a bounded pub/sub buffer; the process id is the server's own."""
    embedded = prepared(tmp_path)
    pid = await ready(supervisor, start(supervisor, embedded))
    with Redis.from_url(embedded.url, decode_responses=True) as client:
        settings = client.config_get("appendonly", "appendfsync", "maxmemory", "maxmemory-policy", "save", "bind")
        buffers = client.config_get("client-output-buffer-limit")["client-output-buffer-limit"]
        assert client.info("server")["process_id"] == pid
    assert settings == {
        "appendonly": "yes",
        "appendfsync": "everysec",
        "maxmemory": str(MEMORY),
        "maxmemory-policy": "noeviction",
        "save": "",
        "bind": "127.0.0.1",
    }
    assert "pubsub 8388608 2097152 10" in buffers


async def test_password_is_needed_and_not_shown(supervisor: Supervisor, tmp_path: Path) -> None:
    """Nobody gets in without it, only the owner can read it, and it is on no command line."""
    embedded = prepared(tmp_path)
    await ready(supervisor, start(supervisor, embedded))
    once = Retry(NoBackoff(), 0)
    with Redis(port=embedded.port, retry=once) as client, pytest.raises(AuthenticationError):
        client.ping()
    assert stat.S_IMODE((tmp_path / "valkey.conf").stat().st_mode) == 0o600
    assert not any(embedded.password in word for word in embedded.argv)


async def test_data_port_and_password_outlive_a_restart(supervisor: Supervisor, tmp_path: Path) -> None:
    """What was written is there after a stop, at the same address."""
    first = prepared(tmp_path)
    await ready(supervisor, start(supervisor, first))
    with Redis.from_url(first.url) as client:
        client.set("kept", "yes")
    await supervisor.stop("redis")
    second = prepared(tmp_path)
    assert second.url == first.url
    await ready(supervisor, start(supervisor, second))
    with Redis.from_url(second.url) as client:
        assert client.get("kept") == b"yes"


async def test_killed_server_comes_back_with_its_data(supervisor: Supervisor, tmp_path: Path) -> None:
    """SIGKILL of the server loses nothing that was acknowledged."""
    embedded = prepared(tmp_path)
    child = start(supervisor, embedded)
    pid = await ready(supervisor, child)
    with Redis.from_url(embedded.url) as client:
        client.set("kept", "yes")
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(WAIT_S):
        await supervisor.until(lambda: child.status.restarts == 1 and child.status.state == "ready")
    with Redis.from_url(embedded.url) as client:
        assert client.get("kept") == b"yes"


async def test_another_port_when_the_kept_one_is_taken(tmp_path: Path) -> None:
    """A port somebody else took in the meantime is given up."""
    first = prepared(tmp_path)
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", first.port)
    async with server:
        await end_orphan(tmp_path)  # whoever listens there now is not ours
        second = prepared(tmp_path)
    assert second.port != first.port
    assert second.password == first.password


def test_it_dies_with_its_parent(tmp_path: Path) -> None:
    """SIGKILL of whoever started it ends the server, which has no lifeline, as well."""
    code = f"""
import subprocess, sys, time
from pathlib import Path
from cli.embedded import Embedded, find_server
embedded = Embedded.prepare(find_server(), Path({str(tmp_path)!r}), {MEMORY})
subprocess.Popen(embedded.argv, cwd={str(tmp_path)!r}, stdout=subprocess.DEVNULL)
print(embedded.url, flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        url = parent.stdout.readline().strip()
        with Redis.from_url(url) as client:
            eventually(client.ping, RedisConnectionError)
        parent.kill()
    with Redis.from_url(url) as client:
        eventually(lambda: refused(client))


async def test_orphan_is_ended_before_another_start(supervisor: Supervisor, tmp_path: Path) -> None:
    """A server that still runs in the folder is shut down, for two must not write the same file."""
    embedded = prepared(tmp_path)
    child = start(supervisor, embedded)
    pid = await ready(supervisor, child)
    child.program.log.touch()
    await end_orphan(tmp_path)
    async with asyncio.timeout(WAIT_S):
        await supervisor.until(lambda: child.status.pid != pid)


async def test_stubborn_orphan_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that takes the password and does not shut down is not ignored."""
    embedded = prepared(tmp_path)
    monkeypatch.setattr("cli.embedded.SHUTDOWN_S", 0.2)

    async def stubborn(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b"+OK\r\n-ERR Errors trying to SHUTDOWN\r\n")
        writer.close()

    async with await asyncio.start_server(stubborn, "127.0.0.1", embedded.port):
        with pytest.raises(Problem, match="still holds"):
            await end_orphan(tmp_path)


def refused(client: Redis) -> bool:
    """Whether nobody listens there."""
    try:
        client.ping()
    except RedisConnectionError:
        return True
    return False
