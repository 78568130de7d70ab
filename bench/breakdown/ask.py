"""One level of concurrency: streams that ask in a closed loop, and the server's timing of each answer."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import itertools
import json
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from bench.http import request
from bench.load.streams import Answer, Stream

TIMEOUT_S = 30.0


class Unsuitable(RuntimeError):
    """There is nothing there that could be measured; the message says what to do."""


@dataclass(frozen=True, slots=True)
class BreakdownTarget:
    """Its address, and what every request to it says."""

    host: str
    port: int
    model: str
    headers: dict[str, str] = field(default_factory=dict)

    @classmethod
    def at(cls, base_url: str, key: str = "", model: str = "") -> BreakdownTarget:
        """A server somebody else has started; its first model unless one is named. Raises Unsuitable, OSError."""
        parts = urlsplit(base_url if "//" in base_url else f"http://{base_url}")
        if parts.scheme != "http" or not parts.hostname:
            raise Unsuitable(f"{base_url}: give a plain http:// address; what is in front of it is not Penstock's time")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        target = cls(parts.hostname, parts.port or 80, model, headers)
        return target if model else cls(target.host, target.port, target.first_model(), headers)

    def first_model(self) -> str:
        """Raises Unsuitable, OSError."""
        models = next(self.get(["/v1/models"])).get("data") or []
        if not models:
            raise Unsuitable("no model is served there: name one with --model")
        return str(models[0]["id"])

    def get(self, paths: Iterable[str]) -> Iterator[dict[str, Any]]:
        """The JSON answers, one after the other, over one connection. Raises Unsuitable, OSError."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=TIMEOUT_S)
        try:
            for path in paths:
                connection.request("GET", path, headers=self.headers)
                response = connection.getresponse()
                body = response.read()
                if response.status != 200:
                    raise Unsuitable(f"GET {path} is answered with {response.status}: {body[:200].decode('replace')}")
                yield json.loads(body)
        except (http.client.HTTPException, ValueError) as error:
            raise Unsuitable(f"{self.host}:{self.port} does not answer like Penstock: {error}") from error
        finally:
            connection.close()


JOB_ID = re.compile(rb"\r\nx-job-id: (job_[0-9a-f]{32})\r\n", re.IGNORECASE)
NOTED_S = 10.0
"""How long the server may take to note when an answer was sent."""


@dataclass(frozen=True, slots=True)
class AskedWhole:
    """One answer that came whole."""

    job: str
    spent_ms: float
    """From sending the request to its last byte, by the client's clock."""


@dataclass(slots=True)
class BreakdownLevel:
    """What one concurrency gave."""

    streams: int
    asked: list[AskedWhole] = field(default_factory=list)
    wrong: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakdownLoad:
    """What each level asks for."""

    requests: int
    """Of each stream, after one that is not measured."""
    tokens: int
    whole: bool = False
    together: bool = False
    """All streams begin at once, and an engine whose answers take equally long keeps them in step: every request comes
    in a crowd. Otherwise they are spread over the time of one answer."""
    limit_s: float = 120.0
    """No request begins later."""


async def ask_all(target: BreakdownTarget, streams: int, load: BreakdownLoad) -> BreakdownLevel:
    """One level. Raises TimeoutError when requests that began in time do not end in as long again."""
    connections = [Stream(target.port, target.host) for _ in range(streams)]
    asker = _Asker(target, load, BreakdownLevel(streams))
    try:
        async with asyncio.timeout(2 * load.limit_s):
            if load.together:
                await asyncio.gather(*(asker.warm_up(stream, load.tokens) for stream in connections))
                await asyncio.gather(*(asker.run(stream) for stream in connections))
            else:
                spread = [max(1, load.tokens * (number + 1) // streams) for number in range(streams)]
                await asyncio.gather(*(asker.run(*each) for each in zip(connections, spread, strict=True)))
    except TimeoutError:
        raise TimeoutError(f"c={streams}: there are requests without an end after {2 * load.limit_s:g} s") from None
    finally:
        for stream in connections:
            stream.close()
    return asker.level


class _Asker:
    """All streams of one level."""

    def __init__(self, target: BreakdownTarget, load: BreakdownLoad, level: BreakdownLevel) -> None:
        self.level = level
        self._target, self._load = target, load
        self._numbers = itertools.count()
        self._until = time.monotonic() + load.limit_s
        self._began = 0.0

    async def warm_up(self, stream: Stream, tokens: int) -> None:
        """What fails here fails later too, and is counted there."""
        with contextlib.suppress(OSError):
            await stream.ask(self._request(tokens), tokens)

    async def run(self, stream: Stream, warm_up_tokens: int = 0) -> None:
        if warm_up_tokens:
            await self.warm_up(stream, warm_up_tokens)
        self._began = self._began or time.monotonic()
        for _ in range(self._load.requests):
            if time.monotonic() > self._until:
                break
            try:
                _note(await stream.ask(self._request(self._load.tokens), self._load.tokens), self.level)
            except OSError as error:
                self.level.wrong[f"no connection: {error}"] += 1
                await asyncio.sleep(0.1)
        self.level.seconds = time.monotonic() - self._began

    def _request(self, tokens: int) -> bytes:
        prompt = f"Tell me about water, please: question {next(self._numbers)}."
        return _request(self._target, prompt, tokens, whole=self._load.whole)


def _request(target: BreakdownTarget, prompt: str, tokens: int, *, whole: bool) -> bytes:
    messages = [{"role": "user", "content": prompt}]
    body = {"model": target.model, "messages": messages, "max_tokens": tokens, "stream": not whole}
    return request("POST", "/v1/chat/completions", body, target.headers, f"{target.host}:{target.port}")


def _note(answer: Answer, level: BreakdownLevel) -> None:
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
        level.asked.append(AskedWhole(job[1].decode(), 1e3 * (answer.arrivals[-1][0] - answer.sent)))


def timings(target: BreakdownTarget, asked: list[AskedWhole], most: int) -> list[tuple[AskedWhole, dict[str, Any]]]:
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
