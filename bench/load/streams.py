"""Connections that send requests and stamp what comes back; answers are parsed only after the measurement.

The text of an answer proves itself: token i is a word that ends in i, so a lost, doubled or misplaced one is seen.
"""

from __future__ import annotations

import asyncio
import socket
import string
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from httptools import HttpParserError, HttpResponseParser

from bench.http import HOST, request

HEAD_END = b"\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"

Arrival = tuple[float, bytes]
"""When (seconds of the monotonic clock) and what."""


@dataclass(slots=True)
class StreamedAnswer:
    """One request and everything that followed it."""

    tokens: int
    """Asked for."""
    sent: float
    arrivals: list[Arrival] = field(default_factory=list)
    fault: str = ""
    """Why it ended before its end."""


@dataclass(frozen=True, slots=True)
class Heard:
    """An answer as its reader lived it. `chunks`: when each came, and how many tokens it brought."""

    sent: float
    chunks: Sequence[tuple[float, int]]
    ended: float
    wrong: str = ""
    """What was wrong with it; "" if every token came, once and in order."""

    @property
    def tokens(self) -> int:
        return sum(tokens for _, tokens in self.chunks)


class Framing:
    """Finds where an answer ends, as cheaply as it can be done: this alone runs while time counts."""

    def __init__(self) -> None:
        self._head = b""
        self._left: int | None = None
        """Bytes still to come, where the head says it; below 0: the answer is chunked."""
        self._tail = b""

    def ends_with(self, data: bytes) -> bool:
        """Whether these bytes are the answer's last."""
        if self._left is None:
            self._head += data
            head, found, data = self._head.partition(HEAD_END)
            if not found:
                return False
            self._left = _length(head)
        if self._left < 0:
            self._tail = (self._tail + data)[-len(LAST_CHUNK) :]
            return self._tail == LAST_CHUNK
        self._left -= len(data)
        return self._left <= 0


def _length(head: bytes) -> int:
    """Content-Length; -1 for a chunked answer. One that ends with its connection counts as endless."""
    lines = head.lower().split(b"\r\n")
    for line in lines:
        name, _, value = line.partition(b":")
        if name == b"content-length":
            return int(value)
        if name == b"transfer-encoding":
            return -1
    return 1 << 62


class BodyParser:
    """Takes an answer apart: status, and the body without HTTP's chunks."""

    def __init__(self) -> None:
        self.status = 0
        self._parts: list[bytes] = []
        self._parser = HttpResponseParser(self)

    def feed(self, data: bytes) -> bytes:
        """What of the body these bytes bring. Raises HttpParserError."""
        self._parts.clear()
        self._parser.feed_data(data)
        self.status = self._parser.get_status_code()
        return b"".join(self._parts)

    def on_body(self, data: bytes) -> None:
        """Called by the parser."""
        self._parts.append(data)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamLine:
    """What one line of a stream says: text, counts of tokens of the answer and of what was computed of the prompt, an
    error."""

    text: str = ""
    tokens: int = 0
    prompt: int = 0
    fault: str = ""
    done: bool = False


def lines_of(answer: StreamedAnswer) -> Iterator[tuple[float, StreamLine]]:
    """Each line of an answer's stream and when it came; an answer that is no stream has one, which says so."""
    body, rest = BodyParser(), b""
    for at, data in answer.arrivals:
        try:
            *lines, rest = (rest + body.feed(data)).split(b"\n")
            for line in lines:
                yield at, _line(line)
        except (ValueError, KeyError, TypeError, AttributeError, HttpParserError) as error:
            yield at, StreamLine(fault=f"unreadable: {error!r}")
            return
    if body.status not in (0, 200):
        yield at, StreamLine(fault=f"status {body.status}: {rest[:200].decode(errors='replace')}")


def _line(line: bytes) -> StreamLine:
    data = line.removeprefix(b"data:").strip()
    if not line.startswith(b"data:") or data == b"[DONE]":
        return StreamLine(done=data == b"[DONE]")
    chunk: dict[str, Any] = msgspec.json.decode(data)
    if error := chunk.get("error"):
        return StreamLine(fault=f"error in the stream: {msgspec.json.encode(error).decode()[:200]}")
    usage = chunk.get("usage") or {}
    text = ""
    for choice in chunk.get("choices") or ():
        delta = choice.get("delta") or {}
        text += delta.get("content") or delta.get("reasoning_content") or choice.get("text") or ""
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    computed = int(usage.get("prompt_tokens") or 0) - int(cached)
    return StreamLine(text=text, tokens=int(usage.get("completion_tokens") or 0), prompt=computed)


