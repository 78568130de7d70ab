"""One level: so many streams that ask in a closed loop, and the timing the server has of each answer."""

from __future__ import annotations

import asyncio
import itertools
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from bench.breakdown.target import Target
from bench.load.answer import Answer
from bench.load.streams import Stream

JOB_ID = re.compile(rb"\r\nx-job-id: (job_[0-9a-f]{32})\r\n", re.IGNORECASE)
NOTED_S = 10.0
"""How long the server may take to note when an answer was sent."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One answer that came whole."""

    job: str
    spent_ms: float
    """From sending the request to its last byte, by the client's clock."""


@dataclass(slots=True)
class Level:
    """What one concurrency gave."""

    streams: int
    asked: list[Asked] = field(default_factory=list)
    wrong: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0


async def ask_all(target: Target, streams: int, requests: int, tokens: int, *, whole: bool, limit_s: float) -> Level:
    """Warm up with one request a stream, then `requests` in all; none begins after `limit_s`."""
    connections = [Stream(target.port, target.host) for _ in range(streams)]
    numbers = itertools.count()
    until = time.monotonic() + limit_s

    def request() -> bytes:
        return _request(target, f"Tell me about water, please: question {next(numbers)}.", tokens, whole=whole)

    async def run(stream: Stream, left: Iterator[int], level: Level) -> None:
        for _ in left:
            if time.monotonic() > until:
                return
            try:
                answer = await stream.ask(request(), tokens)
            except OSError as error:
                level.wrong[f"no connection: {error}"] += 1
                await asyncio.sleep(0.1)
            else:
                _note(answer, level)

    async def round_of(count: int) -> Level:
        level, left, began = Level(streams), iter(range(count)), time.monotonic()
        await asyncio.gather(*(run(stream, left, level) for stream in connections))
        level.seconds = time.monotonic() - began
        return level

    try:
        async with asyncio.timeout(2 * limit_s):
            await round_of(streams)
            return await round_of(requests)
    finally:
        for stream in connections:
            stream.close()


def _request(target: Target, prompt: str, tokens: int, *, whole: bool) -> bytes:
    messages = [{"role": "user", "content": prompt}]
    body = msgspec.json.encode({"model": target.model, "messages": messages, "max_tokens": tokens, "stream": not whole})
    lines = [
        "POST /v1/chat/completions HTTP/1.1",
        f"Host: {target.host}:{target.port}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        *(f"{name}: {value}" for name, value in target.headers.items()),
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


def _note(answer: Answer, level: Level) -> None:
    """A streamed answer is whole with its [DONE], the other with its last byte."""
    data = b"".join(part for _, part in answer.arrivals)
    head, _, body = data.partition(b"\r\n\r\n")
    status, job = head.split(b" ", 2)[1:2], JOB_ID.search(head + b"\r\n")
    streamed = b"text/event-stream" in head
    if answer.fault or status != [b"200"] or (streamed and b"data: [DONE]" not in body):
        level.wrong[answer.fault or f"status {b''.join(status).decode()}: {body[:120].decode(errors='replace')}"] += 1
    elif job is None:
        level.wrong["no X-Job-Id: this is not Penstock"] += 1
    else:
        level.asked.append(Asked(job[1].decode(), 1e3 * (answer.arrivals[-1][0] - answer.sent)))


def timings(target: Target, asked: list[Asked], most: int) -> list[tuple[Asked, dict[str, Any]]]:
    """The server's view of at most so many of them, spread over the run. Raises Unsuitable, OSError."""
    step = max(1, -(-len(asked) // most))
    chosen = asked[::step]
    deadline = time.monotonic() + NOTED_S
    while True:
        found = list(target.get(f"/v1/jobs/{each.job}/timing" for each in chosen[-1:]))
        if not found or found[0]["until"] == "last_sent" or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return list(zip(chosen, target.get(f"/v1/jobs/{each.job}/timing" for each in chosen), strict=True))
