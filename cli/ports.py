"""TCP ports of this machine: opens the API's listening socket, finds free ports, and names a port's holder."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cli.errors import Problem

PROC = Path("/proc")
WILDCARDS = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - nothing listens here
"""Wildcard addresses to listen on, and the address to connect to instead."""
LISTEN = "0A"
BACKLOG = 2048


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that listens on a port."""

    pid: int
    command: str

    def __str__(self) -> str:
        return f"pid {self.pid} ({self.command})"


def listen(host: str, port: int) -> socket.socket:
    """Open the socket that all API processes accept from. Raises Problem, which names the holder of a taken port."""
    try:
        family, address = _resolve(host, port)
    except OSError as error:
        raise Problem(f"cannot listen on {host}", cause=str(error), next_step="choose another --host") from None
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise _refusal(host, port, error) from None
    return listener


def _refusal(host: str, port: int, error: OSError) -> Problem:
    if error.errno != errno.EADDRINUSE:
        cause = error.strerror or str(error)
        return Problem(f"cannot listen on {host}:{port}", cause=cause, next_step="choose another --host or --port")
    return Problem(
        f"port {port} is taken",
        cause=f"{holder(port) or 'another process'} listens on it",
        next_step=f"penstock up --port {next_free(host, port + 1)}",
        code="port_taken",
    )


def is_free(host: str, port: int) -> bool:
    """Whether `port` can be bound now."""
    try:
        family, address = _resolve(host, port)
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError:
        return False
    return True


def next_free(host: str, port: int) -> int:
    """The first free port among the 200 from `port` on; 0 (any port) if there is none."""
    return next((candidate for candidate in range(port, min(port + 200, 65536)) if is_free(host, candidate)), 0)


def holder(port: int) -> Holder | None:
    """The process that listens on `port`; None if unknown (only Linux shows it, for own processes or to root)."""
    inodes = set(_listening(port))
    for folder in PROC.glob("[0-9]*") if inodes else ():
        if _has_socket(folder, inodes):
            return Holder(int(folder.name), command(int(folder.name)))
    return None


def command(pid: int) -> str:
    """The command line of a process, cut to fit a line."""
    try:
        words = (PROC / str(pid) / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return "unknown"
    line = " ".join(word.decode(errors="replace") for word in words if word)
    return line if len(line) <= 60 else line[:57] + "..."


def _resolve(host: str, port: int) -> tuple[int, tuple[Any, ...]]:
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = found[0]
    return family, address


def _listening(port: int) -> Iterator[str]:
    for table in ("tcp", "tcp6"):
        try:
            lines = (PROC / "net" / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                yield f"socket:[{fields[9]}]"


def _has_socket(folder: Path, inodes: set[str]) -> bool:
    try:
        return any(str(fd.readlink()) in inodes for fd in (folder / "fd").iterdir())
    except OSError:  # the process ended, or belongs to another user
        return False
