"""Completion responses: the token stream (server-sent events) and the whole answer of a job.

Both watch for a client disconnect, and then apply the request's on_disconnect. A stream sends its status with its first
bytes, so an error before them keeps its HTTP status; a started stream always ends with a terminal frame.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Sequence
from typing import Any

from starlette.types import Receive, Scope, Send

from api.admission import Admitted
from api.openai import errors
from api.openai.errors import ApiError
from api.openai.rendering import ChunkRenderer, error_body, error_event, to_json
from api.openai.responses.events import EventSequence
from api.openai.results import answer_in_slices
from api.services import Services
from api.stream import writer
from api.stream.connection import Connection
from streaming.errors import StreamingError, UnknownJob
from streaming.jobs.codec import Delta, Terminal
from streaming.jobs.job import CancelledBy, JobState, operation_of
from streaming.jobs.records import Delivered
from streaming.jobs.reorder_buffer import Flow
from telemetry.latency import EGRESS_FIRST, PARTS, end_to_end, inter_token_latency, time_to_first_token
from telemetry.metrics import Metrics
from telemetry.records.schema import DeliveryRecord
from telemetry.tracing import FIRST_SENT, current

log = logging.getLogger(__name__)

KEYED_GRACE_S = 10.0
"""Time that a job goes on for the retry of a disconnected client that sent an idempotency key."""


class Reply:
    """ASGI response for one admitted job. Subclasses send the answer, whole or streamed."""

    _writer: writer.PacedWriter | None = None

    def __init__(self, services: Services, admitted: Admitted) -> None:
        self._services, self._admitted = services, admitted
        self._buffer = admitted.buffer
        self._job = admitted.job
        self._facts = services.facts(self._job, admitted.created_ms)
        self._received = 0.0
        self._delivery = Delivery()
        self._metrics = services.metrics.answers(operation_of(self._job), self._job.model)
        self._flow = writer.TokenFlow(self._metrics.per_token)
        self._request_id = ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer; if the client disconnects, apply its on_disconnect policy to the job."""
        self._request_id, self._received = scope["state"]["request_id"], scope["state"]["received"]
        try:
            with writer.Watched(scope, self._hang_up):
                await self._answer(send, scope["state"])
        except writer.ClientGone:
            await self._disconnected()
        except asyncio.CancelledError:  # drain_s is over; no client has left, so the job goes on
            if "status" in scope["state"]:
                raise
            cut_off = errors.wait_cut_off(self._buffer.job_id, repeatable=self._admitted.keyed)
            await self._send_error(send, cut_off)
        finally:
            self._services.relay.close(self._buffer)
            self._measure_end()

    async def _answer(self, send: Send, state: dict[str, Any]) -> None:
        raise AssertionError("a subclass implements this")

    def _hang_up(self) -> None:
        """The client has disconnected."""
        self._buffer.hang_up()

    async def _send_error(self, send: Send, error: ApiError) -> None:
        """Send a complete error answer."""
        body = error_body(error, self._services.metrics.count_error)
        lengths = {"content-type": "application/json", "content-length": str(len(body))}
        await send(writer.start_message(error.status, lengths | self._admitted.headers | error.headers))
        await send(writer.body_message(body, more=False))

    def _check(self) -> None:
        """Raise what ends an answer before its job's end: lost history or a disconnect."""
        if self._buffer.rewound:
            self._services.metrics.stream_resets.inc()
            error = errors.resume_impossible if self._job.constrained else errors.stream_reset
            raise error(self._buffer.job_id)
        if self._buffer.hung_up:
            raise writer.ClientGone

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
        await asyncio.sleep(after_s)
        job_id = self._buffer.job_id
        self._services.relay.close(self._buffer)
        if not self._services.relay.listening(job_id):
            await abandon_quietly(self._services, job_id, by)


