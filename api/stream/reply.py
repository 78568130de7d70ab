"""Replies: the token stream (server-sent events) and the whole answer of a job; and the writers of streams, with each
token's way to the socket, and slow or gone readers.

A reply watches for a client disconnect, and then applies the request's on_disconnect. A stream sends its status with
its first bytes, so an error before them keeps its HTTP status; a started stream always ends with a terminal frame.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, TypeAlias, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

from api.admission import Admitted
from api.anthropic.answer import MessageEvents
from api.anthropic.errors import body_of
from api.auth.answers import is_key_ended
from api.openai import errors
from api.openai.errors import ApiError
from api.openai.rendering import ChunkRenderer, encode_json, error_event, on_one_line, to_json
from api.openai.responses.object import EventSequence
from api.openai.results import answer_in_slices
from api.services import Services
from api.stream.connection import CHUNK, Connection
from penstock.loops import Sliced
from streaming.errors import StreamingError, UnknownJob
from streaming.jobs.codec import Delta, Terminal
from streaming.jobs.job import CancelledBy, JobState, operation_of
from streaming.jobs.records import Delivered
from streaming.jobs.relay import Flow
from telemetry.latency import EGRESS_FIRST, OF_ANSWER, PARTS, end_to_end, inter_token_latency, time_to_first_token
from telemetry.metrics import BufferedHistogram
from telemetry.records.schema import DeliveryRecord
from telemetry.tracing import FIRST_SENT, current

log = logging.getLogger(__name__)

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
        self._written_s = 0.0
        self._stall_timer: asyncio.TimerHandle | None = None
        """Runs while a write waits for the reader, or a ping found that it is behind."""

    async def write_events(
        self,
        events: AsyncGenerator[bytes, None],
        keep_alive_s: float,
        ping: bytes = PING,
        on_written: Callable[[], None] = lambda: None,
    ) -> None:
        """Write events, to the end of the stream, and `ping` after each `keep_alive_s` without any. Raises
        ClientGone."""
        task = asyncio.current_task()
        assert task is not None
        client = Watched(self._connection, task.cancel)
        self._written_s = time.monotonic()
        self._ping_if_idle(task, keep_alive_s, ping)
        try:
            with client:
                async with aclosing(events):
                    async for data in events:
                        if data:
                            await self.write(data, more=True)
                        on_written()
                        if client.lost:
                            await asyncio.sleep(0)  # takes the cancellation also where nothing else waits
                await self.write(b"", more=False)
                await asyncio.sleep(0)  # likewise
        except asyncio.CancelledError:
            if self.stalled:
                self.cut_off()
            elif not client.lost:
                raise
            raise ClientGone from None
        finally:
            self._ping_timer.cancel()
            self._stop_stall_timer()

    def _ping_if_idle(self, task: asyncio.Task[object], keep_alive_s: float, ping: bytes) -> None:
        idle_s = time.monotonic() - self._written_s
        if idle_s >= keep_alive_s:
            if self._connection.write_chunk(ping):
                self._stop_stall_timer()
            elif self._stall_timer is None:  # nothing else may be written for as long as the job is silent
                self._start_stall_timer(task)
            self._written_s, idle_s = time.monotonic(), 0.0
        loop = asyncio.get_running_loop()
        self._ping_timer = loop.call_later(keep_alive_s - idle_s, self._ping_if_idle, task, keep_alive_s, ping)

    def _start_stall_timer(self, task: asyncio.Task[object] | None) -> None:
        self._stop_stall_timer()
        timeout_s = self._timeout_s * random.uniform(1.0, MAX_SEND_TIMEOUT_FACTOR)  # noqa: S311 - jitter
        self._stall_timer = asyncio.get_running_loop().call_later(timeout_s, self._on_stalled, task)

    def _stop_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    async def write(self, data: bytes, *, more: bool) -> None:
        """Write once the reader takes it. Raises ClientGone."""
        self._start_stall_timer(asyncio.current_task())
        try:
            await self._send(body_message(data, more=more))
            self._written_s = time.monotonic()
        except asyncio.CancelledError:
            if not self.stalled:
                raise
            self.cut_off()
            raise ClientGone from None
        finally:
            self._stop_stall_timer()

    def cut_off(self) -> None:
        """Disconnect the reader in the middle of the answer, so that it cannot take what it has for the whole."""
        self._connection.cut_off()

    def _on_stalled(self, task: asyncio.Task[object] | None) -> None:
        self._stall_timer = None
        if not self._connection.behind:  # it has read meanwhile what made a ping wait
            return
        self.stalled = True
        if task is not None:
            task.cancel()


T = TypeVar("T")


class Watched:
    """Context manager that calls `on_lost` when the client disconnects, or has done so before.

    The request's body must have been read, or be of no interest.
    """

    __slots__ = ("_connection", "_on_lost", "lost")

    def __init__(self, connection: Connection, on_lost: Callable[[], object] | None = None) -> None:
        self._connection = connection
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

    def __init__(self, histogram: BufferedHistogram) -> None:
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

    def __init__(self, histogram: BufferedHistogram, sequence: EventSequence | MessageEvents) -> None:
        super().__init__(histogram)
        self._sequence = sequence

    def write(self, row: Delta) -> bool:
        """`_after` has %d where the number of the event goes."""
        self._tokens += row.n or 1
        if row.extras:
            self._held.append(self._sequence.delta(row))
            if (around := self._sequence.plain) is None:  # another item has begun
                return self._set_aside()
            self._before, self._after = around
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


# --- replies ----------------------------------------------------------------------------------------------------------


KEYED_GRACE_S = 10.0
"""Time that a job goes on for the retry of a disconnected client that sent an idempotency key."""


class Reply:
    """ASGI response for one admitted job. Subclasses send the answer, whole or streamed."""

    _writer: PacedWriter | None = None

    def __init__(self, services: Services, admitted: Admitted) -> None:
        self._services, self._admitted = services, admitted
        self._buffer = admitted.buffer
        self._job = admitted.job
        self._facts = services.facts(self._job, admitted.created_ms)
        self._received = 0.0
        self._delivery = Delivery()
        self._metrics = services.metrics.answers(operation_of(self._job), self._job.model)
        self._flow = TokenFlow(self._metrics.per_token)
        self._request_id = ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer; if the client disconnects, apply its on_disconnect policy to the job."""
        self._request_id, self._received = scope["state"]["request_id"], scope["state"]["received"]
        self._scope = scope
        try:
            with Watched(scope["state"]["connection"], self._buffer.hang_up):
                await self._answer(send, scope["state"])
        except ClientGone:
            await self._disconnected()
        except asyncio.CancelledError as error:
            if is_key_ended(error):  # as if its client had left
                await self._disconnected()
            if "status" in scope["state"]:
                raise
            # Else drain_s is over; no client has left, so the job goes on.
            cut_off = errors.wait_cut_off(self._job, repeatable=self._admitted.keyed)
            await self._send_error(send, errors.key_ended() if is_key_ended(error) else cut_off)
        finally:
            self._services.relay.close(self._buffer)
            self._measure_end()

    async def _answer(self, send: Send, state: dict[str, Any]) -> None:
        raise AssertionError("a subclass implements this")

    async def _send_error(self, send: Send, error: ApiError) -> None:
        """Send a complete error answer, in the form of the API that its client speaks."""
        body = body_of(error, self._services.metrics.count_error, self._scope)
        await self._send(send, error.status, body, error.headers)

    async def _send(self, send: Send, status: int, body: bytes, headers: dict[str, str]) -> None:
        """Send a complete answer of JSON."""
        lengths = {"content-type": "application/json", "content-length": str(len(body))}
        await send(start_message(status, lengths | self._admitted.headers | headers))
        await send(body_message(body, more=False))

    def _check(self) -> None:
        """Raise what ends an answer before its job's end: lost history or a disconnect."""
        if self._buffer.rewound:
            self._services.metrics.stream_resets.inc()
            error = errors.resume_impossible if self._job.constrained else errors.stream_reset
            raise error(self._job)
        if self._buffer.hung_up:
            raise ClientGone

    def _measure(self, rows: Sequence[Delta]) -> None:
        now = time.monotonic()
        if not self._flow.last:
            self._delivery.first_got = now
            self._metrics.first_token.observe(time_to_first_token(self._received, now))
        else:
            tokens = sum([row.n for row in rows])
            self._metrics.per_token.observe(inter_token_latency(self._flow.last, now, tokens), tokens or 1)
        self._flow.last = now

    def _measure_end(self) -> None:
        metrics, terminal = self._metrics, self._buffer.terminal
        metrics.duration.observe(end_to_end(self._received, time.monotonic()))
        self._delivery.note(self._services, self._admitted, terminal)
        if terminal is not None:
            self._services.waits.completions.ended(self._job.model)
            metrics.input.observe(terminal.usage.prompt)
            metrics.output.observe(terminal.usage.completion)

    async def _disconnected(self) -> None:
        """Apply on_disconnect: let the job go on, or cancel it, at once or after a grace period, if nobody reads it."""
        policy = self._job.on_disconnect
        fields = {"job": self._buffer.job_id, "on_disconnect": policy}
        stalled = self._writer is not None and self._writer.stalled
        if stalled:
            log.warning("a reader took nothing for too long and is cut off", extra=fields)
        else:
            log.info("client left", extra=fields)
        if policy == "continue":
            return
        grace_s = float(policy.removeprefix("grace:")) if policy.startswith("grace:") else 0.0
        if self._admitted.keyed and not self._admitted.request.queue.on_disconnect:
            grace_s = KEYED_GRACE_S
        by = CancelledBy.SLOW_READER if stalled else CancelledBy.READER
        if grace_s:
            self._services.spawn(self._cancel_unread(by, grace_s))
        else:
            await self._cancel_unread(by)

    async def _cancel_unread(self, by: CancelledBy, after_s: float = 0.0) -> None:
        """Cancel the job unless a client of this process or of another one reads it. Never raises: if Redis is down,
        the worker finishes the job and the result is kept."""
        await asyncio.sleep(after_s)
        job_id, relay = self._buffer.job_id, self._services.relay
        relay.close(self._buffer)
        if relay.listening(job_id):
            return
        try:
            await self._services.queue.abandon(job_id, relay.address, by)
        except UnknownJob:
            pass  # it ended and its retention passed
        except StreamingError as error:
            log.warning("could not cancel a job whose client left: %s", error, extra={"job": job_id})


