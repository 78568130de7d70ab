"""Asks servers for a small page all the time, from a process of its own: for how long, at most, each stood still.

python -m bench.recovery.probe PORT...     prints one line of JSON for each line it reads, and ends with its input
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time

EVERY_S = 0.005
PATIENCE_S = 30.0
REQUEST = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


class Watch:
    """One server, asked over one connection; a thread of its own, so that one that stands still delays no other."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._worst_ms = 0.0
        self._lock = threading.Lock()
        threading.Thread(target=self._run, daemon=True).start()

    def worst_ms(self) -> float:
        """The longest answer since this was asked last."""
        with self._lock:
            worst, self._worst_ms = self._worst_ms, 0.0
        return worst

    def _run(self) -> None:
        with socket.create_connection(("127.0.0.1", self._port), PATIENCE_S) as line:
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while True:
                began = time.monotonic()
                line.sendall(REQUEST)
                if not line.recv(65536):
                    return
                took_ms = 1000 * (time.monotonic() - began)
                with self._lock:
                    self._worst_ms = max(self._worst_ms, took_ms)
                time.sleep(EVERY_S)


def main(ports: list[int]) -> None:
    """Until the input ends."""
    watches = [Watch(port) for port in ports]
    for _ in sys.stdin:
        print(json.dumps([watch.worst_ms() for watch in watches]), flush=True)


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]])
