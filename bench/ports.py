"""Ports for what tests and measurements start. Each process that asks has a range of its own: several runs on one
machine never choose the same port."""

from __future__ import annotations

import functools
import itertools
import random
import socket
from collections.abc import Iterator

FIRST_PORT, RANGE_SIZE, MAX_RANGES = 20_000, 250, 48
"""All below those the kernel gives to clients, which might be taken meanwhile."""


def free_port() -> int:
    """Returns a port nobody listens on. It returns every port of this process's range once before it returns one again,
    so several can be reserved before the first is used. Raises RuntimeError if all ranges are taken."""
    return next(port for port in _ports() if _is_free(port))


@functools.cache
def _ports() -> Iterator[int]:
    """The ports of this process's range, again and again."""
    first = _range()
    return itertools.cycle(random.sample(range(first + 1, first + RANGE_SIZE), RANGE_SIZE - 1))


@functools.cache
def _range() -> int:
    """The first port of a range that no other process has. A socket on it keeps others out until this process ends."""
    for first in range(FIRST_PORT, FIRST_PORT + RANGE_SIZE * MAX_RANGES, RANGE_SIZE):
        guard = socket.socket()
        try:
            guard.bind(("127.0.0.1", first))
        except OSError:
            guard.close()
        else:
            guard.detach()  # its descriptor stays open
            return first
    raise RuntimeError(f"{MAX_RANGES} processes have taken all ranges of ports")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: past connections do not count
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
