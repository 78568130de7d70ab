"""Stream reader: feeds one streamed reply to its generation, and tells how the reply ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from penstock.engine import Piece
from workers.engines.stops import joined
from workers.engines.upstream.http.connection import MAX_REPLY_BYTES, UpstreamConnection
from workers.engines.upstream.http.sse import BOM, DONE, EventSplitter, LineTooLongError
from workers.engines.upstream.reply.chunks import decoded
from workers.engines.upstream.reply.endings import End, ReplyOutcome, by_cut, by_malformed, by_status
from workers.engines.upstream.reply.generation import UpstreamGeneration

WHITE = b" \t\r\n"
MAX_ERROR_BYTES = 64 << 10
FINISH_GRACE_S = 2.0
"""After the finish reason, for the chunk with the counts."""


class StreamReader:
    """Sink of one reply (connection.Sink)."""

    def __init__(
        self, generation: UpstreamGeneration, connection: UpstreamConnection, emit: Callable[[Piece], None]
    ) -> None:
        self.generation, self._connection, self._emit = generation, connection, emit
        self.done: asyncio.Future[ReplyOutcome] = asyncio.get_running_loop().create_future()
        self.server = ""
        """Address of the server that replies."""
        self.status, self.headers = 0, dict[str, str]()
        self._splitter = EventSplitter()
        self._error = b""
        self._is_begun = False
        self._whole: list[bytes] = []
        """The body of a reply that is no stream."""
        self._finished_at = 0.0
        self._kept = self._ended = False

    @property
    def is_read(self) -> bool:
        """Whether the reply came to its end."""
        return self._kept

    @property
    def silent(self) -> bool:
        """Whether nothing of the reply has come, not even its head."""
        return not self.status

    def on_head(self, status: int, headers: Mapping[str, str]) -> None:
        self.status, self.headers = status, dict(headers)

    def on_body(self, data: bytes) -> None:
        """Hot path: called once for each read."""
        if self.done.done():
            return
        if self.status != 200:
            self._error = (self._error + data)[:MAX_ERROR_BYTES]
            return
        if self._whole or (not self._is_begun and data.lstrip(BOM + WHITE)[:1] == b"{"):
            self._whole.append(data)  # no stream, although one was asked for
            if sum(map(len, self._whole)) > MAX_REPLY_BYTES:
                self.settle(by_malformed("reply, which has no end"))
            return
        self._is_begun = True
        try:
            self._take(self._splitter.feed(data))
        except LineTooLongError:
            self.settle(self.generation.outcome or by_malformed("line, which has no end"))

    def _take(self, events: list[bytes]) -> None:
        """Hand the events of one read to the generation, and what it makes of them to the engine."""
        generation, now, pieces, ended = self.generation, time.monotonic(), list[Piece](), False
        event = b""
        for event in events:
            if (piece := generation.take(event, now)) is not None:
                pieces.append(piece)
            if (outcome := generation.outcome) is not None:
                self._finished_at = self._finished_at or now
                ended = outcome.end is not End.DONE or event == DONE or generation.is_over
                if ended:
                    break
        if pieces:
            self._emit(pieces[0] if len(pieces) == 1 else joined(generation.id, pieces))
        if ended and generation.outcome is not None:
            self.settle(generation.outcome, keep=event == DONE)
            if event == DONE:  # the connection is used again once its body has ended, which should be now
                asyncio.get_running_loop().call_later(FINISH_GRACE_S, self._close_unended)

    def _close_unended(self) -> None:
        if not self._ended:
            self._connection.close()

    def on_end(self, problem: str) -> None:
        self._ended = True
        try:
            if not self.done.done() and self.status == 200 and not problem:
                self._take([b"".join(self._whole)] if self._whole else self._splitter.flush())
            if self.done.done():
                return
            outcome = self._outcome(problem)
        except Exception as error:  # noqa: BLE001 - the boundary of a reply: its request must end
            self.settle(by_malformed(f"end ({type(error).__name__})"))
            return
        self.settle(outcome, keep=not problem)

    def _outcome(self, problem: str) -> ReplyOutcome:
        if self.status not in (0, 200):
            return by_status(self.status, self._error, decoded(self._error))
        cut = by_cut(problem or "the stream ended without a finish reason", bare=not problem)
        return self.generation.outcome or cut

    def settle(self, outcome: ReplyOutcome, *, keep: bool = False) -> None:
        """Note how the reply ended. `keep`: the connection need not be closed; otherwise the server notices that
        nobody reads on, and stops."""
        if not self.done.done():
            self.done.set_result(outcome)
            self._kept = keep
            if not keep:
                self._connection.close()

    def check_time(self, now: float, first_s: float, between_s: float) -> None:
        """End a reply that makes no progress."""
        generation = self.generation
        if self._finished_at and now - self._finished_at > FINISH_GRACE_S and generation.outcome is not None:
            self.settle(generation.outcome)
            return
        limit_s = between_s if generation.received else first_s
        if now - generation.progress_at > limit_s:
            self.settle(replace(by_cut(f"no token for {limit_s:g} s"), stalled=True))
