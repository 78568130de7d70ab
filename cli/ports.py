"""TCP ports of this machine: opens the API's listening sockets, finds free ports, and names a port's holder."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cli.output import Problem
from penstock import process

PROC = Path("/proc")
WILDCARDS = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - nothing listens here
"""Wildcard addresses to listen on, and the address to connect to instead."""
LISTEN = "0A"


@contextmanager
def listen(host: str, port: int) -> Iterator[list[socket.socket]]:
    """Open the sockets that all API processes accept from, for the block. Raises Problem, which names the holder of a
    taken port."""
    try:
        listeners = process.listen(host, port)
    except OSError as error:
        raise _refusal(host, port, error) from None
    try:
        yield listeners
    finally:
        for each in listeners:
            each.close()


def _refusal(host: str, port: int, error: OSError) -> Problem:
    if error.errno != errno.EADDRINUSE:
        cause = error.strerror or str(error)
        return Problem(f"cannot listen on {host}:{port}", cause=cause, next_step="choose another --host or --port")
    what, cause = f"port {port} is taken", f"{holder(port) or 'another process'} listens on it"
    return Problem(what, cause=cause, next_step=f"penstock up --port {next_free(host, port + 1)}", code="port_taken")


def is_free(host: str, port: int) -> bool:
    """Whether `port` can be bound now."""
    try:
        listeners = process.listen(host, port)
    except OSError:
        return False
    for each in listeners:
        each.close()
    return True


def next_free(host: str, port: int) -> int:
    """The first free port among the 200 from `port` on; 0 (any port) if there is none."""
    return next((candidate for candidate in range(port, min(port + 200, 65536)) if is_free(host, candidate)), 0)


def holder(port: int) -> str:
    """The process that listens on `port`, as "pid 12 (command)"; "" if unknown (only Linux shows it, for own processes
    or to root)."""
    inodes = set(_listening(port))
    for folder in PROC.glob("[0-9]*") if inodes else ():
        with suppress(OSError):  # the process ended, or belongs to another user
            if any(str(fd.readlink()) in inodes for fd in (folder / "fd").iterdir()):
                return f"pid {folder.name} ({command(int(folder.name))})"
    return ""


def command(pid: int) -> str:
    """The command line of a process, cut to fit a line."""
    try:
        words = (PROC / str(pid) / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return "unknown"
    line = " ".join(word.decode(errors="replace") for word in words if word)
    return line if len(line) <= 60 else line[:57] + "..."


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
