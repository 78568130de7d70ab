"""Clients of two tenants: one times the first token of a short chat, the other sends the largest requests.

Both stream over raw sockets, so that the client costs little beside what it measures.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from bench.http import RequestRefused, answer_to, request
from bench.report import Ratio, columns
from penstock.engine import CHARACTERS_PER_TOKEN

MAX_N, MAX_PROMPTS = 8, 128
"""Of one body."""
POLL_INTERVAL_S = 0.02
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
                await asyncio.sleep(POLL_INTERVAL_S)  # only the server knows

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


COLUMNS = columns("""
    tree: tree; slots: slots; kv_tokens: KV cache, tokens; bodies: large requests; choices: choices of each;
    lane: their lane; running: of them running; alone_ms: TTFT alone: median, ms .0;
    arrival_ms: as they arrive: median, ms .0; beside_ms: beside: median, ms .0; worst_ms: longest, ms .0;
    ratio: beside / alone .2; late: chats past the limit
""")


@dataclass(frozen=True, slots=True)
class EngineCosts:
    """What the simulated engine charges: see section [sim] of docs/configuration.md."""

    step_ms: float
    step_ms_per_text: float
    prefill_ms_per_1k_tokens: float
    prefill_batch: int
    prefill_ms: float = 0.0


LLAMACPP = EngineCosts(step_ms=4.3, step_ms_per_text=2.4, prefill_ms_per_1k_tokens=1200, prefill_batch=128)
"""The embedded engine with the default model at Q8_0 on two cores, prompts of 99 tokens: a token takes 6.7 ms alone and
23.2 ms beside seven others, and the first one comes after 124 ms."""
GPU = EngineCosts(step_ms=15, step_ms_per_text=0.1, prefill_ms_per_1k_tokens=40, prefill_batch=8192)
"""Assumed, not measured: 25,000 prompt tokens a second, and at 128 texts 4,600 tokens a second."""


@dataclass(frozen=True, slots=True)
class Case:
    """What the chat is measured beside. `kv_tokens`: that the engine's cache holds; 0: as many as its slots need."""

    slots: int
    choices: int
    bodies: int = 1
    lane: str = "interactive"
    """Of the large requests; the chat's is interactive."""
    kv_tokens: int = 0
    engine: EngineCosts = GPU

    def running(self, context: int) -> int:
        """Choices of one request, each as large as the context, that a worker gives its engine at the same time: half
        of the slots, or half of the cache."""
        most = self.slots // 2
        if self.kv_tokens:
            most = min(most, self.kv_tokens // 2 // context)
        return min(self.choices, max(1, most))

    @property
    def words(self) -> str:
        """For people."""
        what = "one request" if self.bodies == 1 else f"{self.bodies} requests"
        cache = f", {self.kv_tokens:,} tokens of cache" if self.kv_tokens else ""
        lane = "" if self.lane == "interactive" else f" in lane {self.lane}"
        return f"{self.slots} slots{cache}, beside {what} of {self.choices:,} choices{lane}"


@dataclass(frozen=True, slots=True)
class AbuseRound:
    """Seconds to the first token; None where it did not come in time."""

    alone: Sequence[float | None]
    beside: Sequence[float | None]
    arrival: float | None = None
    """Of a chat that was sent once the large requests were accepted, and before they had a token."""
    running: int = 0
    """Choices of the first large request that had a token when the chats beside it began."""


def row_of(tree: str, case: Case, rounds: Sequence[AbuseRound], limit_s: float) -> dict[str, Any]:
    """All rounds of one case. A chat whose first token did not come in time counts as late as the limit: the figure is
    then a lower bound."""
    ratios = ratios_of(rounds, limit_s)
    alone = [_s(each, limit_s) for one in rounds for each in one.alone]
    beside = [_s(each, limit_s) for one in rounds for each in one.beside]
    return {
        "tree": tree,
        "slots": case.slots,
        "kv_tokens": case.kv_tokens or None,
        "bodies": case.bodies,
        "choices": case.choices,
        "lane": case.lane,
        "running": min(each.running for each in rounds) if case.bodies == 1 else None,
        "alone_ms": 1e3 * median(alone),
        "arrival_ms": 1e3 * median(_s(each.arrival, limit_s) for each in rounds),
        "beside_ms": 1e3 * median(beside),
        "worst_ms": 1e3 * max(beside),
        "ratio": median(ratios),
        "ratios": ratios,
        "late": sum(each is None for one in rounds for each in (*one.alone, one.arrival, *one.beside)),
    }


def goals_of(case: Case, rounds: Sequence[AbuseRound], limit_s: float) -> list[Ratio]:
    """Beside one request the median of the rounds' ratios is judged; beside several it is only shown, and so are the
    latest of all chats and the one that came as the large requests did."""
    ratios = ratios_of(rounds, limit_s)
    alone = [_median_s(each.alone, limit_s) for each in rounds]
    worst = max(_s(time, limit_s) / base for one, base in zip(rounds, alone, strict=True) for time in one.beside)
    arrivals = [_s(each.arrival, limit_s) / base for each, base in zip(rounds, alone, strict=True)]
    return [
        Ratio.held(
            "abuse.chat" if case.bodies == 1 else None,
            f"{case.words}: TTFT over that of the chat alone",
            median(ratios),
            rounds=tuple(ratios),
        ),
        Ratio(what=f"{case.words}: the latest of all chats over alone", value=worst),
        Ratio(what=f"{case.words}: TTFT as it arrives over alone", value=median(arrivals), rounds=tuple(arrivals)),
    ]


def ratios_of(rounds: Sequence[AbuseRound], limit_s: float) -> list[float]:
    """Of each round: the median beside over the median alone."""
    return [_median_s(each.beside, limit_s) / _median_s(each.alone, limit_s) for each in rounds]


def _median_s(times: Sequence[float | None], limit_s: float) -> float:
    return median(_s(each, limit_s) for each in times)


def _s(seconds: float | None, limit_s: float) -> float:
    return limit_s if seconds is None else seconds
