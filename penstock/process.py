"""Process life: arguments, signals, the socket that tells a supervisor its state, and the sockets it listens on."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import gc
import json
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from penstock.config import FILE, Config, ConfigError, load, own_file
from penstock.files import open_private

log = logging.getLogger(__name__)

ENV = "PENSTOCK_LIFELINE"
LIFE = "PENSTOCK_LIFE"
"""Variable with the random id under which a process registers itself in the store: its supervisor chooses it, because
machines may have the same name, and their processes the same pids."""


class Lifeline:
    """The child's end. A process's `__main__` creates one.

    The supervisor passes each child one end of a socket pair (its number in PENSTOCK_LIFELINE). The child writes its
    state as JSON lines. When the supervisor dies, the socket closes and the child exits at once, so no orphan is left.
    A line of the supervisor is the path of a new log: it has put the old one aside. Without a supervisor there is no
    socket, and nothing is sent.
    """

    def __init__(self, fd: int | None) -> None:
        self._socket = socket.socket(fileno=fd) if fd is not None else None
        self._away = self._waits = ""
        if self._socket is not None:
            self._socket.set_inheritable(False)
            threading.Thread(target=self._watch, name="lifeline", daemon=True).start()

    @classmethod
    def from_environ(cls) -> Lifeline:
        """The socket this process was started with, if any; grandchildren do not inherit it."""
        value = os.environ.pop(ENV, None)
        return cls(int(value) if value else None)

    def say(self, state: str, detail: str = "") -> None:
        """Report a state: starting (the detail is the phase) | ready (a worker's lease) | draining | failed (why)."""
        self._send({"state": state, "detail": detail})

    def note_away(self, why: str) -> None:
        """Report the servers that a ready process waits for; "" once one is back. Only a change is sent."""
        if why != self._away:
            self._away = why
            self._send({"away": why})

    def wait(self, message: str, error: Exception) -> None:
        """Tell the supervisor and the log what the start of this process waits for: a `write` of
        `loops.ExpectedErrors`. Only a change is logged."""
        if (waits := message % error) != self._waits:
            self._waits = waits
            log.warning("%s", waits)
        self.say("starting", waits)

    def _send(self, message: dict[str, str]) -> None:
        if self._socket is None:
            return
        with contextlib.suppress(OSError):  # the supervisor died: the watching thread ends this process
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def _watch(self) -> None:
        assert self._socket is not None
        with contextlib.suppress(OSError):  # a broken socket means the same as a closed one
            for path in self._socket.makefile("r", encoding="utf-8", errors="surrogateescape"):
                _log_to(path.rstrip("\n"))
        os._exit(70)


def _log_to(path: str) -> None:
    """Have what this process writes appended to another file; if it cannot be opened, it stays where it is."""
    with contextlib.suppress(OSError), open_private(path, "ab") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())


class StartError(Exception):
    """Raised when a process cannot start. The message names the cause."""

    def __init__(self, reason: str, exit_code: int = 1) -> None:
        super().__init__(reason)
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True)
class Launch:
    """Arguments, settings and supervisor of a process at its start."""

    options: argparse.Namespace
    config: Config
    lifeline: Lifeline
    on_exit: contextlib.ExitStack
    """Resources to close when the event loop has ended."""


def argument_parser(package: str, description: str | None, process_id: str) -> argparse.ArgumentParser:
    """Parser of the arguments that all processes have. `process_id` is the default of --id: the role, and a number."""
    parser = argparse.ArgumentParser(prog=f"python -m penstock.run {package}", description=description)
    parser.add_argument("--settings", type=Path, help="merged settings as written by `penstock up`")
    parser.add_argument("--config", type=Path, help=f"settings file (default: {FILE} in this folder, if there is one)")
    parser.set_defaults(role=process_id.rpartition("-")[0])
    parser.add_argument("--id", default=process_id, help="this process's name in `penstock ps`")
    return parser


def run_process(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
    sections: Mapping[str, type[msgspec.Struct]],
    start: Callable[[Launch], Coroutine[Any, Any, int]],
) -> int:
    """Parse, configure, run. Returns the exit code.

    Args:
        sections: the settings this process reads.
        start: prepares the work and returns it. It and the work may raise ConfigError and StartError.
    """
    options = parser.parse_args(arguments)
    lifeline = Lifeline.from_environ()
    try:
        saved = options.settings
        config = Config.saved(saved) if saved else _read(sections, options.config, options.role)
        with contextlib.ExitStack() as on_exit:
            work = start(Launch(options, config, lifeline, on_exit))
            with asyncio.Runner(loop_factory=_loop_factory()) as runner:
                return runner.run(work)
    except ConfigError as error:
        code, reason = 2, str(error)
    except StartError as error:
        code, reason = error.exit_code, str(error)
    lifeline.say("failed", reason)
    sys.stderr.write(f"error: {reason}\n")
    return code


def _read(sections: Mapping[str, type[msgspec.Struct]], given: Path | None, role: str) -> Config:
    """Read the settings of a process that is started alone, with its role's own file. Raises ConfigError."""
    path = given or Path(FILE)
    return load(sections, path=path if given or path.exists() else None, own=own_file(path, role), environ=os.environ)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop  # noqa: PLC0415 - not on every platform
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop


@contextlib.contextmanager
def needed_to_start(*errors: type[Exception], exit_code: int = 1) -> Iterator[None]:
    """Within the block these errors mean that the process cannot start. Raises StartError."""
    try:
        yield
    except errors as error:
        raise StartError(str(error), exit_code) from error


def on_stop_signal(handler: Callable[[], object]) -> None:
    """Have SIGTERM and SIGINT call `handler` in the running event loop."""
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, handler)


def collect_rarely() -> None:
    """Keep what is loaded now out of garbage collections, and collect less often than Python does by itself.

    A full collection walks all that open streams hold, and every stream waits for it: with 200 stalled readers the
    others' 99th percentile was 29 ms with Python's thresholds and is 23 ms with these. In a worker, collections that
    find nothing were a seventh of its time.
    """
    gc.freeze()
    gc.set_threshold(20_000, 50, 100)


BACKLOG = 2048
LOCALHOST = ("127.0.0.1", "::1")
MISSING = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
"""Errors of an address that this machine does not have."""


def listen(host: str, port: int) -> list[socket.socket]:
    """Open the sockets that listen on a host, all on one port. `localhost` is 127.0.0.1 and ::1, because a client may
    try either; a machine may lack one of them. Raises OSError.

    Args:
        port: 0 for one that is free on each address.
    """
    found: list[socket.socket] = []
    hosts = LOCALHOST if host.lower() == "localhost" else (host,)
    try:
        for each in hosts:
            try:
                found.append(_listening(each, found[0].getsockname()[1] if found else port))
            except OSError as error:
                if error.errno not in MISSING or (each == hosts[-1] and not found):
                    raise
    except OSError as error:
        for opened in found:
            opened.close()
        if found and not port and error.errno == errno.EADDRINUSE:  # the port that 127.0.0.1 got is taken on ::1
            return listen(host, port)
        raise
    return found


def _listening(host: str, port: int) -> socket.socket:
    """Raises OSError."""
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = found[0]
    takes_both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()  # `::` listens on IPv4, too
    return socket.create_server(address, family=family, backlog=BACKLOG, dualstack_ipv6=takes_both)
