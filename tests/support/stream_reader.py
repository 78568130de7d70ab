"""Reads one answer in the background: what has come of it so far can be looked at meanwhile."""

from __future__ import annotations

import json
import threading
from http.client import HTTPConnection, HTTPException
from typing import Any


class StreamReader(threading.Thread):
    """`data` grows as it comes, without comments. Without a body it is a GET."""

    def __init__(self, port: int, path: str, body: dict[str, Any] | None = None, **headers: str) -> None:
        super().__init__(daemon=True)
        self.data, self.broken, self.status, self.job = b"", False, 0, ""
        self._connection = HTTPConnection("127.0.0.1", port, timeout=150)
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        data = None if body is None else json.dumps(body)
        self._request = "GET" if body is None else "POST", path, data, {"Content-Type": "application/json", **given}
        self.start()

    def run(self) -> None:
        try:
            self._connection.request(*self._request)
            response = self._connection.getresponse()
            self.status, self.job = response.status, response.headers["x-job-id"] or ""
            for line in response:
                if not line.startswith(b":"):
                    self.data += line
        except (OSError, HTTPException):
            self.broken = True
        finally:
            self._connection.close()

    @property
    def named_events(self) -> list[tuple[str, Any]]:
        """The complete events so far, without pings: name and data."""
        found = []
        for block in self.data.replace(b"\r\n", b"\n").split(b"\n\n")[:-1]:
            head, _, data = block.rpartition(b"data: ")
            name = head.partition(b"event: ")[2].partition(b"\n")[0].decode()
            if data != b"[DONE]" and name != "ping":
                found.append((name, json.loads(data)))
        return found

    @property
    def events(self) -> list[Any]:
        return [data for _, data in self.named_events]

    @property
    def is_whole(self) -> bool:
        return not self.broken and self.data.endswith(b"data: [DONE]\n\n")

    @property
    def error(self) -> dict[str, Any] | None:
        """That which a stream was ended with."""
        return next((event["error"] for event in self.events if event.get("error")), None)

    def text(self, index: int = 0) -> str:
        """Of one choice of a streamed chat."""
        choices = [choice for event in self.events for choice in event.get("choices", ()) if choice["index"] == index]
        return "".join(choice["delta"].get("content") or "" for choice in choices)
