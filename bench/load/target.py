"""A server with OpenAI's API, wherever it is, and closed loops of clients against it.

Nothing is parsed while time counts: bytes are stamped as they come and taken apart afterwards.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from bench.http import request
from bench.load.streams import CUT_OFF, Stream, StreamedAnswer, lines_of
from telemetry.latency import time_per_output_token, time_to_first_token

GET_TIMEOUT_S = 30.0
TIMEOUT, NO_CONNECTION = "not finished in time", "no connection"


class NotAServer(ValueError):
    """What was given as a base URL is none."""


@dataclass(frozen=True, slots=True)
class TargetServer:
    """`https://host[:port]/v1`, say. `key` goes as a bearer token."""

    name: str
    host: str
    port: int
    tls: bool
    path: str
    model: str
    key: str = field(default="", repr=False)

    @classmethod
    def at(cls, url: str, model: str, key: str = "", name: str = "") -> TargetServer:
        """Raises NotAServer."""
        try:
            parts = urlsplit(url)
            named = parts.port
        except ValueError as error:
            raise NotAServer(f"{url!r} is no base URL: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise NotAServer(f"{url!r} is no base URL; one looks like http://127.0.0.1:8000/v1")
        tls = parts.scheme == "https"
        port = named or (443 if tls else 80)
        return cls(name or f"{parts.hostname}:{port}", parts.hostname, port, tls, parts.path.rstrip("/"), model, key)

    def chat(self, messages: Sequence[dict[str, str]], tokens: int, **more: object) -> bytes:
        """A streamed chat request with `more` fields, ready to send."""
        body = {"model": self.model, "messages": messages, "max_tokens": tokens, **more}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        return request("POST", f"{self.path}/chat/completions", body, self.headers, self.host)

    @property
    def headers(self) -> dict[str, str]:
        """What every request to it says."""
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    def first_model(self) -> str:
        """The first name in its list of models. Raises NotAServer, OSError."""
        try:
            return str(self.get(f"{self.path}/models")["data"][0]["id"])
        except (LookupError, TypeError):
            where = f"{self.host}:{self.port}{self.path}/models"
            raise NotAServer(f"{where} is no list of models: name one with --model, or another base URL") from None

    def page(self, path: str) -> tuple[int, bytes]:
        """Status and body of an answer. Raises HTTPException, OSError."""
        kind = http.client.HTTPSConnection if self.tls else http.client.HTTPConnection
        connection = kind(self.host, self.port, timeout=GET_TIMEOUT_S)
        try:
            connection.request("GET", path, headers=self.headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def get(self, path: str) -> Any:
        """The JSON answer. Raises NotAServer, OSError."""
        try:
            status, body = self.page(path)
            if status != 200:
                raise NotAServer(f"GET {path} is answered with {status}: {body[:200].decode(errors='replace')}")
            return json.loads(body)
        except (http.client.HTTPException, json.JSONDecodeError, UnicodeDecodeError) as error:
            where = f"{self.host}:{self.port}{self.path}"
            raise NotAServer(f"{where} does not answer as a server with OpenAI's API: {str(error).strip()}") from error


class HttpConnection(Stream):
    """A connection to any host, with TLS where the URL says so."""

    def __init__(self, server: TargetServer) -> None:
        super().__init__(server.port)
        self._server = server

    async def connect(self) -> None:
        """Raises OSError."""
        server = self._server
        context = ssl.create_default_context() if server.tls else None
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_connection(lambda: self, server.host, server.port, ssl=context)
        self._transport = transport
        self._socket = None if server.tls else transport.get_extra_info("socket")
        self._acknowledge()

    async def ask(self, request: bytes, tokens: int) -> StreamedAnswer:
        """As `Stream.ask`. A kept connection that the server closes before it has sent a byte of the answer was closed
        before it had the request (llama-server closes after each stream): then it is sent again, on a new one."""
        is_kept = self._transport is not None
        answer = await super().ask(request, tokens)
        if is_kept and answer.fault.startswith(CUT_OFF) and not answer.arrivals:
            return await super().ask(request, tokens)
        return answer


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """One answer: when its pieces came, how many tokens they hold, and what was wrong with it ("" if nothing)."""

    sent: float
    times: Sequence[float]
    tokens: int
    fault: str = ""
    prompt: int = 0
    """Tokens of the prompt that were computed, as the server counts them; 0: it does not say."""

    @property
    def ttft(self) -> float:
        """Of an answer without fault."""
        return time_to_first_token(self.sent, self.times[0])

    @property
    def tpot(self) -> float | None:
        """Of an answer without fault."""
        return time_per_output_token(self.times[0], self.times[-1], self.tokens)


def seen(answer: StreamedAnswer) -> TimedAnswer:
    """Take an answer apart. Tokens are the server's own count where it gives one, else its pieces."""
    times, tokens, prompt, fault = list[float](), 0, 0, answer.fault
    for at, line in lines_of(answer):
        if line.text:
            times.append(at)
        tokens, prompt, fault = line.tokens or tokens, line.prompt or prompt, fault or line.fault
    fault = fault or ("" if times else "no token")
    return TimedAnswer(answer.sent, times, tokens or len(times), fault, prompt)


GIVEN_UP = 0.9
"""The share of unfinished requests from which the rest are not asked."""


@dataclass(slots=True)
class ConcurrencyLevel:
    """What was seen at one concurrency."""

    streams: int
    asked: int
    """Requests that belong to the level; some may not have been made."""
    answers: list[TimedAnswer]
    seconds: float


async def closed_loop(
    server: TargetServer, streams: int, requests: Sequence[bytes], timeout_s: float, done: Callable[[], None]
) -> ConcurrencyLevel:
    """Every stream asks again as soon as it is answered, until all requests are made, or until so many have failed that
    the rest would only take their time."""
    asked, left = len(requests), iter(requests)
    answers: list[StreamedAnswer] = []
    lost = 0

    async def stream() -> None:
        nonlocal lost
        line = HttpConnection(server)
        try:
            for request in left:
                answers.append(await ask(line, request, 0, timeout_s))
                done()
                if answers[-1].fault.startswith(NO_CONNECTION):
                    await asyncio.sleep(0.1)
                if answers[-1].fault:  # what its connection may still bring belongs to no later answer
                    lost += 1
                    line.close()
                    line = HttpConnection(server)
                if lost >= GIVEN_UP * asked:
                    return
        finally:
            line.close()

    began = time.monotonic()
    await asyncio.gather(*(stream() for _ in range(streams)))
    seconds = time.monotonic() - began
    return ConcurrencyLevel(streams, asked, [seen(answer) for answer in answers], seconds)


async def ask(line: HttpConnection, request: bytes, tokens: int, timeout_s: float) -> StreamedAnswer:
    """The answer, whatever becomes of it; its fault says why there is none."""
    begun = time.monotonic()
    try:
        async with asyncio.timeout(timeout_s):
            return await line.ask(request, tokens)
    except TimeoutError:
        return StreamedAnswer(tokens, begun, fault=TIMEOUT)
    except OSError as error:
        return StreamedAnswer(tokens, begun, fault=f"{NO_CONNECTION}: {error}")
