"""`python -m bench.jobs.frontend FORM URL CALLERS WARMUP SECONDS`: callers of Penstock's API, one connection each.

Forms: `chat` (the answer in one piece), `stream` (a stream of one token, timed to that token), `jobs` (put, then wait
for the result: two requests).
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import cast
from urllib.parse import urlsplit

import msgspec

from bench.http import request
from bench.jobs.callers import CallerPlan, run, tasks
from bench.penstock import MODEL

JOB_WAIT_S = 60

HEAD_END = b"\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"


class JobsConnection(asyncio.Protocol):
    """One request at a time over one connection."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._answer: asyncio.Future[bytes] | None = None
        self._mark = b""
        self.marked = 0.0
        """When the bytes that were looked for came."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._write = cast(asyncio.Transport, transport).write

    def ask(self, request: bytes, mark: bytes = b"") -> asyncio.Future[bytes]:
        """Send a request; its whole answer, status line and all. `mark`: note when these bytes come."""
        self._answer = asyncio.get_running_loop().create_future()
        self._mark, self.marked = mark, 0.0
        self._write(request)
        return self._answer

    def data_received(self, data: bytes) -> None:
        self._data += data
        if self._mark and not self.marked and self._mark in self._data:
            self.marked = time.perf_counter()
        if self._answer is not None and _is_whole(self._data):
            answer, self._answer = self._answer, None
            if not answer.done():
                answer.set_result(bytes(self._data))
            self._data.clear()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionError(f"the connection ended: {exc}"))


def _is_whole(data: bytearray) -> bool:
    end = data.find(HEAD_END)
    if end < 0:
        return False
    head = bytes(data[:end]).lower()
    if b"transfer-encoding: chunked" in head:
        return data.endswith(LAST_CHUNK)
    length = head.partition(b"content-length:")[2].split(b"\r\n", 1)[0]
    return len(data) >= end + len(HEAD_END) + int(length)


BODY = {"model": MODEL, "messages": [{"role": "user", "content": "say one word"}], "max_tokens": 1}
CHAT = request("POST", "/v1/chat/completions", BODY)
STREAM = request("POST", "/v1/chat/completions", BODY | {"stream": True})
JOB = request("POST", "/v1/jobs", BODY)


async def chat(connection: JobsConnection) -> None:
    """Raises ValueError."""
    _said_one_token(await connection.ask(CHAT))


async def stream(connection: JobsConnection) -> float:
    """When the token came. Raises ValueError."""
    answer = await connection.ask(STREAM, b'"content":"')
    if not answer.startswith(b"HTTP/1.1 200") or b"data: [DONE]" not in answer:
        raise ValueError(answer[:300])
    return connection.marked


async def jobs(connection: JobsConnection) -> None:
    """Raises ValueError."""
    accepted = await connection.ask(JOB)
    if not accepted.startswith(b"HTTP/1.1 202"):
        raise ValueError(accepted[:300])
    job: str = msgspec.json.decode(accepted.partition(HEAD_END)[2])["id"]
    _said_one_token(await connection.ask(request("GET", f"/v1/jobs/{job}?wait={JOB_WAIT_S}")))


def _said_one_token(answer: bytes) -> None:
    # The word is drawn from the prompt: the word's number is what tells the first token.
    if not answer.startswith(b"HTTP/1.1 200") or b'"completion_tokens":1,' not in answer:
        raise ValueError(answer[:300])


FORMS: Mapping[str, Callable[[JobsConnection], Awaitable[float | None]]] = {
    "chat": chat,
    "stream": stream,
    "jobs": jobs,
}


async def main(form: str, plan: CallerPlan) -> None:
    """Raises OSError when nobody listens."""
    place, loop = urlsplit(plan.url), asyncio.get_running_loop()
    host, port = place.hostname or "127.0.0.1", place.port or 80
    connections = [(await loop.create_connection(JobsConnection, host, port))[1] for _ in range(plan.callers)]
    ask = FORMS[form]
    await tasks(plan, lambda number: ask(connections[number]))


if __name__ == "__main__":
    run(main(sys.argv[1], CallerPlan.of(sys.argv[2:])))
