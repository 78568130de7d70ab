"""Asks servers for a small page all the time, from a process of its own: for how long, at most, each stood still.

python -m bench.recovery.probe PORT CONTROL     prints one line of JSON for each line it reads, and ends with its input
"""

from __future__ import annotations

import json
import math
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from bench.processes import Died

PROBE_INTERVAL_S = 0.005
WAIT_TIMEOUT_S = 30.0
GOOD = b"HTTP/1.1 200 "
LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
REQUEST = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


Wait = tuple[float, float]
"""When a question was asked and when its answer came (monotonic seconds); infinity for one that did not come."""


class Watch:
    """One server, asked over one connection; a thread of its own, so that one that stands still delays no other."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._waits: list[Wait] = []
        self._asked: float | None = time.monotonic()
        """When the question was asked that has no answer yet."""
        self._lost = False
        """A question was not answered: from then on none is."""
        self._lock = threading.Lock()
        threading.Thread(target=self._run, daemon=True).start()

    def waits(self) -> list[Wait]:
        """Those since this was asked last, with the one that is under way."""
        now = time.monotonic()
        with self._lock:
            found, self._waits = self._waits, []
            if self._asked is not None:
                found.append((self._asked, now))
            elif self._lost:
                found.append((now, math.inf))
        return found

    def _run(self) -> None:
        with suppress(OSError):  # refused, broken off, or silent for too long
            self._ask_on()
        with self._lock:
            self._asked, self._lost = None, True

    def _ask_on(self) -> None:
        """Until an answer does not come. Raises OSError."""
        with socket.create_connection(("127.0.0.1", self._port), WAIT_TIMEOUT_S) as line:
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while True:
                asked = time.monotonic()
                with self._lock:
                    self._asked = asked
                line.sendall(REQUEST)
                if not _is_answered(line):
                    return
                with self._lock:
                    self._waits.append((asked, time.monotonic()))
                    self._asked = None
                time.sleep(PROBE_INTERVAL_S)


def _is_answered(line: socket.socket) -> bool:
    """Whether a whole answer comes, and is a good one. Raises OSError."""
    answer = b""
    while part := line.recv(65536):
        answer += part
        head, end, body = answer.partition(b"\r\n\r\n")
        if not answer.startswith(GOOD):
            return False
        if end and (length := LENGTH.search(head)) and len(body) >= int(length[1]):
            return True
    return False


def longest_ms(waits: Sequence[Wait]) -> float:
    """Infinity where nothing was asked, or where an answer did not come."""
    return 1000 * max((ended - began for began, ended in waits), default=math.inf)


def own_ms(waits: Sequence[Wait], control: Sequence[Wait]) -> float:
    """The longest wait, each less the longest one of the control that overlaps it: what is not the machine's doing."""
    longest = 0.0 if waits else math.inf
    for began, ended in waits:
        if 1000 * (ended - began) > longest:
            beside = max((e - b for b, e in control if b < ended and began < e and math.isfinite(e)), default=0.0)
            longest = max(longest, 1000 * (ended - began - beside))
    return longest


class Probe:
    """The probe as a process of its own, for as long as the context lasts."""

    def __init__(self, *ports: int) -> None:
        self._argv = [sys.executable, "-m", "bench.recovery.probe", *map(str, ports)]

    def __enter__(self) -> Probe:
        self._process = subprocess.Popen(self._argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def longest_waits(self) -> tuple[float, float, float]:
        """Of the server, of the control, and of the first what the second does not explain, in ms; since this was asked
        last. Raises Died."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(b"?\n")
        self._process.stdin.flush()
        said = self._process.stdout.readline()
        if not said:
            raise Died(f"the probe ended with {self._process.wait()}")
        server_ms, control_ms, own_ms = json.loads(said)
        return server_ms, control_ms, own_ms


def main(ports: list[int]) -> None:
    """Until the input ends: the longest answer of the first server, that of the second (the control), and `own_ms`."""
    watches = [Watch(port) for port in ports]
    for _ in sys.stdin:
        server, control = (watch.waits() for watch in watches)
        print(json.dumps([longest_ms(server), longest_ms(control), own_ms(server, control)]), flush=True)


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]])
