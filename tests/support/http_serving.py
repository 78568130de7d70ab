"""HTTP servers that a test runs in a thread of its own process."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, TypeVar

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


class QuietHandler(BaseHTTPRequestHandler):
    """Reads and sends JSON, and logs nothing."""

    def read_json(self) -> Any:
        """What a request brings; None if it brings nothing."""
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        return json.loads(body) if body else None

    def send(self, status: int, value: object, kind: str = "application/json", **headers: str) -> None:
        """Answer with a value as JSON, or with a text as it is."""
        data = (value if isinstance(value, str) else json.dumps(value)).encode()
        self.send_response(status)
        for name, each in ({"Content-Type": kind, "Content-Length": str(len(data))} | headers).items():
            self.send_header(name, each)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass
