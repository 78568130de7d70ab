"""Replies of the Responses API: the stream of a new response, its whole answer, and the stream of a stored one."""

from __future__ import annotations

import asyncio
import contextlib
import time
from contextlib import aclosing

import msgspec
from starlette.types import Receive, Scope, Send

from api.admission import Admitted
from api.openai.errors import ApiError
from api.openai.job_errors import from_terminal
from api.openai.rendering import to_json
from api.openai.responses.answer_items import given_up
from api.openai.responses.call_events import sequence_of
from api.openai.responses.object import ResponseFacts, ended_response
from api.openai.tasks.answers import count_of
from api.responses.follower import Follower
from api.responses.turns import add_turn
from api.services import Services
from api.stream.flow import NumberedFlow
from api.stream.messages import STREAM_HEADERS, body_message, start_message
from api.stream.paced_writer import ClientGone, PacedWriter
from api.stream.reply import Renderer, StreamReply, WholeReply
from api.stream.watch import Watched
from streaming.errors import Unavailable, UnknownJob
from streaming.jobs.codec import Delta, Terminal
from streaming.jobs.job import JobState

FORGET_AFTER_S = 60
"""How long the job of a response that is not stored is kept after its answer, for a retry with its idempotency key."""


def facts_of(admitted: Admitted) -> ResponseFacts:
    """Return the facts of a response that was accepted just now."""
    accepted = admitted.accepted
    created_ms = accepted.created_ms or int(time.time() * 1000)
    return ResponseFacts(msgspec.structs.replace(admitted.job, id=accepted.id), created_ms)


async def forget(services: Services, admitted: Admitted) -> None:
    """Let the job of a response that has ended and is not stored expire soon."""
    form = admitted.job.response
    if form is not None and not form.store:
        # Otherwise it expires with the retention of jobs, and is not shown until then.
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
        self._events = sequence_of(facts_of(admitted))
        self._flow = NumberedFlow(self._metrics.per_token, self._events)
        self._follower: Follower | None = None

    def _new_renderer(self) -> Renderer:
        return self._events

    async def _opening(self, send: Send) -> bytes | None:
        return self._events.opening()

    def _hang_up(self) -> None:
        super()._hang_up()
        if self._follower is not None:
            self._follower.hang_up()

    def _check(self) -> None:
        if self._buffer.rewound:
            raise _Rewound
        super()._check()

    async def _stream(self) -> None:
        if not self._job.constrained:
            with contextlib.suppress(_Rewound):
                await super()._stream()
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
        async with aclosing(follower.events()) as events:
            async for data in events:
                if data:
                    await self._writer.write(data, more=True)
                if self._flow.last:
                    self._delivery.first_sent()
        await self._writer.write(b"", more=False)
        self._buffer.terminal = follower.ended
        self._delivery.last_got()
        self._delivery.last_sent()

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
        if terminal.state is not JobState.COMPLETED:
            raise from_terminal(terminal)
        services, drafts = self._services, 0
        if self._job.constrained:  # its engine may have started again
            with contextlib.suppress(UnknownJob):
                record = await services.job_reader.outline(terminal.job)
                drafts = given_up(record.job, record.drafts)
        work = ended_response(facts_of(self._admitted), terminal, rows, drafts)
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
        connection = state.get("connection")
        writer = PacedWriter(state["server_send"], connection, self._services.settings.send_timeout_s)
        metrics = self._services.metrics.open_streams
        metrics.inc()
        try:
            with Watched(scope, receive, self._follower.hang_up):
                await send(start_message(200, STREAM_HEADERS | self._headers))
                async with aclosing(self._follower.events(connection)) as events:
                    async for data in events:
                        if data:
                            await writer.write(data, more=True)
                await writer.write(b"", more=False)
        except (ClientGone, OSError):
            pass
        except asyncio.CancelledError:  # drain_s is over
            writer.cut_off()
            raise
        finally:
            metrics.dec()
