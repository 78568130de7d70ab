"""Load of a diagnosis: closed loops of streamed chats on lanes, whose readers count what they receive."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.http import request
from bench.load.streams import Stream
from bench.penstock import MODEL

JOB = re.compile(rb"(?i)\r\nx-job-id: *([^\r\n]+)")
TEXT = re.compile(rb'"content": ?"((?:[^"\\]|\\.)+)"')


@dataclass(frozen=True, slots=True)
class Streams:
    """So many clients of one lane, each of which asks again when it has its answer."""

    number: int
    lane: str = "interactive"
    tokens: int = 20


@dataclass(slots=True)
class Received:
    """What the clients have received."""

    answers: set[str] = field(default_factory=set)
    """Ids of the jobs whose answers are whole."""
    by_lane: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    wrong: Counter[str] = field(default_factory=Counter)


async def run_load(port: int, loads: Sequence[Streams], seconds: float) -> Received:
    """Ask for `seconds`, then wait for the answers that are under way."""
    received, until = Received(), time.monotonic() + seconds
    clients = [_client(port, load, until, received) for load in loads for _ in range(load.number)]
    await asyncio.gather(*clients)
    return received


async def _client(port: int, load: Streams, until: float, received: Received) -> None:
    stream, asked = Stream(port), 0
    try:
        while time.monotonic() < until:
            asked += 1
            body = {
                "model": MODEL,
                "stream": True,
                "max_tokens": load.tokens,
                "messages": [{"role": "user", "content": f"question {id(stream)} {asked}"}],
                "queue": {"priority": load.lane},
            }
            answer = await stream.ask(request("POST", "/v1/chat/completions", body), load.tokens)
            data = b"".join(part for _, part in answer.arrivals)
            job = JOB.search(data.partition(b"\r\n\r\n")[0] + b"\r\n")
            if answer.fault or job is None or b"data: [DONE]" not in data:
                received.wrong[answer.fault or data[:60].decode(errors="replace")] += 1
                continue
            received.answers.add(job[1].decode())
            received.by_lane[load.lane] += 1
            received.tokens += load.tokens
    except OSError as error:
        received.wrong[f"no connection: {error}"] += 1
    finally:
        stream.close()
