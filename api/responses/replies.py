"""Replies of the Responses API: the stream of a new response, its whole answer, and the stream of a stored one."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from starlette.types import Receive, Scope, Send

from api.admission import Admitted
from api.events import ROWS_PER_WRITE, patiently
from api.openai.errors import ApiError, from_failure, from_terminal, stream_reset
from api.openai.rendering import Facts, to_json
from api.openai.responses.events import EventSequence
from api.openai.results import answer_in_slices, count_of
from api.responses.stored import add_turn
from api.services import Services
from api.stream.connection import Connection
from api.stream.reply import StreamReply, WholeReply
from api.stream.writer import (
    PING,
    STREAM_HEADERS,
    ClientGone,
    NumberedFlow,
    PacedWriter,
    Watched,
    body_message,
    start_message,
)
from streaming.errors import DecodeError, NewerMessage, Unavailable, UnknownJob
from streaming.jobs.codec import Delta, Run, Terminal, decode_draft
from streaming.jobs.job import JobState
from streaming.jobs.records import NEWER, JobRecord
from streaming.jobs.relay import GONE
from streaming.jobs.reorder_buffer import ReorderBuffer

START_INTERVAL_S = 0.5
"""Interval between looks whether a worker has started a waiting response."""


class _Restarted(Exception):
    """Raised when the text was given up: what was rendered is rendered again, with the record as it now stands."""


class _HistoryLost(Exception):
    """Raised when the store no longer has events that the reader has."""


class Follower:
    """Renders the events after number `after` for one reader.

    The bytes are those that the first reader got. If the engine starts the text again meanwhile, the follower renders
    the text that was given up, too, from the job's record.

    Args:
        live: events up to `after` were rendered here for the same reader, so the store must still have them.
        measure: gets the deltas as they arrive.
    """

    def __init__(
        self,
        services: Services,
        record: JobRecord,
        after: int,
        *,
        live: bool = False,
        measure: Callable[[Sequence[Delta]], None] = lambda rows: None,
    ) -> None:
        self._services, self._record, self._measure = services, record, measure
        self._live = live
        self._sequence = EventSequence(Facts(record.job, record.created_ms), after)
        self._buffer: ReorderBuffer | None = None
        self._gone = False
        self.ended: Terminal | None = None
        """How the response ended, once the last event was rendered."""

    def hang_up(self) -> None:
        """Note that the reader has disconnected."""
        self._gone = True
        if self._buffer is not None:
            self._buffer.hang_up()

    async def write_to(self, writer: PacedWriter, note_written: Callable[[], None] = lambda: None) -> None:
        """Write the rest of the sequence at the reader's pace. Raises ClientGone."""
        async with aclosing(self.events()) as events:
            async for data in events:
                if data:
                    await writer.write(data, more=True)
                note_written()
        await writer.write(b"", more=False)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the rest of the sequence, and comments while nothing happens. Raises ClientGone."""
        try:
            while True:
                try:
                    async with aclosing(self._from_start()) as rendered:
                        async for data in rendered:
                            yield data
                    return
                except _Restarted:
                    self._live = True
                    facts = Facts(self._record.job, self._record.created_ms)
                    self._sequence = EventSequence(facts, self._sequence.has)
        except _HistoryLost:
            self._services.metrics.stream_resets.inc()
            yield self._sequence.fail(stream_reset(self._record.job.id))
        except UnknownJob:
            yield self._sequence.fail(from_failure(GONE))
        except (NewerMessage, DecodeError):
            yield self._sequence.fail(from_failure(NEWER))

    async def _from_start(self) -> AsyncGenerator[bytes, None]:
        """Render the whole sequence; what the reader has is counted and not yielded."""
        sequence, record, had = self._sequence, self._record, self._sequence.has
        yield sequence.opening() + (sequence.running() if record.state is JobState.RUNNING else b"")
        for draft in map(decode_draft, record.drafts):
            async for data in self._rendered(draft.rows):
                yield data
            yield sequence.begin_again()
        if self._live and record.drafts and sequence.number - 1 < had:
            raise _HistoryLost  # the draft lacks what the reader has of it
        # the deltas of the present text, and the end
        services, keep_alive_s = self._services, self._services.settings.keep_alive_s
        self._buffer = buffer = services.relay.open(record.job.id)
        buffer.accepted = True
        try:
            await patiently(lambda: services.relay.follow(buffer))
            written_s, runs = time.monotonic(), {logged.run for logged in self._record.runs}
            while True:
                waiting = self._record.state is JobState.QUEUED and not buffer.seq
                rows, terminal = await buffer.take(min(START_INTERVAL_S, keep_alive_s) if waiting else keep_alive_s)
                self._check_reader()
                if buffer.rewound:
                    await self._check_drafts()
                    raise _HistoryLost
                if not runs.issuperset(self._authors(buffer, rows, terminal)):
                    runs |= await self._check_drafts()
                if rows:
                    self._measure(rows)
                    written_s = time.monotonic()
                async for data in self._rendered(rows):
                    yield data
                if terminal is not None:
                    yield self._end(terminal)
                    return
                data = b"" if rows else await self._look()
                if data or time.monotonic() - written_s >= keep_alive_s:
                    yield data or PING
                    written_s = time.monotonic()
        finally:
            services.relay.close(buffer)

    async def _look(self) -> bytes:
        """Render that a worker has started the response, if one has."""
        if self._record.state is not JobState.QUEUED:
            return b""
        found = await patiently(lambda: self._services.job_reader.again(self._record))
        if found.state is JobState.RUNNING:
            await self._check_drafts()
            return self._sequence.running()
        return b""

    @staticmethod
    def _authors(buffer: ReorderBuffer, rows: Sequence[Delta], terminal: Terminal | None) -> set[Run]:
        """Return the runs that wrote these deltas, and with the end all that wrote the text."""
        found = {buffer.author(row.seq) for row in rows}
        sections = terminal.sections if terminal is not None else ()
        return {run for run in found if run is not None} | {section.run for section in sections}

    async def _check_drafts(self) -> set[Run]:
        """Read the record again; return the runs that it names. Raises _Restarted if another text was given up."""
        job_id, known = self._record.job.id, len(self._record.drafts)
        self._record = await patiently(lambda: self._services.job_reader.outline(job_id))
        if len(self._record.drafts) > known:
            raise _Restarted
        return {logged.run for logged in self._record.runs}

    async def _rendered(self, rows: Sequence[Delta]) -> AsyncGenerator[bytes, None]:
        """Render deltas in parts, so that a long list does not block the event loop."""
        for first in range(0, len(rows), ROWS_PER_WRITE):
            part = rows[first : first + ROWS_PER_WRITE]
            if len(part) < ROWS_PER_WRITE:
                data = self._sequence.deltas(part)
            else:
                async with self._services.store_client.turns:
                    data = self._sequence.deltas(part)
            yield data
            self._check_reader()

    def _end(self, terminal: Terminal) -> bytes:
        """Render the end. Raises NewerMessage if this process cannot read it, UnknownJob if the store lost the job."""
        if terminal.failure is GONE:
            raise UnknownJob(self._record.job.id)
        if terminal.failure is NEWER:
            raise NewerMessage(b"")
        self.ended = terminal
        return self._sequence.end(terminal)

    def _check_reader(self) -> None:
        if self._gone:
            raise ClientGone


FORGET_AFTER_S = 60
"""How long the job of a response that is not stored is kept after its answer, for a retry with its idempotency key."""


async def forget(services: Services, admitted: Admitted) -> None:
    """Let the job of a response that has ended and is not stored expire soon."""
    form = admitted.job.response
    if form is not None and not form.store:
        # If this fails, it expires with the retention of jobs, and is not shown until then.
        with contextlib.suppress(Unavailable, ApiError):
            if form.conversation:
                await add_turn(services, admitted.job.tenant, form.conversation)
            await services.queue.shorten_retention([admitted.accepted.id], FORGET_AFTER_S)


class _Rewound(Exception):
    """Raised when the stream's text is no longer the job's: the engine has started again, or the store lost data."""


class ResponseStream(StreamReply):
    """Streams a new response. Its id goes out at once, before a worker has the job.

    Nearly every token takes the fast path. Where the engine may have to start again (JSON), and once the job's history
    has changed, the events come from a Follower.
    """

    def __init__(self, services: Services, admitted: Admitted) -> None:
        super().__init__(services, admitted)
        self._events = EventSequence(self._facts)
        self._flow = NumberedFlow(self._metrics.per_token, self._events)
        self._follower: Follower | None = None

    def _new_renderer(self) -> EventSequence:
        return self._events

    def _hang_up(self) -> None:
        super()._hang_up()
        if self._follower is not None:
            self._follower.hang_up()

    def _check(self) -> None:
        if self._buffer.rewound:
            raise _Rewound
        super()._check()

    async def _stream(self, send: Send) -> None:
        self._unwritten = self._events.opening()
        self._start()
        if not self._job.constrained:
            with contextlib.suppress(_Rewound):
                await super()._stream(send)
                await forget(self._services, self._admitted)
                return
        await self._follow()
        await forget(self._services, self._admitted)

    async def _follow(self) -> None:
        """Write the rest of the events from the store."""
        services, job_id = self._services, self._buffer.job_id
        data, self._unwritten = self._unwritten, b""
        await self._writer.write(data, more=True)
        services.relay.close(self._buffer)
        record = await services.job_reader.outline(job_id)
        follower = self._follower = Follower(services, record, self._events.has, live=True, measure=self._measure)
        if self._buffer.hung_up:
            raise ClientGone
        await follower.write_to(self._writer, self._note_written)
        self._buffer.terminal = follower.ended
        self._delivery.last_got = time.monotonic()
        self._delivery.last_sent = time.monotonic()

    def _note_written(self) -> None:
        if self._flow.last:
            self._delivery.note_first_sent()

    async def _fail(self, send: Send, error: ApiError) -> None:
        self._services.metrics.count_error(error.code)
        await send(body_message(self._events.fail(error), more=False))

    async def _break_off(self, send: Send, error: ApiError) -> None:
        """Break the connection: the response goes on, so none of the three events that end a stream would be true. The
        client sees a broken answer and can resume after its last event."""
        self._services.metrics.count_error(error.code)
        self._writer.cut_off()


class WholeResponse(WholeReply):
    """Sends the object of a new response once it has ended."""

    async def _whole(self, terminal: Terminal, rows: list[Delta]) -> bytes:
        services, drafts = self._services, tuple[bytes, ...]()
        if self._job.constrained:  # its engine may have started again
            with contextlib.suppress(UnknownJob):
                drafts = (await services.job_reader.outline(terminal.job)).drafts
        work = answer_in_slices(self._facts, terminal, rows, drafts)
        body = to_json(await services.store_client.turns.run(work, len(rows)))
        await forget(services, self._admitted)
        return body


class TokenCount(WholeReply):
    """Sends the number of a request's input tokens, as the engine counted them or told their ids."""

    async def _whole(self, terminal: Terminal, rows: list[Delta]) -> bytes:
        if terminal.state is not JobState.COMPLETED:
            raise from_terminal(terminal)
        count = terminal.usage.prompt if self._job.task is None else count_of("".join([row.text for row in rows]))
        return to_json({"object": "response.input_tokens", "input_tokens": count})


class StoredStream:
    """ASGI response: the events of a stored response after a cursor, to its end."""

    def __init__(self, services: Services, follower: Follower, headers: dict[str, str]) -> None:
        self._services, self._follower, self._headers = services, follower, headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Stream at the reader's pace. When this process ends, the connection breaks: the response goes on."""
        state = scope["state"]
        connection: Connection = state["connection"]
        writer = PacedWriter(state["server_send"], connection, self._services.settings.send_timeout_s)
        metrics = self._services.metrics.open_streams
        metrics.inc()
        try:
            with Watched(scope, self._follower.hang_up):
                await send(start_message(200, STREAM_HEADERS | self._headers))
                await self._follower.write_to(writer)
        except (ClientGone, OSError):
            pass
        except asyncio.CancelledError:  # drain_s is over
            writer.cut_off()
            raise
        finally:
            metrics.dec()
