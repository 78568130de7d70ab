"""Ports for what tests and measurements start. Each process that asks has a range of its own, held by a lock: several
runs on one machine never choose the same port."""

from __future__ import annotations

import fcntl
import functools
import itertools
import os
import random
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

FIRST, EACH, RANGES = 20_000, 250, 48
"""All below those the kernel gives to clients, which might be taken meanwhile."""


def free_port() -> int:
    """A port nobody listens on now, and that was not given out before: who asks for several, and uses the first only
    when it has the last, gets each once. Raises RuntimeError if all ranges are taken."""
    return next(port for port in _ports() if _is_free(port))


@functools.cache
def _ports() -> Iterator[int]:
    """Those of this process, each of them before any comes again."""
    number, _ = _range()
    first = FIRST + EACH * number
    return itertools.cycle(random.sample(range(first, first + EACH), EACH))


@functools.cache
def _range() -> tuple[int, IO[bytes]]:
    """The number of a range that no other process has, and the file whose lock holds it until this process ends."""
    folder = Path(tempfile.gettempdir()) / f"penstock-ports-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    for number in range(RANGES):
        file = (folder / str(number)).open("wb")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
        else:
            return number, file
    raise RuntimeError(f"{RANGES} processes have taken all ranges of ports: see {folder}")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
