"""Writers of streamed answers: the constant bytes, each token's way to the socket, and slow or gone readers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any, Protocol, TypeAlias, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Message, Scope, Send

from api.openai.rendering import encode_json, on_one_line
from api.openai.responses.events import EventSequence
from api.stream.connection import CHUNK, Connection
from penstock.loops import Sliced
from streaming.jobs.codec import Delta

PING = b": ping\n"
"""An SSE comment. It ends with one newline only: a blank line would dispatch an event, on which some clients crash."""

STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


def stream_url(job_id: str) -> dict[str, str]:
    """Return the header of a streamed answer that says where anybody with its caller's key can read and resume it."""
    return {"Stream-Url": f"/v1/jobs/{job_id}/stream"}


def served_by_header(models: Iterable[str]) -> dict[str, str]:
    """Return the header of an answer that names the models that gave its choices, in their order."""
    return {"X-Served-By": ", ".join(dict.fromkeys(models))}


def start_message(status: int, headers: dict[str, str]) -> Message:
    return {"type": "http.response.start", "status": status, "headers": raw_headers(headers)}


def raw_headers(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    """Encode headers as ASGI has them."""
    return [(_raw_name(name), value.encode("latin-1")) for name, value in headers.items()]


@lru_cache(maxsize=256)
def _raw_name(name: str) -> bytes:
    return name.lower().encode()


RAW_STREAM_HEADERS = raw_headers(STREAM_HEADERS)


def body_message(data: bytes, *, more: bool) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}


MAX_SEND_TIMEOUT_FACTOR = 1.2
"""A stalled reader is disconnected up to this factor later than its timeout, at random: readers that stalled together
are then not all disconnected in one iteration of the event loop, which would delay every other stream."""


class ClientGone(Exception):
    """Raised inside an answer when its client has disconnected."""


class PacedWriter:
    """Writer of one answer. `stalled`: the reader took no byte for too long and is disconnected."""

    def __init__(self, send: Send, connection: Connection, timeout_s: float) -> None:
        self._send, self._connection, self._timeout_s = send, connection, timeout_s
        self.stalled = False

    async def write(self, data: bytes, *, more: bool) -> None:
        """Write once the reader takes it. Raises ClientGone."""
        task = asyncio.current_task()
        timeout_s = self._timeout_s * random.uniform(1.0, MAX_SEND_TIMEOUT_FACTOR)  # noqa: S311 - jitter
        timer = asyncio.get_running_loop().call_later(timeout_s, self._on_stalled, task)
        try:
            await self._send(body_message(data, more=more))
        except asyncio.CancelledError:
            if not self.stalled:
                raise
            self.cut_off()
            raise ClientGone from None
        finally:
            timer.cancel()

    def cut_off(self) -> None:
        """Disconnect the reader in the middle of the answer, so that it cannot take what it has for the whole."""
        self._connection.cut_off()

    def _on_stalled(self, task: asyncio.Task[object] | None) -> None:
        self.stalled = True
        if task is not None:
            task.cancel()


T = TypeVar("T")


class Watched:
    """Context manager that calls `on_lost` when the client disconnects, or has done so before.

    The request's body must have been read, or be of no interest.
    """

    __slots__ = ("_connection", "_on_lost", "lost")

    def __init__(self, scope: Scope, on_lost: Callable[[], None] | None = None) -> None:
        self._connection: Connection = scope["state"]["connection"]
        self._on_lost = on_lost
        self.lost = False
        """The client has disconnected."""

    def __enter__(self) -> Watched:
        self._connection.watch(self._set_lost)
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.watch(None)

    def check(self) -> None:
        """Raise ClientDisconnect if the client has disconnected."""
        if self.lost:
            raise ClientDisconnect

    def while_there(self, work: Sliced[T]) -> Sliced[T]:
        """Run sliced work, and abort it when the client disconnects. Raises ClientDisconnect."""
        while True:
            self.check()
            try:
                next(work)
            except StopIteration as done:
                value: T = done.value
                return value
            yield

    def _set_lost(self) -> None:
        self.lost = True
        if self._on_lost is not None:
            self._on_lost()