class StreamReply(Reply):
    """Streams tokens as server-sent events.

    The relay's callback writes the stream, its head included: no task wakes up, and each frame costs one write. The
    response's own task ends the stream, and takes over while the connection is congested, so that a slow reader delays
    no other stream.
    """

    ping: ClassVar[bytes] = PING
    """What is written while the job is silent."""
    _renderer: ChunkRenderer | EventSequence | MessageEvents
    """Gets every delta in order, those in the terminal message too, and then that message."""
    _writer: PacedWriter
    _connection: Connection
    _state: dict[str, Any]
    """`scope["state"]` of the request."""
    _started = False
    """The head is written, or held until the first bytes come."""
    _early_failure: Terminal | None = None
    """The end of a job that failed before the stream started."""
    _unwritten = b""
    """Rendered bytes that the response's own task must write: the connection was congested, or they end the stream."""
    _finished = False
    """The end of the stream is rendered."""
    _pinged_s = 0.0
    """Monotonic time from which the silence before the next ping counts."""
    _ping_timer: asyncio.TimerHandle | None = None

    async def _answer(self, send: Send, state: dict[str, Any]) -> None:
        self._renderer = self._new_renderer()
        self._state, self._connection = state, state["connection"]
        # The server's own send: the body bypasses the middleware.
        self._writer = PacedWriter(state["server_send"], self._connection, self._services.settings.send_timeout_s)
        metrics = self._services.metrics.open_streams
        metrics.inc()
        try:
            await self._stream(send)
        except (ClientGone, OSError):
            raise ClientGone from None
        except ApiError as error:
            if not self._started:
                raise
            await self._fail(send, error)
        except BaseException as error:
            # Shutdown or a bug: send an error frame before a started stream ends.
            if self._started:
                fault = errors.internal_error(self._request_id)
                if isinstance(error, asyncio.CancelledError):
                    fault = errors.key_ended() if is_key_ended(error) else errors.draining()
                await self._break_off(send, fault)
            raise
        finally:
            metrics.dec()

    def _new_renderer(self) -> ChunkRenderer | EventSequence | MessageEvents:
        return ChunkRenderer(self._facts, include_usage=self._admitted.request.include_usage)

    def _start(self, rows: Sequence[Delta] = ()) -> None:
        """Begin the stream with its head, which names the models that gave the choices of its first rows."""
        headers = self._admitted.headers | stream_url(self._admitted.accepted.id)
        if rows:
            begun = {row.index: row.served_by or self._job.full_model for row in reversed(rows)}
            headers |= served_by_header([begun[index] for index in sorted(begun)])
        self._connection.begin_stream(self._state["head_of"]([*RAW_STREAM_HEADERS, *raw_headers(headers)]))
        self._state["status"] = 200
        self._started = True

    async def _fail(self, send: Send, error: ApiError) -> None:
        """End a started stream that cannot go on."""
        await send(body_message(self._error_event(error), more=False))

    def _error_event(self, error: ApiError) -> bytes:
        return error_event(error, self._services.metrics.count_error)

    async def _break_off(self, send: Send, error: ApiError) -> None:
        """End a started stream whose job goes on, because this process ends or has a bug."""
        await self._fail(send, error)

    async def _stream(self, send: Send) -> None:
        """Let the relay write until the connection congests, then write the unwritten bytes at the reader's pace."""
        keep_alive_s = self._services.settings.keep_alive_s
        expected = self._admitted.wait
        # How long the first token may take before head and ping. If the job will not have started by then, the client
        # gets the headers with its ETA at once.
        at_once = not self._started and expected is not None and expected.eta_ms >= 1000 * keep_alive_s
        wait_s = 0.0 if at_once else keep_alive_s
        # Dated so that the first check, after wait_s, finds keep_alive_s of silence.
        self._pinged_s = time.monotonic() + wait_s - keep_alive_s
        self._ping_timer = asyncio.get_running_loop().call_later(wait_s, self._ping_if_idle)
        try:
            while True:
                if self._unwritten:
                    await self._write_unwritten()
                if self._finished:
                    self._delivery.last_sent = time.monotonic()
                    return
                await self._buffer.attach_sink(self._write_rows, self._direct())
                self._unwritten, self._flow.unwritten = self._unwritten or self._flow.unwritten, b""
                if self._early_failure is not None:
                    self._delivery.last_got = time.monotonic()
                    await self._send_error(send, errors.from_terminal(self._early_failure))
                    self._delivery.last_sent = time.monotonic()
                    return
                if not self._finished:
                    self._check()
        finally:
            self._ping_timer.cancel()
            self._connection.carry(None)

    async def _write_unwritten(self) -> None:
        data, self._unwritten = self._unwritten, b""
        write = self._connection.end_stream if self._finished else self._connection.write_chunk
        if not write(data):
            await self._writer.write(data, more=not self._finished)
        self._note_first_sent()

    def _note_first_sent(self) -> None:
        if self._flow.last:
            self._delivery.note_first_sent()

    def _direct(self) -> Flow | None:
        """Return the fast path of single deltas, once the first one is rendered; None if this stream has none."""
        around = self._renderer.plain if self._flow.last and self._connection.framed else None
        if around is None:
            return None
        self._flow.start(self._connection, *around, self._renderer.delta)
        return self._flow

    def _ping_if_idle(self) -> None:
        """Send a ping when the stream was idle for keep_alive_s, and schedule the next check; not once all is rendered,
        however long its reader takes."""
        if self._finished or self._early_failure is not None:
            return
        now, keep_alive_s = time.monotonic(), self._services.settings.keep_alive_s
        # `last` is 0 before the first token. `_pinged_s` may be negative: a machine's clock starts at 0.
        idle_s = now - max(self._flow.last or -math.inf, self._pinged_s)
        if idle_s >= keep_alive_s:
            try:
                if not self._started:
                    self._start()
            except ValueError as error:  # a header that cannot be sent
                self._buffer.stop(error)
                return
            self._connection.write_chunk(self.ping)
            self._pinged_s, idle_s = now, 0.0
        self._ping_timer = asyncio.get_running_loop().call_later(
            keep_alive_s - min(idle_s, keep_alive_s), self._ping_if_idle
        )

    def _write_rows(self, rows: list[Delta], terminal: Terminal | None) -> bool:
        """Write rows that the fast path (TokenFlow) does not handle, behind those that it holds; the relay calls this.
        The first ones start the stream. Returns False to detach."""
        if not self._started and not rows and terminal is not None and terminal.state is not JobState.COMPLETED:
            self._early_failure = terminal
            return False
        data = self._render(rows, terminal)  # it may fail: then the flow writes what it holds
        data = self._flow.take(time.monotonic()) + data
        first = rows and not self._flow.last
        if rows:
            self._measure(rows)
        if not self._started:
            self._start(rows)
            data = data or self.ping
        if data and (self._finished or not self._connection.write_chunk(data)):
            self._unwritten = data
            return False
        if first:
            self._delivery.note_first_sent()
            self._buffer.direct = self._direct()
        return True

    def _render(self, rows: list[Delta], terminal: Terminal | None) -> bytes:
        delta = self._renderer.delta
        data = delta(rows[0]) if len(rows) == 1 else b"".join([delta(row) for row in rows])
        if terminal is not None:
            self._finished = True
            self._delivery.last_got = time.monotonic()
            try:
                data += self._renderer.end(terminal)
            except ApiError as error:
                data += self._error_event(error)
        return data


