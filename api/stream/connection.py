"""HTTP connection of the server, which writes each token of a stream straight to its transport, without ASGI.

An ASGI `send` costs a message, a coroutine and a state machine. The body of a token stream needs none of these, and
they were half of a token's cost in this process. Head and end of an answer use ASGI as usual.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from api.auth.hosts import PROBES
from api.openai.errors import ApiError
from api.stream import connection_guard
from api.stream.connection_guard import ConnectionGuard, DeadlineQueue, answer_of

if TYPE_CHECKING:
    from api.stream.reply import TokenFlow

CHUNK = b"%x\r\n%b\r\n"
"""One chunk of a chunked body, with its size before it."""
LAST_CHUNK = b"0\r\n\r\n"
LINE_END = b"\r\n"
CONTROLS = bytes((*range(9), *range(10, 32), 127))
"""Characters that no header may hold."""
CHUNKED = b"transfer-encoding: chunked\r\n"
"""The field of the head of a chunked answer, as the server writes it."""


class AnswerTransport:
    """The server's transport as responses see it; the protocol decides how the connection is closed."""

    __slots__ = ("_chunked", "_end", "_held", "_holds", "_transport", "unframed")

    def __init__(self, transport: asyncio.Transport, end: Callable[[], None]) -> None:
        self._transport, self._end = transport, end
        self._holds, self._held = False, b""
        self.unframed = False
        """Chunks are written without their framing: the client has HTTP/1.0, which knows none, and the end of the
        connection ends the body. Set it before the head is written; the answer is the connection's last."""
        self._chunked: bool | None = None
        """Whether the body is chunked; None: the head is not written."""

    def hold(self) -> None:
        """Hold the next write back, and send it together with the one after it: a write costs a system call."""
        self._holds = True

    def write(self, data: bytes) -> None:
        if self.unframed:
            data = self._without_framing(data)
        if self._holds:
            self._holds, self._held = False, data
            return
        if self._held:
            data, self._held = self._held + data, b""
        self._transport.write(data)

    def _without_framing(self, data: bytes) -> bytes:
        """Return a head without the field of chunks, or the content of whole chunks."""
        if self._chunked is None:
            self._chunked = CHUNKED in data
            return data.replace(CHUNKED, b"")
        if not self._chunked:
            return data
        content = []
        while data:
            size, _, data = data.partition(LINE_END)
            content.append(data[: int(size, 16)])
            data = data[int(size, 16) + len(LINE_END) :]
        return b"".join(content)

    def close(self) -> None:
        self._holds = False
        if self._held:
            data, self._held = self._held, b""
            self._transport.write(data)
        self._end()

    def is_closing(self) -> bool:
        return self._transport.is_closing()


MAX_PIPELINED = 8
"""Requests on one connection that may wait for the answers to earlier ones."""
MAX_UNREAD_BYTES = 4 * 1024 * 1024
"""If a request is answered before its body has ended, so much of the rest is read, and the connection stays usable."""
FRAMING_PER_BYTE = 8
"""Bytes around the chunks of a body allowed for each of its bytes; chunks of one byte need five."""
MAX_UNTAKEN_BYTES = 64 * 1024
"""Of a body that the application has not taken yet: beyond them nothing more is read from the connection."""
MAX_UNSENT_BYTES = 16 * 1024
"""Bytes kept for a reader that is behind, besides the kernel's buffer; its other tokens wait in the log."""
VERSIONS = ("1.0", "1.1")
FRAMING_FIELDS = frozenset((b"content-length", b"transfer-encoding", b"expect"))


