"""HTTP servers that a test runs in a thread of its own process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import HTTPServer
from typing import TypeVar

Server = TypeVar("Server", bound=HTTPServer)

POLL_S = 0.01
"""How long the end of the block waits for a server to notice it."""


@contextmanager
def serving_http(server: Server) -> Iterator[Server]:
    """It answers requests until the block ends, and is closed then."""
    with server:
        thread = threading.Thread(target=server.serve_forever, args=(POLL_S,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
