"""`python -m bench.jobs.frontend FORM URL CALLERS WARMUP SECONDS`: callers of Penstock's API, one connection each.

Forms: `chat` (the answer in one piece), `stream` (a stream of one token, timed to that token), `jobs` (one request
puts a job and waits for its result).
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from urllib.parse import urlsplit

from bench.http import HOST, request
from bench.jobs.callers import CallerPlan, run, tasks
from bench.load.streams import Stream
from bench.penstock import MODEL

JOB_WAIT_S = 60

BODY = {"model": MODEL, "messages": [{"role": "user", "content": "say one word"}], "max_tokens": 1}
CHAT = request("POST", "/v1/chat/completions", BODY)
STREAM = request("POST", "/v1/chat/completions", BODY | {"stream": True})
JOB = request("POST", f"/v1/jobs?wait={JOB_WAIT_S}", BODY)


async def whole(sent: bytes, stream: Stream) -> None:
    """Raises ValueError."""
    _said_one_token(await _asked(stream, sent))


async def streamed(stream: Stream) -> float:
    """When the token came. Raises ValueError."""
    answer = await stream.ask(STREAM, 1)
    came, data = 0.0, b""
    for at, part in answer.arrivals:
        data += part
        came = came or (at if b'"content":"' in data else 0.0)
    if answer.fault or not data.startswith(b"HTTP/1.1 200") or b"data: [DONE]" not in data:
        raise ValueError(answer.fault or data[:300])
    return came


async def _asked(stream: Stream, sent: bytes) -> bytes:
    """The whole answer, status line and all. Raises ValueError where the connection ended before it."""
    answer = await stream.ask(sent, 1)
    if answer.fault:
        raise ValueError(answer.fault)
    return b"".join(part for _, part in answer.arrivals)


def _said_one_token(answer: bytes) -> None:
    # The word is drawn from the prompt: the word's number is what tells the first token.
    if not answer.startswith(b"HTTP/1.1 200") or b'"completion_tokens":1,' not in answer:
        raise ValueError(answer[:300])


FORMS: Mapping[str, Callable[[Stream], Awaitable[float | None]]] = {
    "chat": partial(whole, CHAT),
    "stream": streamed,
    "jobs": partial(whole, JOB),
}


async def main(form: str, plan: CallerPlan) -> None:
    """Raises OSError when nobody listens."""
    place, ask = urlsplit(plan.url), FORMS[form]
    streams = [Stream(place.port or 80, place.hostname or HOST) for _ in range(plan.callers)]
    for stream in streams:
        await stream.connect()
    await tasks(plan, lambda number: ask(streams[number]))


if __name__ == "__main__":
    run(main(sys.argv[1], CallerPlan.of(sys.argv[2:])))
