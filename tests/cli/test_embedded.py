"""The embedded server: its settings, its password, its file, and its end."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from kombu import Connection
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError
from redis.retry import Retry

from cli.embedded import Embedded, end_orphan, find_server, is_private
from cli.output import Problem
from cli.supervisor import Child, Supervisor
from offline.app import broker
from offline.settings import OfflineSettings
from streaming.redis.client import RedisClient
from streaming.redis.settings import RedisSettings

WAIT_S = 30.0
MEMORY = 64 << 20


def prepared(folder: Path) -> Embedded:
    return Embedded.prepare(find_server(), folder, MEMORY)


def start(supervisor: Supervisor, embedded: Embedded) -> Child:
    return supervisor.start(embedded.program(embedded.folder / "log"))


async def ready(supervisor: Supervisor, child: Child) -> int:
    async with asyncio.timeout(WAIT_S):
        await supervisor.until(lambda: child.status.state == "ready")
    return child.status.pid


@pytest.fixture
async def supervisor() -> AsyncIterator[Supervisor]:
    supervisor = Supervisor(lambda child: None)
    yield supervisor
    supervisor.kill("redis")
    await supervisor.stop("redis")


async def test_it_runs_with_the_settings_of_a_queue_for_its_owner_alone(supervisor: Supervisor, tmp_path: Path) -> None:
    """Append-only file, a memory limit, no eviction, a bounded pub/sub buffer; the process id is the server's own.
    Nobody gets in without the password, which only the owner can read, and which is on no command line. It has no port,
    and its socket lies in a folder that nobody else may enter."""
    embedded = prepared(tmp_path)
    pid = await ready(supervisor, start(supervisor, embedded))
    with Redis.from_url(embedded.url, decode_responses=True) as client:
        settings = client.config_get("appendonly", "appendfsync", "maxmemory", "maxmemory-policy", "save", "port")
        buffers = client.config_get("client-output-buffer-limit")["client-output-buffer-limit"]
        assert client.info("server")["process_id"] == pid
    assert settings == {
        "appendonly": "yes", "appendfsync": "everysec", "maxmemory": str(MEMORY), "maxmemory-policy": "noeviction",
        "save": "", "port": "0",
    }  # fmt: skip
    assert "pubsub 8388608 2097152 10" in buffers
    once = Retry(NoBackoff(), 0)
    with Redis(unix_socket_path=str(embedded.socket), retry=once) as client, pytest.raises(AuthenticationError):
        client.ping()
    assert stat.S_IMODE((tmp_path / "valkey.conf").stat().st_mode) == 0o600
    assert embedded.password.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    assert stat.S_IMODE(embedded.socket.stat().st_mode) == 0o700
    assert stat.S_IMODE(embedded.socket.parent.stat().st_mode) == 0o700
    assert listening_ports(pid) == []
    tmp_path.chmod(0o755)  # somebody else may have put the socket there
    assert await embedded.probe() == "starting"
    tmp_path.chmod(0o700)
    assert await embedded.probe() == "ready"


def listening_ports(pid: int) -> list[int]:
    """TCP ports that a process of this machine listens on."""
    fds = {str(fd.readlink()) for fd in Path(f"/proc/{pid}/fd").iterdir()}
    rows = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()
    ]
    return [int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in fds]


async def test_a_long_path_gets_a_short_socket(supervisor: Supervisor, tmp_path: Path) -> None:
    """A Unix socket's address has an end. The folder made instead is as private, is used again, and goes away."""
    folder = tmp_path / ("d" * 60) / ("e f" * 20)
    folder.mkdir(parents=True, mode=0o700)
    embedded = prepared(folder)
    assert len(str(embedded.socket)) <= 107 < len(str(folder / "valkey.sock"))
    await ready(supervisor, start(supervisor, embedded))
    assert is_private(embedded.socket.parent)
    assert prepared(folder).socket == embedded.socket
    with Redis.from_url(embedded.url) as client:
        assert client.ping()
    await supervisor.stop("redis")
    embedded.clean_up()
    assert not embedded.socket.parent.exists()
    embedded.socket.parent.mkdir(mode=0o755)  # whoever made it, it is not ours
    again = prepared(folder)
    embedded.socket.parent.rmdir()
    assert again.socket != embedded.socket and is_private(again.socket.parent)
    again.clean_up()


async def test_no_short_path_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is started, and it says what to do."""
    folder = tmp_path / ("d" * 120)
    folder.mkdir(mode=0o700)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with pytest.raises(Problem, match="too long"):
        prepared(folder)
    assert list(folder.iterdir()) == []


async def test_a_path_with_spaces_is_an_address(supervisor: Supervisor, tmp_path: Path) -> None:
    """And one with letters that mean something in a URL."""
    folder = tmp_path / "my data #1%20?"
    folder.mkdir(mode=0o700)
    embedded = prepared(folder)
    await ready(supervisor, start(supervisor, embedded))
    wire = RedisClient.open(RedisSettings(url=embedded.url))
    try:
        await wire.ping()
    finally:
        await wire.close()
    url, options = broker(OfflineSettings(), RedisSettings(url=embedded.url))
    with Connection(url, transport_options=options) as connection:
        connection.ensure_connection(max_retries=1, timeout=WAIT_S)
        queue = connection.SimpleQueue("q")
        queue.put({"kept": 1})
        assert queue.get(timeout=WAIT_S).payload == {"kept": 1}
        queue.close()


async def test_data_address_and_password_outlive_a_kill_and_a_restart(supervisor: Supervisor, tmp_path: Path) -> None:
    """SIGKILL of the server loses nothing that was acknowledged, and it is there after a stop, at the same address."""
    first = prepared(tmp_path)
    child = start(supervisor, first)
    pid = await ready(supervisor, child)
    with Redis.from_url(first.url) as client:
        client.set("kept", "yes")
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(WAIT_S):
        await supervisor.until(lambda: child.status.restarts == 1 and child.status.state == "ready")
    with Redis.from_url(first.url) as client:
        assert client.get("kept") == b"yes"
    await supervisor.stop("redis")
    second = prepared(tmp_path)
    assert second.url == first.url
    await ready(supervisor, start(supervisor, second))
    with Redis.from_url(second.url) as client:
        assert client.get("kept") == b"yes"


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
    """One that does not shut down is not ignored. What else runs in the folder is left alone."""
    monkeypatch.setattr("cli.embedded.SHUTDOWN_TIMEOUT_S", 0.2)
    named = "import ctypes, sys, time; ctypes.CDLL(None).prctl(15, sys.argv[1].encode(), 0, 0, 0)"
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    rest = "print(flush=True); time.sleep(600)"
    others = [
        subprocess.Popen([sys.executable, "-c", f"{named}; {deaf}; {rest}", name], cwd=folder, stdout=subprocess.PIPE)
        for name, folder in (("redis-cli", tmp_path), ("valkey-server", tmp_path.parent))
    ]
    try:
        for other in others:
            other.stdout.readline()
        await end_orphan(tmp_path)
        words = [sys.executable, "-c", f"{named}; {deaf}; {rest}", "valkey-server"]
        others.append(subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE))
        stubborn = others[-1]
        stubborn.stdout.readline()
        with pytest.raises(Problem, match="still holds") as caught:
            await end_orphan(tmp_path)
        assert f"pid {stubborn.pid}" in str(caught.value.cause)
    finally:
        for other in others:
            other.kill()
            other.communicate()
