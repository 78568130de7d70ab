"""A RabbitMQ of a test's own: a node in the foreground with its own data folder, on loopback ports alone.

Never the service of this machine: that one is not asked, started or stopped.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from house import eventually, free_port

SERVER = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
"""Where Debian's package has the script itself, which runs as whoever calls it."""


def missing() -> str:
    """Why there can be none; "" if there can."""
    if not SERVER.exists():
        return f"RabbitMQ is not installed: no {SERVER} (apt-get install rabbitmq-server)"
    return "" if shutil.which("epmd") else "RabbitMQ cannot run: no epmd, which comes with Erlang"


class Rabbit:
    """One node; `restart` keeps what it holds. It speaks to nobody but this machine."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.url = f"amqp://guest:guest@127.0.0.1:{self.port}//"
        self._folder, self._names = folder, free_port()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._environ = {
            **os.environ,
            "HOME": str(folder),
            "ERL_EPMD_PORT": str(self._names),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODENAME": f"penstock{self.port}@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(free_port()),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1} +S 1:1 +sbwt none",
            "RABBITMQ_CONF_ENV_FILE": str(folder / "none-env.conf"),
            "RABBITMQ_CONFIG_FILE": str(folder / "none"),
            "RABBITMQ_ADVANCED_CONFIG_FILE": str(folder / "none.config"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "plugins"),
            "RABBITMQ_MNESIA_BASE": str(folder / "data"),
            "RABBITMQ_LOG_BASE": str(folder / "log"),
            "RABBITMQ_PID_FILE": str(folder / "pid"),
        }

    def start(self) -> None:
        (self._folder / "none-env.conf").touch()
        (self._folder / "plugins").write_text("[].\n")
        self._run("names", "epmd", "-address", "127.0.0.1", "-port", str(self._names))
        self._run("node", str(SERVER))
        self._wait()

    def kill(self) -> None:
        """At once, as a power cut would."""
        for process in self._processes:
            with suppress(ProcessLookupError):  # it has ended by itself
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._processes.clear()

    def _run(self, name: str, *command: str) -> None:
        with (self._folder / f"{name}.log").open("ab") as log:
            # A group of its own: the script's children end with it.
            self._processes.append(
                subprocess.Popen(command, env=self._environ, stdout=log, stderr=log, start_new_session=True)
            )

    def _wait(self) -> None:
        def greets() -> bool:
            assert all(process.poll() is None for process in self._processes), self._said()
            with socket.create_connection(("127.0.0.1", self.port), 1) as probe:
                probe.settimeout(2)
                probe.sendall(b"AMQP\x00\x00\x09\x01")
                return len(probe.recv(8)) > 0

        eventually(greets, OSError, seconds=90)

    def _said(self) -> str:
        return (self._folder / "node.log").read_text(errors="replace")[-2000:]


@contextmanager
def rabbit(folder: Path) -> Iterator[Rabbit]:
    """A node within the block."""
    node = Rabbit(folder)
    try:
        node.start()
        yield node
    finally:
        node.kill()