Renderer: TypeAlias = Callable[[Delta], bytes]


class TokenTimes(Protocol):
    """Takes the times between tokens."""

    def observe_equal(self, total: float, n: int) -> None:
        """Add `n` equal times of `total` seconds together."""
        ...


MAX_HELD = 64
"""Rendered deltas that a flow holds until the next flush: a read after a stall may bring thousands."""


class TokenFlow:
    """Token writer of a stream with one choice and without log-probabilities, after its first token.

    With many streams, the memory that a token touches has left the CPU cache since the stream's previous token, and
    loading it costs as much as the work. So this state is one small object; the Reply handles everything rare.
    """

    __slots__ = (
        *("_after", "_before", "_held", "_render", "_tokens"),
        *("_transport", "histogram", "last", "paused", "unwritten"),
    )

    def __init__(self, histogram: TokenTimes) -> None:
        self.histogram = histogram
        self.last = 0.0
        """Monotonic time of the last tokens; 0: none yet."""
        self.unwritten = b""
        """Rendered bytes that could not be written."""
        self.paused = False
        """The connection's write buffer is full."""
        self._held: list[bytes] = []
        """What the next `flush` writes."""
        self._tokens = 0
        """Taken since the last flush."""

    def start(self, connection: Connection, before: bytes, after: bytes, render: Renderer | None = None) -> None:
        """Start writing to a connection; `before` and `after` are the constant JSON around each delta's text, and
        `render` renders a delta that has extras; None: there are none."""
        self._render = render
        self._transport: asyncio.Transport = connection.transport
        self._before, self._after = before, after
        self.paused = connection.carry(self)

    def write(self, row: Delta) -> bool:
        """Take a delta; called for every token. False: it is in `unwritten`, with what was taken since the last
        flush."""
        self._tokens += row.n or 1
        if row.extras and self._render is not None:
            self._held.append(self._render(row))
        elif content := row.text:
            text = encode_json(content)
            if not text.isascii():
                text = on_one_line(text)
            self._held.append(self._before + text + self._after)
        return (not self.paused and len(self._held) <= MAX_HELD) or self._set_aside()

    def _set_aside(self) -> bool:
        """Move what is held to `unwritten`. Returns True if nothing was held."""
        self.unwritten = b"".join(self._held)
        self._held.clear()
        return not self.unwritten

    def take(self, now: float) -> bytes:
        """Return what is held, which is no longer held then, and measure its tokens."""
        if not self._tokens:
            return b""
        self.histogram.observe_equal(now - self.last, self._tokens)  # as `inter_token_latency` has it
        self.last, self._tokens = now, 0
        data = b"".join(self._held)
        self._held.clear()
        return data

    def flush(self, now: float) -> None:
        """Write what was taken; called after every read that brought a token."""
        data = self.take(now)
        if data and not self._transport.is_closing():  # drop tokens of a disconnected client
            self._transport.write(CHUNK % (len(data), data))


class NumberedFlow(TokenFlow):
    """TokenFlow of a response, whose events are numbered and whose text its last events repeat."""

    __slots__ = ("_sequence",)

    def __init__(self, histogram: TokenTimes, sequence: EventSequence) -> None:
        super().__init__(histogram)
        self._sequence = sequence

    def write(self, row: Delta) -> bool:
        """`_after` has %d where the number of the event goes."""
        self._tokens += row.n or 1
        if row.extras:
            self._held.append(self._sequence.delta(row))
        elif content := row.text:
            text = encode_json(content)
            if not text.isascii():
                text = on_one_line(text)
            sequence = self._sequence
            number = sequence.number
            sequence.number = number + 1
            sequence.pieces.append(content)
            self._held.append(self._before + text + self._after % number)
        return (not self.paused and len(self._held) <= MAX_HELD) or self._set_aside()