class NumberedReply(StreamReply):
    """Streams events that a reader can resume after."""

    async def _break_off(self, send: Send, error: ApiError) -> None:
        """Break the connection: the job goes on, so no event that ends a stream would be true. The client sees a broken
        answer and can resume after its last event."""
        self._services.metrics.count_error(error.code)
        self._writer.cut_off()


class WholeReply(Reply):
    """Sends the answer in one piece."""

    async def _answer(self, send: Send, state: dict[str, Any]) -> None:
        deadline = time.monotonic() + self._services.settings.wait_s
        rows: list[Delta] = []
        terminal: Terminal | None = None
        while terminal is None:
            left = deadline - time.monotonic()
            if left <= 0:
                timeout = errors.wait_timeout(self._job, self._services.settings.wait_s)
                await self._send_error(send, timeout)
                return
            taken, terminal = await self._buffer.take(left)
            if taken and not self._buffer.rewound:
                self._measure(taken)
            if terminal is None or self._buffer.rewound:
                self._check()
            rows += taken
        self._delivery.last_got = time.monotonic()
        try:
            body = await self._whole(terminal, rows)
        except ApiError as error:
            await self._send_error(send, error)
        else:
            await self._send(send, 200, body, served_by_header(terminal.served_by or [self._job.full_model]))
        self._delivery.last_sent = time.monotonic()

    async def _whole(self, terminal: Terminal, rows: list[Delta]) -> bytes:
        """Render the answer. Raises ApiError for a job that did not complete."""
        work = answer_in_slices(self._facts, terminal, rows)
        return to_json(await self._services.store_client.turns.run(work, len(rows)))