def hear(answer: StreamedAnswer) -> Heard:
    """Read an answer of the simulated engine."""
    text, chunks, wrong, done = "", list[tuple[float, int]](), answer.fault, False
    for at, line in lines_of(answer):
        wrong, done = wrong or line.fault, done or line.done
        if line.fault:
            break
        if line.text:
            goes_on = bool(text) and not text[-1].isspace() and not line.text[0].isspace()
            if begun := len(line.text.split()) - goes_on:
                chunks.append((at, begun))
            text += line.text
    ended = answer.arrivals[-1][0] if answer.arrivals else answer.sent
    wrong = wrong or misplaced(text.split(), answer.tokens) or ("" if done else "no [DONE]")
    return Heard(answer.sent, chunks, ended, wrong)


def misplaced(words: Sequence[str], tokens: int) -> str:
    """The first word that is not the token that belongs there, or how many tokens there are instead of `tokens`."""
    wrong = next((i for i, word in enumerate(words) if word.lstrip(string.ascii_letters) != str(i)), None)
    if wrong is not None:
        return f"{words[wrong]!r} where token {wrong} belongs"
    return "" if len(words) == tokens else f"{len(words)} tokens instead of {tokens}"


CUT_OFF = "cut off"
"""Begins the fault of an answer whose connection was lost."""

QUICKACK = getattr(socket, "TCP_QUICKACK", None)
"""Only Linux has it. Without it a server that leaves Nagle's algorithm on seems to stall for 40 ms."""


class Stream(asyncio.Protocol):
    """One connection; `ask` one thing at a time. It connects again if the server has closed it."""

    def __init__(self, port: int, host: str = HOST) -> None:
        self._host, self._port = host, port
        self._socket: socket.socket | None = None
        self._transport: asyncio.Transport | None = None
        self._answer: StreamedAnswer | None = None
        self._framing = Framing()
        self._ended: asyncio.Future[None] | None = None

    async def connect(self) -> None:
        """Raises OSError."""
        loop = asyncio.get_running_loop()
        sock = socket.socket()
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await loop.sock_connect(sock, (self._host, self._port))
            transport, _ = await loop.create_connection(lambda: self, sock=sock)
        except BaseException:
            sock.close()
            raise
        self._socket, self._transport = sock, transport
        self._acknowledge()

    async def ask(self, request: bytes, tokens: int) -> StreamedAnswer:
        """Send a request and keep what follows, until its end. Raises OSError where no connection can be made."""
        if self._transport is None:
            await self.connect()
        assert self._transport is not None
        self._framing, self._ended = Framing(), asyncio.get_running_loop().create_future()
        answer = self._answer = StreamedAnswer(tokens, time.monotonic())
        self._transport.write(request)
        await self._ended
        return answer

    def close(self, why: str = "") -> None:
        """At once; an answer that is under way ends here."""
        if self._answer is not None and why:
            self._answer.fault = self._answer.fault or why
        if self._transport is not None:
            self._transport.abort()

    # --- what the event loop tells ------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        self._acknowledge()
        if self._answer is not None:
            self._answer.arrivals.append((now, data))
            if self._framing.ends_with(data):
                self._finish()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._answer is not None:
            self._answer.fault = self._answer.fault or f"{CUT_OFF} ({exc or 'closed'})"
            self._finish()

    def _finish(self) -> None:
        self._answer = None
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    def _acknowledge(self) -> None:
        """The kernel forgets this with every segment, so it is said again."""
        if QUICKACK is not None and self._socket is not None:
            self._socket.setsockopt(socket.IPPROTO_TCP, QUICKACK, 1)


def chat(model: str, prompt: str, tokens: int) -> bytes:
    """A streamed chat request, ready to send."""
    messages = [{"role": "user", "content": prompt}]
    body = {"model": model, "messages": messages, "max_tokens": tokens, "stream": True}
    return request("POST", "/v1/chat/completions", body)
