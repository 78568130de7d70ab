"""TCP ports of this machine: opens the API's listening sockets, finds free ports, and names a port's holder."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from cli.output import Problem
from penstock import process

WILDCARDS = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - nothing listens here
"""Wildcard addresses to listen on, and the address to connect to instead."""


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
    next_step = f"penstock up --port {next_free(host, port + 1)}"
    return Problem(
        f"port {port} is taken", cause="another process listens on it", next_step=next_step, code="port_taken"
    )


def url_of(host: str, port: int) -> str:
    """The URL of a server at this host, which may be an IPv6 address."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


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
