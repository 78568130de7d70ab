"""Answers that wait for a job: the token stream, and the answer in one piece.

Both watch for the client's leaving while they wait, and then do what the request's on_disconnect says. A stream's
status is committed with its first bytes, so a refusal that comes before them keeps its HTTP code; a committed stream
always ends with a terminal frame.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from msgspec.structs import replace
from starlette.types import Message, Receive, Scope, Send

from api.admission import Admitted
from api.openai import errors, job_errors
from api.openai.errors import ApiError
from api.openai.rendering import ChunkRenderer, Facts, completion_in_slices, error_frame, fingerprint, to_json
from api.services import Services
from api.stream.connection import Connection
from api.stream.delivery import Delivery
from api.stream.flow import TokenFlow
from api.stream.watch import Watched
from streaming.errors import StreamingError, UnknownJob
from streaming.jobs.frames import Delta
from streaming.jobs.job import JobState
from streaming.jobs.terminal import Terminal
from telemetry.latency import end_to_end, inter_token_latency, time_to_first_token

log = logging.getLogger(__name__)

PING = b": ping\n"
"""One newline: a blank line would be an event, and crash clients that have seen an id."""

STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)

CHAT, TEXT = "chat", "text_completion"


MAX_LENIENCE = 1.2
"""A reader that takes nothing is cut off up to this factor later than it may be: readers who stalled together are not
all cut off in one turn of the loop, for which every other stream would wait."""
KEYED_GRACE_S = 10.0
"""A client that sent an idempotency key may only have lost the answer: so long its job waits for its next try."""


class ClientGone(Exception):
    """Raised inside an answer when its client has left."""


class Reply:
    """An ASGI response for one admitted job. Subclasses say how it is told."""

    def __init__(self, services: Services, admitted: Admitted) -> None:
        self._services, self._admitted = services, admitted
        self._inbox = admitted.inbox
        self._job = admitted.job
        created = admitted.accepted.created_ms or int(time.time() * 1000)
        card = services.cards.get(self._job.model)
        facts = Facts.of(self._job, created, fingerprint(card) if card else None)
        self._facts = facts if not admitted.accepted.joined else replace(facts, job=admitted.accepted.id)
        self._received = 0.0
        self._delivery = Delivery()
        self._counted = services.metrics.answers(CHAT if facts.chat else TEXT, self._job.model)
        self._flow = TokenFlow(self._counted.per_token)
        self._request_id = ""
        self._slow = False
        self._task: asyncio.Task[object] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, and look after the job if the client leaves."""
        self._request_id, self._received = scope["state"]["request_id"], scope["state"]["received"]
        self._task = asyncio.current_task()
        try:
            with Watched(scope, receive, self._inbox.hang_up):
                await self._answer(send, scope["state"])
        except ClientGone:
            await self._disconnected()
        finally:
            self._services.relay.close(self._inbox)
            self._measure_end()

    async def _answer(self, send: Send, state: dict[str, Any]) -> None:
        raise AssertionError("a subclass says how")

    async def _take(self, patience: float) -> tuple[list[Delta], Terminal | None]:
        rows, terminal = await self._inbox.take(patience)
        if rows and not self._inbox.rewound:
            self._measure(rows)
        if terminal is None or self._inbox.rewound:
            self._check()
        return rows, terminal

    def _check(self) -> None:
        """Raises what ends an answer before its job's end."""
        if self._inbox.rewound:
            constrained = self._job.sampling.json_schema is not None
            raise (job_errors.resume_impossible if constrained else job_errors.stream_reset)(self._inbox.job_id)
        if self._inbox.hung_up:
            raise ClientGone

    def _measure(self, rows: Sequence[Delta]) -> None:
        now = time.monotonic()
        if not self._flow.last:
            self._delivery.first_got()
            self._counted.first_token.observe(time_to_first_token(self._received, now))
        else:
            tokens = sum([row.n for row in rows])
            self._counted.per_token.observe(inter_token_latency(self._flow.last, now, tokens), tokens or 1)
        self._flow.last = now

    def _measure_end(self) -> None:
        counted, terminal = self._counted, self._inbox.terminal
        counted.duration.observe(end_to_end(self._received, time.monotonic()))
        self._delivery.note(self._services, self._admitted)
        if terminal is not None:
            self._services.pace.ended(self._job.model)
            counted.input.observe(terminal.usage.prompt)
            counted.output.observe(terminal.usage.completion)

    async def _disconnected(self) -> None:
        """The client left before the end: go on, or cancel, at once or after a while, if nobody else listens then."""
        policy = self._job.on_disconnect
        known = {"job": self._inbox.job_id, "on_disconnect": policy}
        if self._slow:
            log.warning("a reader took nothing for too long and is cut off", extra=known)
        else:
            log.info("client left", extra=known)
        if policy == "continue":
            return
        grace_s = float(policy.removeprefix("grace:")) if policy.startswith("grace:") else 0.0
        if self._admitted.keyed and not self._admitted.request.queue.on_disconnect:
            grace_s = KEYED_GRACE_S
        if grace_s:
            self._services.spawn(self._cancel_later(grace_s))
        else:
            await self._cancel_unheard()

    async def _cancel_later(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        await self._cancel_unheard()

    async def _cancel_unheard(self) -> None:
        job_id = self._inbox.job_id
        self._services.relay.close(self._inbox)
        if not self._services.relay.listening(job_id):
            await abandon_quietly(self._services, job_id)


class StreamReply(Reply):
    """Tokens as they come, as server-sent events.

    Once begun, a stream is written from where the frames arrive: no task is woken, and a response costs one write a
    frame. Its own task sleeps, and takes over when the connection is congested, so that a slow reader holds up nobody.
    """

    _renderer: ChunkRenderer
    _send: Send
    _connection: Connection | None = None
    _write_now: Callable[[bytes], bool] = staticmethod(lambda data: False)
    """Write without waiting; False if that cannot be done now."""
    _owed = b""
    """Rendered, but not written: the connection was congested."""
    _told = False
    """The last bytes of the stream are rendered."""
    _pinged = 0.0
    _alive: asyncio.TimerHandle | None = None

    async def _answer(self, send: Send, state: dict[str, Any]) -> None:
        self._renderer = ChunkRenderer(self._facts, include_usage=self._admitted.request.include_usage)
        # Past the middleware: it has no say in a body that has begun.
        self._send, connection = state["server_send"], state.get("connection")
        if connection is not None:
            self._connection, self._write_now = connection, connection.write_chunk
        begun = False
        metrics = self._services.metrics.open_streams
        metrics.inc()
        try:
            rows, terminal = await self._take(self._silence_s())
            if terminal is not None and not rows and terminal.state is not JobState.COMPLETED:
                self._delivery.last_got()
                await send_error(send, job_errors.from_terminal(terminal), self._admitted.headers)
                self._delivery.last_sent()
                return
            await send(_start(200, self._admitted.headers, STREAM_HEADERS))
            begun = True
            self._owed = self._render(rows, terminal) or PING
            await self._stream()
        except (ClientGone, OSError):
            raise ClientGone from None
        except ApiError as error:
            if not begun:
                raise
            await send(_body(error_frame(error), more=False))
        except BaseException as error:
            # Cancelled at shutdown, or a fault of ours: the client of a committed stream is told before it ends.
            if begun:
                fault = (
                    errors.draining()
                    if isinstance(error, asyncio.CancelledError)
                    else errors.internal_error(self._request_id)
                )
                await send(_body(error_frame(fault), more=False))
            raise
        finally:
            metrics.dec()

    def _silence_s(self) -> float:
        """How long to wait for something to tell before the stream begins with a sign of life. What is not expected to
        begin until then need not wait for it: its headers say how long it is held."""
        keep_alive_s, eta_ms = self._services.settings.keep_alive_s, self._admitted.eta_ms
        return 0.0 if eta_ms is not None and eta_ms >= 1000 * keep_alive_s else keep_alive_s

    async def _stream(self) -> None:
        """Write what is owed, at the reader's pace; then have the rest poured, until something is owed again."""
        try:
            while True:
                if self._owed:
                    data, self._owed = self._owed, b""
                    await self._write(data, more=not self._told)
                    if self._flow.last:
                        self._delivery.first_sent()
                if self._told:
                    self._delivery.last_sent()
                    return
                if self._alive is None:  # a short answer is over by now
                    self._pinged = time.monotonic()
                    self._stay_alive()
                await self._pour()
                if not self._told:
                    self._check()
        finally:
            if self._alive is not None:
                self._alive.cancel()
            if self._connection is not None:
                self._connection.carry(None)

    async def _pour(self) -> None:
        if not self._flow.last:
            await self._inbox.attach_sink(self._show_first)
            return
        direct = None
        if self._connection is not None and (around := self._renderer.plain) is not None:
            self._flow.lead(self._connection, *around)
            direct = self._flow.show
        await self._inbox.attach_sink(self._show, direct)
        self._owed, self._flow.owed = self._owed or self._flow.owed, b""

    def _stay_alive(self) -> None:
        """A sign of life for a reader who has heard nothing for so long."""
        now, patience = time.monotonic(), self._services.settings.keep_alive_s
        silence = now - max(self._flow.last, self._pinged)
        if silence >= patience and not self._told:
            self._write_now(PING)
            self._pinged, silence = now, 0.0
        self._alive = asyncio.get_running_loop().call_later(patience - min(silence, patience), self._stay_alive)

    def _show(self, rows: list[Delta], terminal: Terminal | None) -> bool:
        """Called by the relay for what does not flow by itself."""
        if rows:
            self._measure(rows)
        return self._pass_on(self._render(rows, terminal))

    def _show_first(self, rows: list[Delta], terminal: Terminal | None) -> bool:
        """The same for the first tokens of a stream that began with a sign of life; the rest is for `_show`."""
        if rows:
            self._measure(rows)
        if self._pass_on(self._render(rows, terminal)):
            self._delivery.first_sent()
        return False

    def _pass_on(self, data: bytes) -> bool:
        if data and (self._told or not self._write_now(data)):
            self._owed = data
            return False
        return True

    def _render(self, rows: list[Delta], terminal: Terminal | None) -> bytes:
        delta = self._renderer.delta
        data = delta(rows[0]) if len(rows) == 1 else b"".join([delta(row) for row in rows])
        if terminal is not None:
            self._told = True
            self._delivery.last_got()
            data += self._renderer.end(terminal)
        return data

    async def _write(self, data: bytes, *, more: bool) -> None:
        """A reader that takes nothing for too long is cut off."""
        patience_s = self._services.settings.send_timeout_s * random.uniform(1.0, MAX_LENIENCE)  # noqa: S311 - hides nothing
        cut = asyncio.get_running_loop().call_later(patience_s, self._cut_off)
        try:
            await self._send(_body(data, more=more))
        except asyncio.CancelledError:
            if not self._slow:
                raise
            if self._connection is not None:
                self._connection.cut_off()
            raise ClientGone from None
        finally:
            cut.cancel()

    def _cut_off(self) -> None:
        self._slow = True
        if self._task is not None:
            self._task.cancel()


class WholeReply(Reply):
    """The answer in one piece."""

    async def _answer(self, send: Send, state: dict[str, Any]) -> None:
        deadline = time.monotonic() + self._services.settings.wait_s
        rows: list[Delta] = []
        terminal: Terminal | None = None
        headers = self._admitted.headers
        while terminal is None:
            left = deadline - time.monotonic()
            if left <= 0:
                await send_error(
                    send, job_errors.wait_timeout(self._inbox.job_id, self._services.settings.wait_s), headers
                )
                return
            taken, terminal = await self._take(left)
            rows += taken
        self._delivery.last_got()
        try:
            work = completion_in_slices(self._facts, terminal, rows)
            body = to_json(await self._services.wire.turns.run(work, len(rows)))
        except ApiError as error:
            await send_error(send, error, headers)
        else:
            await send(_start(200, {"content-type": "application/json", "content-length": str(len(body))} | headers))
            await send(_body(body, more=False))
        self._delivery.last_sent()


async def abandon_quietly(services: Services, job_id: str) -> None:
    """Cancel a job that no client of this process waits for any more, unless others do. If Redis is down the worker
    goes on and the result is kept."""
    try:
        await services.queue.abandon(job_id, services.relay.address)
    except UnknownJob:
        pass  # it ended and was forgotten
    except StreamingError as error:
        log.warning("could not cancel a job whose client left: %s", error, extra={"job": job_id})


async def send_error(send: Send, error: ApiError, headers: dict[str, str]) -> None:
    """A whole error answer."""
    body = to_json(error.body)
    lengths = {"content-type": "application/json", "content-length": str(len(body))}
    await send(_start(error.status, lengths | headers | error.headers))
    await send(_body(body, more=False))


def _start(status: int, headers: dict[str, str], raw: Iterable[tuple[bytes, bytes]] = ()) -> Message:
    own = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    return {"type": "http.response.start", "status": status, "headers": [*raw, *own]}


def _body(data: bytes, *, more: bool) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}
