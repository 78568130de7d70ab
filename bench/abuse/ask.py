"""Two kinds of client: one that times the first token of a short chat, and one that sends as large a request as it may.

Both stream over raw sockets, so that the client costs little beside what it measures.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from dataclasses import dataclass
from typing import Any

from bench.http import RequestRefused, answer_to, request

CHARACTERS_PER_TOKEN = 4
"""Of the simulated engine."""
MAX_N, MAX_PROMPTS = 8, 128
"""Of one body."""
POLL_S = 0.02
CANCEL_TIMEOUT_S = 60.0
"""For the server to cancel a job whose client has gone."""


@dataclass(frozen=True, slots=True)
class TenantClient:
    """Where one tenant asks, and with which key."""

    port: int
    key: str
    model: str

    def request(self, method: str, path: str, body: object = None) -> bytes:
        """Ready to send, with the tenant's key."""
        return request(method, path, body, {"Authorization": f"Bearer {self.key}"})


@dataclass(frozen=True, slots=True)
class LargeRequest:
    """Of one large request. Its prompts and its answers fill the context together."""

    choices: int
    prompt_tokens: int
    answer_tokens: int
    lane: str = "interactive"

    def body(self, model: str, number: int) -> dict[str, Any]:
        """`number` makes its prompts unlike those of other requests. Raises ValueError where no body asks for so many
        choices."""
        n = next((n for n in range(1, MAX_N + 1) if self.choices % n == 0 and self.choices // n <= MAX_PROMPTS), None)
        if n is None:
            raise ValueError(f"no body asks for {self.choices} choices")
        prompts = [
            f"{number}.{at} ".ljust(self.prompt_tokens * CHARACTERS_PER_TOKEN, "x") for at in range(self.choices // n)
        ]
        body = {"model": model, "prompt": prompts, "n": n, "max_tokens": self.answer_tokens, "stream": True}
        return {**body, "queue": {"priority": self.lane}}


async def first_token_s(client: TenantClient, number: int, limit_s: float) -> float | None:
    """Seconds from sending a 4-token chat to its first token; None if it did not come within `limit_s`. Raises
    RequestRefused, OSError."""
    messages = [{"role": "user", "content": f"hello {number}"}]
    body = {"model": client.model, "messages": messages, "max_tokens": 4, "stream": True}
    began, first = time.monotonic(), None
    with contextlib.suppress(TimeoutError):
        async with (
            asyncio.timeout(limit_s),
            answer_to(client.port, client.request("POST", "/v1/chat/completions", body)) as (reader, _),
        ):
            while (line := await reader.readline()) and not line.startswith(b"data: [DONE]"):
                if first is None and _choice_of(line) is not None:
                    first = time.monotonic() - began
    return first


class RunningRequest:
    """A large request, whose answer is read for as long as the context lasts; then the connection is closed, and the
    server has cancelled the job."""

    def __init__(self, client: TenantClient, large: LargeRequest, number: int, running: int = 1) -> None:
        """`running`: choices that will run at the same time."""
        self._client, self._running = client, running
        self._request = client.request("POST", "/v1/completions", large.body(client.model, number))
        self._task: asyncio.Task[None] | None = None
        self._job = ""
        self._choices: set[int] = set()
        self.accepted = asyncio.Event()
        """The server has taken it, or has refused it."""
        self.begun = asyncio.Event()
        """`running` choices have had a token, or it has ended."""

    async def __aenter__(self) -> RunningRequest:
        self._task = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        async with asyncio.timeout(CANCEL_TIMEOUT_S):
            while self._job and await _state(self._client, self._job) in ("queued", "in_progress"):  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)  # only the server knows

    async def _read(self) -> None:
        try:
            async with answer_to(self._client.port, self._request) as (reader, headers):
                self._job = headers["x-job-id"]
                self.accepted.set()
                while line := await reader.readline():
                    if not self.begun.is_set() and (index := _choice_of(line)) is not None:
                        self._choices.add(index)
                        if len(self._choices) >= self._running:
                            self.begun.set()
        finally:
            self.accepted.set()
            self.begun.set()

    @property
    def choices_begun(self) -> int:
        """Choices that have had a token, up to `running`."""
        return len(self._choices)

    def check(self) -> None:
        """Raises what ended it, and RequestRefused if it came to its end: nothing was measured beside it then."""
        if self._task is not None and self._task.done():
            self._task.result()
            raise RequestRefused("the large request ended before the measurement beside it did: give it more tokens")


async def _state(client: TenantClient, job: str) -> str:
    async with answer_to(client.port, client.request("GET", f"/v1/jobs/{job}")) as (reader, headers):
        return str(json.loads(await reader.readexactly(int(headers["content-length"])))["status"])


def _choice_of(line: bytes) -> int | None:
    """The choice a line of a stream brings text of; None where it brings none."""
    if not line.startswith(b"data: {"):
        return None
    choice = (json.loads(line[6:]).get("choices") or [{}])[0]
    return choice["index"] if choice.get("text") or choice.get("delta", {}).get("content") else None