# --- what is recorded of a delivery -----------------------------------------------------------------------------------


@dataclass(slots=True)
class Delivery:
    """The four timestamps of one reply, in monotonic seconds; `note` adds them to the job's timing."""

    first_got: float = 0.0
    first_sent: float = 0.0
    """When the first token arrived, and when it was written to the connection."""
    last_got: float = 0.0
    last_sent: float = 0.0
    """Likewise, the job's end and the end of the answer."""

    def note_first_sent(self) -> None:
        self.first_sent = self.first_sent or time.monotonic()

    def note(self, services: Services, admitted: Admitted, end: Terminal | None) -> None:
        """Record the timestamps, for the job's timing, in its trace, in the metrics and on the local disk, unless
        another request created the job (same idempotency key). `end`: of the job, if this process has it."""
        if admitted.accepted.joined or not (self.first_got or self.last_got):
            return
        whole = not admitted.job.stream
        first = (0.0, 0.0) if whole else (self.first_got, self.first_sent)
        times = services.clock.times((*first, self.last_got, self.last_sent), admitted.partition)
        clock_us = services.clock.error_us(admitted.partition)
        delivered = Delivered(times[0], times[1], times[2], times[3], clock_us, whole)
        services.deliveries.note(admitted.job.id, delivered)
        named = {f"{name}_us": at for name, at in zip(OF_ANSWER, times, strict=True)}
        record = DeliveryRecord(id=admitted.job.id, by=services.name, **named, clock_us=clock_us, whole=whole)
        services.records.write(record)
        span = current()
        if span is not None and span.recorded and self.first_sent:
            span.add_event(FIRST_SENT, time.time_ns() - int((time.monotonic() - self.first_sent) * 1e9))
        if end is None or end.state is not JobState.COMPLETED:
            return
        # how long the answer was on its way from the engine to the client
        ways = ((PARTS[-1], end.last_ms, delivered.last_sent), (EGRESS_FIRST, end.first_ms, delivered.first_sent))
        for part, made_ms, sent_us in ways:
            if made_ms and sent_us:
                seconds = max(0, sent_us - 1000 * made_ms) / 1_000_000
                services.metrics.parts.labels(admitted.job.model, part.name).observe(seconds)
