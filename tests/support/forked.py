"""Roles as forks of a process that has read all their modules. Each begins in a tenth of the time of a new interpreter
and is a real process with its own environment, folder, output and signals.

`python tests/support/forked.py FD` is that process; it ends with whoever holds the other end of the socket.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

ROLES = ("api", "workers", "scheduler", "offline")
TREE = Path(__file__).parents[2]
AT_START = ("PYTHON", "LD_", "MALLOC_", "COVERAGE_", "OTEL_")
"""Variables with these beginnings are read as an interpreter or a library begins: a fork would not see them."""
LATER = ("PYTHONPATH", "OTEL_BSP_SCHEDULE_DELAY")
"""Of these, the ones that a fork sees as well."""
LARGEST = 1 << 20


def can_fork(role: str, environ: Mapping[str, str]) -> bool:
    """Whether a fork would be the same as a new interpreter, on a system that has what it takes."""
    names = {name for name in environ.keys() | os.environ.keys() if name.startswith(AT_START)} - {*LATER}
    customized = any((folder / "sitecustomize.py").exists() for folder in _path_of(environ))
    return (
        hasattr(os, "pidfd_open")
        and role in ROLES
        and not customized
        and all(environ.get(name) == os.environ.get(name) for name in names)
    )


def _path_of(environ: Mapping[str, str]) -> list[Path]:
    return [*map(Path, filter(None, environ.get("PYTHONPATH", "").split(os.pathsep)))]


class Forked(subprocess.Popen[bytes]):
    """What `Popen` is for a process that this one started: here another one did, and it is asked for the exit code."""

    _child_created = False  # `Popen` has nothing to reap

    def __init__(self, role: str, args: Sequence[str], environ: Mapping[str, str], folder: Path, *logs: int) -> None:
        """`logs`: a file descriptor for its output, and one for its errors if they go elsewhere."""
        self.args = [role, *args]
        self.returncode: int | None = None
        self.stdin = self.stdout = self.stderr = None
        what = {"args": self.args, "environ": dict(environ), "folder": str(folder)}
        self._server = _server()
        self.pid = self._server.ask(what, *logs)
        self._end = os.pidfd_open(self.pid)

    def poll(self) -> int | None:
        return self._waited(0.0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._waited(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return code

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            signal.pidfd_send_signal(self._end, sig)

    def _waited(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._end], [], [], timeout)[0]:
            self.returncode = self._server.ask({"ended": self.pid})
            os.close(self._end)
        return self.returncode


class Server:
    """The process that forks."""

    def __init__(self) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._turn = threading.Lock()
        command = [sys.executable, "-P", str(Path(__file__)), str(theirs.fileno())]
        self._process = subprocess.Popen(command, cwd=TREE, pass_fds=[theirs.fileno()])
        theirs.close()

    def ask(self, what: Mapping[str, Any], *files: int) -> int:
        """Its answer: the process that it has started, or the exit code of one."""
        with self._turn:
            socket.send_fds(self._channel, [json.dumps(what).encode()], files)
            return int(self._channel.recv(LARGEST))


@cache
def _server() -> Server:
    """That of this process, started when it is first asked for."""
    return Server()


def serve(channel: socket.socket) -> None:
    """Fork what is asked for, and say how it ended. Returns in each fork once its role is to run, and at the end."""
    for role in ROLES:
        importlib.import_module(f"{role}.__main__")
        del sys.modules[f"{role}.__main__"]  # it is run anew, and what it imports is there
    importlib.import_module("streaming.redis.scripts").load_library()  # kept by the module
    gc.freeze()
    while True:
        data, files, _, _ = socket.recv_fds(channel, LARGEST, 2)
        if not data:
            return
        asked = json.loads(data)
        if "ended" in asked:
            answer = os.waitstatus_to_exitcode(os.waitpid(asked["ended"], 0)[1])
        elif not (answer := os.fork()):
            channel.close()
            _become(asked, files)
            return
        else:
            for file in files:
                os.close(file)
        channel.sendall(str(answer).encode())


def _become(asked: Mapping[str, Any], logs: Sequence[int]) -> None:
    """Run the role as a new interpreter would, to its end."""
    os.dup2(logs[0], 1)
    os.dup2(logs[-1], 2)
    for log in logs:
        os.close(log)
    os.environ.clear()
    os.environ.update(asked["environ"])
    sys.path[:0] = map(str, _path_of(os.environ))
    os.chdir(asked["folder"])
    time.tzset()
    sys.argv = asked["args"]
    runpy.run_module(f"{asked['args'][0]}.__main__", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    sys.path.insert(0, str(TREE))
    serve(socket.socket(fileno=int(sys.argv[1])))