class StreamReply(Reply):
    """Streams tokens as server-sent events.

    The relay's callback writes the stream, its head included: no task wakes up, and each frame costs one write. The
    response's own task ends the stream, and takes over while the connection is congested, so that a slow reader delays
    no other stream.
    """

    _renderer: ChunkRenderer | EventSequence
    """Gets every delta in order, those in the terminal message too, and then that message."""
    _writer: writer.PacedWriter
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
        self._writer = writer.PacedWriter(
            state["server_send"], self._connection, self._services.settings.send_timeout_s
        )
        metrics = self._services.metrics.open_streams
        metrics.inc()
        try:
            await self._stream(send)
        except (writer.ClientGone, OSError):
            raise writer.ClientGone from None
        except ApiError as error:
            if not self._started:
                raise
            await self._fail(send, error)
        except BaseException as error:
            # Shutdown or a bug: send an error frame before a started stream ends.
            if self._started:
                fault = (
                    errors.draining()
                    if isinstance(error, asyncio.CancelledError)
                    else errors.internal_error(self._request_id)
                )
                await self._break_off(send, fault)
            raise
        finally:
            metrics.dec()

    def _new_renderer(self) -> ChunkRenderer | EventSequence:
        return ChunkRenderer(self._facts, include_usage=self._admitted.request.include_usage)

    def _start(self, rows: Sequence[Delta] = ()) -> None:
        """Begin the stream with its head, which names the models that gave the choices of its first rows."""
        headers = self._admitted.headers | writer.stream_url(self._admitted.accepted.id)
        if rows:
            begun = {row.index: row.served_by or self._job.model for row in reversed(rows)}
            headers |= writer.served_by_header([begun[index] for index in sorted(begun)])
        self._connection.begin_stream(
            self._state["head_of"]([*writer.RAW_STREAM_HEADERS, *writer.raw_headers(headers)])
        )
        self._state["status"] = 200
        self._started = True

    async def _fail(self, send: Send, error: ApiError) -> None:
        """End a started stream that cannot go on."""
        await send(writer.body_message(error_event(error, self._services.metrics.count_error), more=False))

    async def _break_off(self, send: Send, error: ApiError) -> None:
        """End a started stream whose job goes on, because this process ends or has a bug."""
        await self._fail(send, error)

    def _first_wait_s(self) -> float:
        """Return how long to wait for the first token before sending the head and a ping; 0 if the job is not expected
        to start by then anyway, so that the client gets the headers with its ETA at once."""
        keep_alive_s, expected = self._services.settings.keep_alive_s, self._admitted.wait
        return 0.0 if expected is not None and expected.eta_ms >= 1000 * keep_alive_s else keep_alive_s

    async def _stream(self, send: Send) -> None:
        """Let the relay write until the connection congests, then write the unwritten bytes at the reader's pace."""
        keep_alive_s = self._services.settings.keep_alive_s
        wait_s = keep_alive_s if self._started else self._first_wait_s()
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
                    await self._answer_failure(send, self._early_failure)
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
        if self._flow.last:
            self._delivery.note_first_sent()

    async def _answer_failure(self, send: Send, terminal: Terminal) -> None:
        """Answer with the error of a job that failed before the stream started."""
        self._delivery.last_got = time.monotonic()
        await self._send_error(send, errors.from_terminal(terminal))
        self._delivery.last_sent = time.monotonic()

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
        if self._finished:
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
            self._connection.write_chunk(writer.PING)
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
            data = data or writer.PING
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
                data += error_event(error, self._services.metrics.count_error)
        return data


class WholeReply(Reply):
    """Sends the answer in one piece."""

    async def _answer(self, send: Send, state: dict[str, Any]) -> None:
        deadline = time.monotonic() + self._services.settings.wait_s
        rows: list[Delta] = []
        terminal: Terminal | None = None
        headers = self._admitted.headers
        while terminal is None:
            left = deadline - time.monotonic()
            if left <= 0:
                timeout = errors.wait_timeout(self._buffer.job_id, self._services.settings.wait_s)
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
            lengths = {"content-type": "application/json", "content-length": str(len(body))}
            served = writer.served_by_header(terminal.served_by or [self._job.model])
            await send(writer.start_message(200, lengths | headers | served))
            await send(writer.body_message(body, more=False))
        self._delivery.last_sent = time.monotonic()

    async def _whole(self, terminal: Terminal, rows: list[Delta]) -> bytes:
        """Render the answer. Raises ApiError for a job that did not complete."""
        work = answer_in_slices(self._facts, terminal, rows)
        return to_json(await self._services.store_client.turns.run(work, len(rows)))


async def abandon_quietly(services: Services, job_id: str, by: CancelledBy) -> None:
    """Cancel a job that no client of this process reads any more, unless another process has a reader.

    Never raises: if Redis is down, the worker finishes the job and the result is kept.
    """
    try:
        await services.queue.abandon(job_id, services.relay.address, by)
    except UnknownJob:
        pass  # it ended and its retention passed
    except StreamingError as error:
        log.warning("could not cancel a job whose client left: %s", error, extra={"job": job_id})


# --- what is recorded of a delivery -----------------------------------------------------------------------------------


class Delivery:
    """The four timestamps of one reply, in monotonic seconds; `note` adds them to the job's timing."""

    __slots__ = ("first_got", "first_sent", "last_got", "last_sent")

    def __init__(self) -> None:
        self.first_got = self.first_sent = 0.0
        """When the first token arrived, and when it was written to the connection."""
        self.last_got = self.last_sent = 0.0
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
        named = dict(zip(("first_got_us", "first_sent_us", "last_got_us", "last_sent_us"), times, strict=True))
        record = DeliveryRecord(id=admitted.job.id, by=services.name, **named, clock_us=clock_us, whole=whole)
        services.records.write(record)
        span = current()
        if span is not None and span.recorded and self.first_sent:
            span.add_event(FIRST_SENT, time.time_ns() - int((time.monotonic() - self.first_sent) * 1e9))
        if end is not None and end.state is JobState.COMPLETED:
            count_parts(services.metrics, admitted.job.model, delivered, end)


def count_parts(metrics: Metrics, model: str, delivered: Delivered, end: Terminal) -> None:
    """Count how long the answer of a completed job was on its way from the engine to the client."""
    ways = ((PARTS[-1], end.last_ms, delivered.last_sent), (EGRESS_FIRST, end.first_ms, delivered.first_sent))
    for part, made_ms, sent_us in ways:
        if made_ms and sent_us:
            metrics.parts.labels(model, part.name).observe(max(0, sent_us - 1000 * made_ms) / 1_000_000)