class Connection(HttpToolsProtocol):
    """uvicorn's HTTP protocol with limits, as `scope["state"]["connection"]` of each request; `received` there is the
    time of the request's first byte (monotonic seconds).

    A connection is before the first byte of a request, in its head, or in its body. While the client has to send
    something, the connection is in one of the guard's deadline queues. While a complete request is being answered, it
    is in none, so no deadline ends an open stream or a long wait.

    The limits hold for the bytes and fields of a head (request line and headers), for pipelined requests, and for the
    framing of chunked bodies. uvicorn's protocol and its parser (httptools) have no such limits.
    """

    _on_lost: Callable[[], None] | None = None
    _answering: RequestResponseCycle | None = None
    """The request that is being answered; `cycle` is the last one that arrived."""
    _carried: TokenFlow | None = None
    """The writer of chunks whose `paused` is set while the reader is behind."""

    def __init__(self, *args: Any, guard: ConnectionGuard, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.url, self.headers = b"", []
        self._guard = guard
        self._max_header_bytes = guard.settings.max_header_bytes
        self._max_headers = guard.settings.max_headers
        self._queue: DeadlineQueue[Connection] | None = None
        """The deadline queue that this connection is in."""
        self._admitted = True
        self._silent = True
        """No byte has arrived yet."""
        self._last = False
        """The server stops after the request that arrives now."""
        self._dropping = False
        """Bytes that arrive are discarded."""
        self._offered = False
        """The head that was just parsed offers another protocol."""
        self._in_body = self._begun = self._ended = False
        """After a request's head; after its first byte; whether the last received bytes ended a request."""
        self._head_bytes = 0
        """Received of a head that is not complete, with blank lines before it."""
        self._unmeasured = False
        """A head that ends now may have more bytes than a head may have."""
        self._length, self._chunked = 0, False
        self._body_bytes = self._framed_bytes = 0
        """Bytes of the body without and with the framing of its chunks."""
        self._window_start = 0
        """`_body_bytes` when the current body deadline began."""
        self._max_body_bytes: int | None = None
        """Limit of `_body_bytes`, set if the request is answered before its body has ended."""
        self._unsent = 0

    @property
    def address(self) -> str:
        """The client's IP address, "" if there is none."""
        return self.client[0] if self.client else ""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as the server's own
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=MAX_UNSENT_BYTES)
        self.answers = AnswerTransport(transport, self._end)
        self._enter(self._guard.head)
        self._admitted = self._guard.admit(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave()
        self._guard.writing.leave(self)
        self._guard.release(self)
        super().connection_lost(exc)
        if self._on_lost is not None:
            self._on_lost()
        # They refer to this connection: without this, the cycle and the received bytes wait for the garbage collector.
        self.pipeline.clear()
        self.cycle = self.scope = self.answers = None  # type: ignore[assignment]  # as the library begins with them
        self._answering = None

    def shutdown(self) -> None:
        """The server stops: answer a request that is on its way; give a refused client no more time to read why."""
        answers = self.cycle is not None and not self.cycle.response_complete
        if self._dropping and not (answers and not self.cycle.disconnected):
            self.transport.close()
        elif not answers and (self._silent or (self._begun and not self._in_body)):
            self._last = True
            if self._silent:
                self._enter(self._guard.ending)
        else:
            super().shutdown()

    # --- bytes -------------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._dropping:
            return
        self._ended = False
        self._unmeasured = self._unmeasured or len(data) + self._head_bytes > self._max_header_bytes
        try:
            self._feed(data)
        except httptools.HttpParserUpgrade:  # CONNECT
            self._dropping = True
            self.cycle.keep_alive = False
            self._leave()
        except ApiError as error:
            self._refuse(error)
        except httptools.HttpParserError as error:
            cause = error.__context__
            self._refuse(
                cause if isinstance(cause, ApiError) else connection_guard.invalid_http(str(error) or "cannot be read")
            )
        else:
            self._wait_for_more(len(data))

    def _feed(self, data: bytes) -> None:
        """Parse data. The parser takes the bytes after an offer of another protocol (`Upgrade`) for that protocol's.
        This server ignores each offer (RFC 9110, 7.8): a new parser reads the head again, without its offer."""
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as offer:
                if not self._offered:
                    raise
                rest = data[offer.args[0] :]
            self._offered = False
            head = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
            head += [b"%b: %b" % field for field in self.headers if field[0] != b"upgrade"]
            self.parser = httptools.HttpRequestParser(self)
            self.parser.feed_data(b"\r\n".join(head) + b"\r\n\r\n")
            data = rest

    def _wait_for_more(self, size: int) -> None:
        """After `size` valid bytes, put the connection into the queue of its next deadline."""
        guard = self._guard
        if self._exceeds(size):
            self._refuse(self._too_large())
            return
        if self._in_body:
            if self._max_body_bytes is not None and self._body_bytes > self._max_body_bytes:
                self._linger()
            elif self._queue is not guard.body:
                self._window_start = self._body_bytes
                self._enter(guard.body)
        elif self._begun:
            if self._silent or self._queue is not guard.head:
                self._enter(guard.head)
        elif self._ended:
            if self.cycle.response_complete and not self.pipeline:
                self._enter(guard.idle)
            else:
                self._leave()
        else:  # blank lines
            return
        self._silent = False

    def _exceeds(self, size: int) -> bool:
        """Count these bytes for a head that is not complete, or for a chunked body with its framing; whether that has
        too many."""
        if self._in_body:
            self._framed_bytes += size if self._chunked else 0
            return self._framed_bytes > 2 * self._max_header_bytes + (FRAMING_PER_BYTE + 1) * self._body_bytes
        self._head_bytes += 0 if self._ended else size
        self._unmeasured = self._begun and (self._ended or self._unmeasured)
        return self._head_bytes > self._max_header_bytes

    def _too_large(self) -> ApiError:
        return connection_guard.headers_too_large(self._max_header_bytes, self._max_headers)

    # --- callbacks of the parser; its feed_data raises the errors that they raise -------------------------------------

    def on_message_begin(self) -> None:
        # The head that `_feed` parses again began when it was parsed first.
        received = self.scope["state"]["received"] if self._begun else time.monotonic()
        super().on_message_begin()
        self.scope["state"].update(connection=self, received=received)
        self._begun = True
        self._length, self._chunked = 0, False

    def on_header(self, name: bytes, value: bytes) -> None:
        """Like uvicorn's, with limits. Drops trailer fields: the application would take them for headers."""
        if self._in_body:
            return
        headers = self.headers
        if len(headers) >= self._max_headers:
            raise self._too_large()
        name = name.lower()
        if name in FRAMING_FIELDS:
            self._note_framing(name, value)
        headers.append((name, value))

    def _note_framing(self, name: bytes, value: bytes) -> None:
        if name == b"content-length":
            self._length = int(value)
        elif name == b"expect":
            self.expect_100_continue = value.lower() == b"100-continue"
        elif self._chunked or value.lower() != b"chunked":
            raise connection_guard.invalid_http("the only Transfer-Encoding taken here is 'chunked'")
        else:
            self._chunked = True

    def on_headers_complete(self) -> None:
        self._check_head()
        if self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT":
            self._offered = True
            return
        super().on_headers_complete()
        cycle = self.cycle
        cycle.transport = self.answers  # type: ignore[assignment]  # it calls these methods alone
        if self.scope["http_version"] == "1.0":  # it has neither interim answers nor chunks
            cycle.waiting_for_100_continue = False
            self.answers.unframed = True
        if self._length > MAX_UNREAD_BYTES or not self._admitted or self._last:
            cycle.keep_alive = False
        self._in_body, self._body_bytes, self._framed_bytes, self._max_body_bytes = True, 0, 0, None

    def _check_head(self) -> None:
        """Raises ApiError."""
        parser = self.parser
        if self._unmeasured:
            size = len(self.url) + sum([len(name) + len(value) + 4 for name, value in self.headers])
            if size > self._max_header_bytes:
                raise self._too_large()
        version = parser.get_http_version()
        if version not in VERSIONS or (self._chunked and version == "1.0"):
            raise connection_guard.invalid_http("its version is not taken here, or not with this Transfer-Encoding")
        if version == "1.0" and self.cycle is not None and not self.cycle.response_complete:
            raise connection_guard.invalid_http("HTTP/1.0 sends no request before the answer to the one before")
        if len(self.pipeline) >= MAX_PIPELINED:
            raise connection_guard.invalid_http(f"more than {MAX_PIPELINED} requests wait on this connection")
        if not self._admitted:
            self._admitted = self._guard.admit(self)
            if not self._admitted:
                self._check_probe()

    def _check_probe(self) -> None:
        """Refuse all requests except health probes on connections beyond the limits. Raises ApiError."""
        is_probe = self.url.partition(b"?")[0].decode("latin-1") in PROBES and not (self._length or self._chunked)
        if not is_probe or not self._guard.admit_probe(self):
            raise self._guard.refusal()

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        cycle = self.cycle
        if cycle.response_complete:
            return
        cycle.body += body
        if len(cycle.body) > MAX_UNTAKEN_BYTES:
            self.flow.pause_reading()
        cycle.message_event.set()

    def on_message_complete(self) -> None:
        if self._offered:
            return
        self._in_body = self._begun = False
        self._ended = True
        self._head_bytes = 0
        cycle = self.cycle
        if cycle.response_complete:
            return
        cycle.more_body = False
        cycle.message_event.set()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        """Like uvicorn's, without a timer for each answer."""
        self.server_state.total_requests += 1
        if self.transport.is_closing() or self._queue is self._guard.lingering:
            return
        self.flow.resume_reading()
        if self.pipeline:
            cycle, app = self.pipeline.pop()
            self._start_asgi_task(cycle, app)
        elif self._in_body:
            self._max_body_bytes = self._body_bytes + MAX_UNREAD_BYTES
        elif not self._begun and not self._dropping:
            self._enter(self._guard.idle)

    # --- ends --------------------------------------------------------------------------------------------------------

    def _refuse(self, error: ApiError) -> None:
        """Send the error as the answer, and end the connection. If another answer is under way, the client is not told
        the error, which is not counted: end the connection after that answer, or at once in the middle of a body."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            self.transport.write(answer_of(error, self._guard.count, self.url, self.headers))
            self._linger()
        elif not self._in_body:
            cycle.keep_alive = False
            self._dropping = True
            self._leave()
        elif cycle.response_started or self.pipeline:
            self.transport.close()
        else:
            cycle.disconnected = True
            cycle.message_event.set()
            self.transport.write(answer_of(error, self._guard.count, self.url, self.headers))
            self._linger()

    def _end(self) -> None:
        """Called after the last answer of this connection."""
        if self.transport.is_closing():
            return
        if self._in_body or self._dropping:
            self._linger()
            return
        self._leave()
        self.transport.close()
        if self.transport.get_write_buffer_size():
            self._watch_writing()

    def _linger(self) -> None:
        """Close for writing, and discard what arrives for a while. Otherwise, a client that still sends would get a
        reset, and could not read the answer."""
        self._dropping = True
        if self.transport.is_closing():
            return
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._enter(self._guard.lingering)
        self.flow.resume_reading()

    def turn_away(self) -> None:
        """Called by the guard: a newer connection replaces this one among those beyond the limits."""
        if self._dropping:
            self.transport.abort()
        elif not self.transport.is_closing():
            self.transport.write(answer_of(self._guard.refusal(), self._guard.count))
            self._leave()
            self.transport.close()

    def _enter(self, queue: DeadlineQueue[Connection]) -> None:
        if self._queue is not None:
            self._queue.leave(self)
        self._queue = queue
        queue.enter(self, self.loop.time())

    def _leave(self) -> None:
        if self._queue is not None:
            self._queue.leave(self)
            self._queue = None

    # --- deadlines that have passed; the connection has left its queue by then ---------------------------------------

    def head_overdue(self) -> None:
        """Answer 408 if a request has begun; otherwise, the client could take the 408 for its next request's answer."""
        self._queue = None
        if self._begun:
            self._refuse(connection_guard.request_timeout("header fields", "header_timeout_s"))
        else:
            self.transport.close()

    def body_overdue(self) -> None:
        """Refuse a body that arrives too slowly. If this process paused reading, the client gets a new window."""
        self._queue = None
        settings, cycle = self._guard.settings, self.cycle
        enough = settings.min_body_bytes_per_s * settings.body_timeout_s
        held_up = self.flow.read_paused or self.pipeline or cycle.waiting_for_100_continue
        if held_up or self._body_bytes - self._window_start >= enough:
            self._window_start = self._body_bytes
            self._enter(self._guard.body)
        elif cycle.response_complete:
            self.transport.close()
        else:
            self._refuse(connection_guard.request_timeout("body", "body_timeout_s"))

    def idle_overdue(self) -> None:
        self._queue = None
        if self.transport.get_write_buffer_size():
            self.transport.abort()  # the last answer was not read
        else:
            self.transport.close()

    def linger_overdue(self) -> None:
        self._queue = None
        self.transport.abort()

    def write_overdue(self) -> None:
        """Disconnect a client that has read no byte, unless an open answer watches for that itself."""
        unsent = self.transport.get_write_buffer_size()
        if self._on_lost is None and unsent >= self._unsent:
            self.transport.abort()
        else:
            self._watch_writing()

    def _watch_writing(self) -> None:
        self._unsent = self.transport.get_write_buffer_size()
        self._guard.writing.enter(self, self.loop.time())

    # --- what answers use --------------------------------------------------------------------------------------------

    def watch(self, on_lost: Callable[[], None] | None) -> None:
        """Have `on_lost` called when the client leaves: no task needs to wait for it. None ends the watch."""
        self._on_lost = on_lost
        if on_lost is not None:
            self.flow.resume_reading()  # a long body may have left the socket unread, and its end unseen
            if self.transport.is_closing():
                on_lost()

    @property
    def framed(self) -> bool:
        """Whether the present answer may have chunks, which HTTP/1.0 does not know."""
        return self.answers is None or not self.answers.unframed

    @property
    def behind(self) -> bool:
        """Whether the reader has yet to take so much that nothing more may be written."""
        return self.flow.write_paused

    def carry(self, carried: TokenFlow | None) -> bool:
        """From now on, set `carried.paused` while the reader is behind. Returns whether it is behind now."""
        self._carried = carried
        return self.flow.write_paused

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writing()
        if self._carried is not None:
            self._carried.paused = True

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():  # else the rest of the last answer has its deadline until it is sent
            self._guard.writing.leave(self)
        if self._carried is not None:
            self._carried.paused = False

    def write_chunk(self, data: bytes) -> bool:
        """Write one chunk of a chunked body. Returns False, and writes nothing, if the reader is behind.

        A chunk for a client that has disconnected is dropped; `watch` reports the disconnect.
        """
        if self.flow.write_paused:
            return False
        if not self.transport.is_closing():
            self.answers.write(CHUNK % (len(data), data))
        return True

    def begin_stream(self, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """Begin a chunked answer with status 200. Its head is sent in one piece with the first chunk. Raises ValueError
        for a header with a control character."""
        cycle = self._answering
        if cycle is None or cycle.disconnected:
            return
        fields = [b"%b: %b\r\n" % field for field in (*cycle.default_headers, *headers)]
        if not cycle.keep_alive:
            fields.append(b"connection: close\r\n")
        head = b"".join(fields)
        if len(head.translate(None, CONTROLS)) != len(head) - 2 * len(fields):
            raise ValueError("a header of an answer holds a control character")
        cycle.response_started = cycle.chunked_encoding = True
        cycle.waiting_for_100_continue = False
        self.answers.hold()
        self.answers.write(b"".join((STATUS_LINE[200], head, CHUNKED, b"\r\n")))

    def end_stream(self, data: bytes) -> bool:
        """Write the last chunk and the end of a chunked answer. Returns False, and writes nothing, if the reader is
        behind."""
        cycle = self._answering
        if self.flow.write_paused:
            return False
        if cycle is not None and not cycle.disconnected:
            self.answers.write(CHUNK % (len(data), data) + LAST_CHUNK)
            cycle.response_complete = True
            cycle.message_event.set()
            if not cycle.keep_alive:
                cycle.transport.close()
            cycle.on_response()
        return True

    def cut_off(self) -> None:
        """Disconnect a reader that does not read its answer, and drop the unread rest."""
        if self._answering is not None:  # else the client has just disconnected
            self._answering.disconnected = True  # else the library logs that the answer has no end
        self.transport.abort()
