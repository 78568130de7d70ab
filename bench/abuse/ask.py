"""Two kinds of client: one that times the first token of a short chat, and one that sends as large a request as it may.

Both stream over raw sockets, so that the client costs little beside what it measures.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

HOST = "127.0.0.1"
LINE_LIMIT = 1 << 20
CHARACTERS_PER_TOKEN = 4
"""Of the simulated engine."""
MAX_N, MAX_PROMPTS = 8, 128
"""Of one body."""
POLL_S = 0.02
CANCEL_TIMEOUT_S = 60.0
"""For the server to cancel a job whose client has gone."""


class Unanswered(RuntimeError):
    """A request was not answered with a 2xx."""


@dataclass(frozen=True, slots=True)
class Door:
    """Where one tenant asks."""

    port: int
    key: str
    model: str


@dataclass(frozen=True, slots=True)
class Size:
    """Of one large request. Its prompts and its answers fill the context together."""

    choices: int
    prompt_tokens: int
    answer_tokens: int

    def body(self, model: str, number: int) -> dict[str, Any]:
        """`number` makes its prompts unlike those of other requests. Raises ValueError where no body asks for so many
        choices."""
        n = next((n for n in range(1, MAX_N + 1) if self.choices % n == 0 and self.choices // n <= MAX_PROMPTS), None)
        if n is None:
            raise ValueError(f"no body asks for {self.choices} choices")
        prompts = [
            f"{number}.{at} ".ljust(self.prompt_tokens * CHARACTERS_PER_TOKEN, "x") for at in range(self.choices // n)
        ]
        return {"model": model, "prompt": prompts, "n": n, "max_tokens": self.answer_tokens, "stream": True}


async def first_token_s(door: Door, number: int, limit_s: float) -> float | None:
    """Seconds from sending a 4-token chat to its first token; None if it did not come within `limit_s`. Raises
    Unanswered, OSError."""
    messages = [{"role": "user", "content": f"hello {number}"}]
    body = {"model": door.model, "messages": messages, "max_tokens": 4, "stream": True}
    began, first = time.monotonic(), None
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s), _posted(door, "/v1/chat/completions", body) as (reader, _):
            while (line := await reader.readline()) and not line.startswith(b"data: [DONE]"):
                if first is None and _has_text(line):
                    first = time.monotonic() - began
    return first


class Large:
    """A large request, whose answer is read for as long as the context lasts; then the connection is closed, and the
    server has cancelled the job."""

    def __init__(self, door: Door, size: Size, number: int) -> None:
        self._door, self._body = door, size.body(door.model, number)
        self._task: asyncio.Task[None] | None = None
        self._job = ""
        self.begun = asyncio.Event()
        """It has had a token, or has ended."""

    async def __aenter__(self) -> Large:
        self._task = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        async with asyncio.timeout(CANCEL_TIMEOUT_S):
            while self._job and await _state(self._door, self._job) in ("queued", "in_progress"):  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)  # only the server knows

    async def _read(self) -> None:
        try:
            async with _posted(self._door, "/v1/completions", self._body) as (reader, headers):
                self._job = headers["x-job-id"]
                while line := await reader.readline():
                    if not self.begun.is_set() and _has_text(line):
                        self.begun.set()
        finally:
            self.begun.set()

    def check(self) -> None:
        """Raises what ended it, and Unanswered if it came to its end: nothing was measured beside it then."""
        if self._task is not None and self._task.done():
            self._task.result()
            raise Unanswered("the large request ended before the measurement beside it did: give it more tokens")


async def _state(door: Door, job: str) -> str:
    async with _sent(door, "GET", f"/v1/jobs/{job}", b"") as (reader, headers):
        return str(json.loads(await reader.readexactly(int(headers["content-length"])))["status"])


def _has_text(line: bytes) -> bool:
    if not line.startswith(b"data: {"):
        return False
    choices = json.loads(line[6:]).get("choices") or [{}]
    return bool(choices[0].get("text") or choices[0].get("delta", {}).get("content"))


@asynccontextmanager
async def _posted(
    door: Door, path: str, body: Mapping[str, Any]
) -> AsyncIterator[tuple[asyncio.StreamReader, dict[str, str]]]:
    async with _sent(door, "POST", path, json.dumps(body).encode()) as answer:
        yield answer


@asynccontextmanager
async def _sent(
    door: Door, method: str, path: str, body: bytes
) -> AsyncIterator[tuple[asyncio.StreamReader, dict[str, str]]]:
    """The answer from behind its head, and its headers; the connection is closed behind it. Raises Unanswered,
    OSError."""
    lines = [
        f"{method} {path} HTTP/1.1",
        f"Host: {HOST}:{door.port}",
        f"Authorization: Bearer {door.key}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    ]
    reader, writer = await asyncio.open_connection(HOST, door.port, limit=LINE_LIMIT)
    try:
        writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        except asyncio.IncompleteReadError as error:
            raise Unanswered("the connection was cut before an answer") from error
        if not head[0].startswith("HTTP/1.1 2"):
            raise Unanswered(f"{path}: {head[0]}")
        yield reader, {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
    finally:
        writer.close()
