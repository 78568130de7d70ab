"""Reads one answer in the background: what has come of it so far can be looked at meanwhile."""

from __future__ import annotations

import asyncio
import json
import threading
from http.client import HTTPConnection, HTTPException
from typing import Any, NamedTuple


class Event(NamedTuple):
    """One server-sent event."""

    name: str
    id: str
    data: Any


def events_in(data: bytes) -> list[Event]:
    """The complete events of a stream, without pings and [DONE]."""
    found = []
    for block in data.decode().replace("\r\n", "\n").split("\n\n")[:-1]:
        fields = dict(
            line.replace(": ", ":", 1).split(":", 1) for line in block.splitlines() if line[:1] not in ("", ":")
        )
        if fields.get("event") != "ping" and fields.get("data", "[DONE]") != "[DONE]":
            found.append(Event(fields.get("event", ""), fields.get("id", ""), json.loads(fields["data"])))
    return found


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
        return [(event.name, event.data) for event in events_in(self.data)]

    @property
    def events(self) -> list[Any]:
        return [event.data for event in events_in(self.data)]

    async def read_out(self) -> None:
        """Wait for the end of the answer."""
        await asyncio.to_thread(self.join, 60)
        assert not self.is_alive()

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
