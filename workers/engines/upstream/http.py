"""HTTP to model servers: connections that are kept, proxies, errors with their kind, and server-sent events."""

from __future__ import annotations

import asyncio
import errno
import json
import math
import select
import ssl
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol, cast
from urllib.parse import urlsplit

import httptools
import msgspec

from workers.engines.upstream.proxy import Proxy, ProxyError, proxy_for


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Where a server listens."""

    url: str
    host: str
    port: int
    secure: bool
    base: str
    """Path in front of "/chat/completions", such as "/v1", which an address without a path means too."""

    @property
    def root(self) -> str:
        """Path in front of the server's own endpoints, such as "/health"."""
        return self.base.removesuffix("/v1")

    @classmethod
    def of(cls, url: str) -> ServerAddress:
        """Parse a checked address (settings.url_problem)."""
        parts = urlsplit(url)
        secure = parts.scheme == "https"
        port = parts.port or (443 if secure else 80)
        return cls(url, parts.hostname or "", port, secure, parts.path.rstrip("/") or "/v1")


MAX_WORDS = 500
"""Characters of a server's own error message that are passed on."""
MAX_PARAM = 128
HIDDEN = "***"
KEY_REFUSED = (401, 402)
"""403 is about the request, as of a moderated one."""
MIN_STATUS, MAX_STATUS = 100, 599


def decoded(data: bytes) -> Any:
    """The JSON of these bytes, also of what servers take for JSON; None if they are none."""
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return leniently_decoded(data)


INFINITY = 9999.0
"""In place of an infinite number: as a log-probability, what servers give that have none."""


def leniently_decoded(data: bytes) -> Any:
    """What servers take for JSON; None if it is none. NaN becomes null, 1.0 becomes 1, and bytes and surrogates that
    are no text become U+FFFD."""
    constants = {"NaN": None, "Infinity": INFINITY, "-Infinity": -INFINITY}
    try:
        found = json.loads(data.decode(errors="replace"), parse_constant=constants.get, parse_float=_number)
        whole = json.dumps(found, ensure_ascii=False).encode("utf-16", "surrogatepass")
        return json.loads(whole.decode("utf-16", "replace"))
    except (ValueError, RecursionError):
        return None


def _number(text: str) -> int | float:
    number = float(text)
    if math.isinf(number):
        return math.copysign(INFINITY, number)
    return int(number) if number.is_integer() else number


def error_of(decoded: Any) -> tuple[str, int, str | None] | None:
    """The words, the status (0: not given) and the parameter of an error in any server's form; None if it is none."""
    if not isinstance(decoded, Mapping):
        return None
    inner = decoded.get("error")
    if isinstance(inner, str):  # TGI, Ollama
        return _words(inner, decoded.get("error_type")), 0, None
    if isinstance(inner, Mapping):
        return _fields(inner)
    if decoded.get("object") == "error" or "message" in decoded or "detail" in decoded:  # SGLang, trtllm-serve, FastAPI
        return _fields(decoded)
    return None


def name_of(decoded: Any) -> str:
    """The name that an error has as its code, as at OpenAI; "" if it has none."""
    inner = decoded.get("error") if isinstance(decoded, Mapping) else None
    code = inner.get("code") if isinstance(inner, Mapping) else None
    return code if isinstance(code, str) else ""


def _fields(error: Mapping[str, Any]) -> tuple[str, int, str | None]:
    said = error.get("message", error.get("detail", ""))
    code, param = error.get("code"), error.get("param")
    return _words(said, error.get("type")), _status(code), plain(param) if isinstance(param, str) else None


def plain(text: str) -> str:
    """Words in one line, without control characters: they end in terminals and logs."""
    return " ".join("".join(each if each.isprintable() else " " for each in text).split())


def without(secrets: Iterable[str], text: str) -> str:
    """A server's words without the keys that it was sent. They are cut only after this, which leaves no half of one."""
    for secret in secrets:
        text = text.replace(secret, HIDDEN) if secret else text
    return text


def _status(code: Any) -> int:
    """The HTTP status that an error's code names; 0: none."""
    if isinstance(code, str) and len(code) == len(str(MAX_STATUS)) and code.isascii() and code.isdecimal():
        code = int(code)
    return code if isinstance(code, int) and MIN_STATUS <= code <= MAX_STATUS else 0


def _words(said: Any, kind: Any) -> str:
    text = said if isinstance(said, str) and said else str(kind or "an error without words")
    return plain(text)


MAX_LINE_BYTES = 1 << 20
"""A line or an event beyond this is refused: a server that never ends it must not fill the worker's memory."""
BOM = b"\xef\xbb\xbf"
DONE = b"[DONE]"
PINGS = (b"ping", b"heartbeat", b"keepalive", b"keep-alive", b"keep_alive")
"""Names of events that only keep a connection open, in lower case."""


class LineTooLongError(Exception):
    """A line of the stream, or the data of one event, is longer than MAX_LINE_BYTES."""


class EventSplitter:
    """Splits one stream into its server-sent events.

    Lines end with LF, CRLF or CR, by WHATWG's rules; a byte order mark, comments, other fields and events without data
    are dropped. Two rules are looser, because servers break them: the end of a stream ends its last event, and a
    complete object or `[DONE]` is an event of its own although no blank line separates it from the next one.
    """

    __slots__ = ("_began", "_data", "_rest", "_returned", "_size", "_skips")

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        """Lines of the open event."""
        self._size = 0
        """Bytes of them."""
        self._began = self._returned = self._skips = False
        """Whether the first line has come; whether the last byte was a CR; and whether the open event is a ping."""

    def feed(self, data: bytes) -> list[bytes]:
        """The data of each event that these bytes complete. Raises LineTooLongError, if they complete no line."""
        if self._returned or b"\r" in data:
            data = self._without_returns(data)
        elif data.endswith(b"\n\n") and data.startswith(b"data: {") and data.count(b"\n") == 2 and not self._is_open:
            self._began = True
            return [data[6:-2]]  # one event, as nearly all reads bring it
        lines = (self._rest + data if self._rest else data).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) + self._size > MAX_LINE_BYTES and b"" not in lines:
            raise LineTooLongError
        if not self._began and lines:
            self._began, lines[0] = True, lines[0].removeprefix(BOM)
        events = list[bytes]()
        for line in lines:
            if not line:
                self._end(events)
            elif line.startswith(b"data:"):
                self._add(line[5:].strip(), events)
            elif line.startswith(b"event:"):
                self._skips = line[6:].strip().lower() in PINGS
        return events

    def flush(self) -> list[bytes]:
        """The data of an event that the end of the stream completes."""
        return self.feed(b"\n\n") if self._rest or self._data else []

    @property
    def _is_open(self) -> bool:
        return bool(self._rest or self._data or self._skips)

    def _add(self, data: bytes, events: list[bytes]) -> None:
        before = self._data
        if before and (before == [DONE] or (before[-1].endswith(b"}") and data.startswith((b"{", DONE)))):
            self._end(events)
        if data or self._data:
            self._data.append(data)
            self._size += len(data) + 1

    def _end(self, events: list[bytes]) -> None:
        if self._data and not self._skips:
            events.append(b"\n".join(self._data))
        self._data, self._size, self._skips = [], 0, False

    def _without_returns(self, data: bytes) -> bytes:
        if self._returned:  # a line has ended with the CR before
            data = data.removeprefix(b"\n")
        self._returned = data.endswith(b"\r") if data else False
        return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")


MAX_HEAD_BYTES = 64 << 10
MAX_REPLY_BYTES = 8 << 20
"""Of a reply that is read as a whole."""
CLOSED = "the server closed the connection"
SWITCHING_PROTOCOLS, FIRST_FINAL_STATUS = 101, 200


class Sink(Protocol):
    """Receives one reply. After `on_end` nothing follows."""

    def on_head(self, status: int, headers: Mapping[str, str]) -> None: ...

    def on_body(self, data: bytes) -> None:
        """May raise any exception, which closes the connection."""
        ...

    def on_end(self, problem: str) -> None:
        """`problem`: why the reply is not whole; "" if it is."""
        ...


class UpstreamConnection(asyncio.Protocol):
    """One connection. It ends with its request unless the server keeps it open.

    It pushes bodies into a sink as they are read, in its own callback, so a streamed chunk wakes no task. The parser is
    httptools, which the API's server needs anyway.
    """

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser: Any = None
        self._sink: Sink | None = None
        self._headers: dict[str, str] = {}
        self._head_bytes = self._header_bytes = 0
        self._headed = False
        """Whether the head of the final reply has come."""
        self._complete = self._reusable = False
        """Whether the final reply has come to its end, and whether the server then keeps the connection."""
        self._on_free: Any = None
        self.idle_since = 0.0
        self.used = 0
        """Requests that it has carried."""

    @property
    def alive(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def quiet(self) -> bool:
        """Whether nothing waits to be read: neither bytes that nobody asked for, nor the end of the connection."""
        assert self._transport is not None
        poll = select.poll()
        poll.register(self._transport.get_extra_info("socket").fileno(), select.POLLIN)
        return not poll.poll(0)

    def send(self, data: bytes, sink: Sink, on_free: Any) -> None:
        """Write a request. `on_free` is called with this connection once it can carry another."""
        assert self._transport is not None
        self._sink, self._on_free = sink, on_free
        self._parser, self._headers = httptools.HttpResponseParser(self), {}
        self._head_bytes = self._header_bytes = 0
        self._headed = self._complete = self._reusable = False
        self.used += 1
        self._transport.write(data)

    def close(self) -> None:
        """Close at once, with nothing more to the sink. Idempotent."""
        self._sink = None
        if self._transport is not None:
            self._transport.abort()

    # --- the transport's callbacks -------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's has another base class

    def data_received(self, data: bytes) -> None:
        if self._sink is None:  # bytes that nobody asked for
            self.close()
            return
        if not self._headed:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES + MAX_REPLY_BYTES:
                self._fail("its header has no end")
                return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:  # raised by a sink about a strange body
            self._fail(str(error.__context__ or error))
        except httptools.HttpParserError as error:
            self._fail(f"no valid HTTP reply: {error}")
        else:
            if self._complete:
                self._release()

    def connection_lost(self, exc: Exception | None) -> None:
        length_known = "content-length" in self._headers or "chunked" in self._headers.get("transfer-encoding", "")
        if self._headed and not length_known and exc is None:
            self._finish("")  # such a body ends with its connection
        else:
            self._finish(CLOSED)

    # --- the parser's callbacks ----------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._complete:
            raise ValueError("a second reply to one request")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > MAX_HEAD_BYTES:
            raise ValueError("its header is too long")
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status == SWITCHING_PROTOCOLS:
            raise ValueError("it switches to another protocol")
        if status < FIRST_FINAL_STATUS:  # an interim reply: the final one follows
            self._headers = {}
        elif self._sink is not None:
            self._headed = True
            self._sink.on_head(status, self._headers)

    def on_body(self, data: bytes) -> None:
        if self._sink is not None:
            self._sink.on_body(data)

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() >= FIRST_FINAL_STATUS:
            self._complete, self._reusable = True, self._parser.should_keep_alive()

    def _release(self) -> None:
        """The final reply is whole, and what was read ends with it."""
        if self._reusable and self.alive:
            self.idle_since = time.monotonic()
            sink, self._sink = self._sink, None
            self._on_free(self)
            if sink is not None:
                sink.on_end("")
        else:
            self._finish("")
            self.close()

    def _fail(self, problem: str) -> None:
        self._finish("" if self._complete else problem)
        self.close()

    def _finish(self, problem: str) -> None:
        sink, self._sink = self._sink, None
        if sink is not None:
            sink.on_end(problem)


NO_HEADERS: Mapping[str, str] = MappingProxyType({})
KEEP_IDLE_S = 4.0
"""An idle connection is used again for so long: uvicorn closes one after 5 s, and a request may meet the close."""


class ConnectError(Exception):
    """No connection to the server could be opened."""


class BrokenReply(Exception):
    """The reply broke before its end. `is_slow`: it did not come in time, and its connection was not closed."""

    def __init__(self, problem: str, *, is_slow: bool = False) -> None:
        super().__init__(problem)
        self.is_slow = is_slow


class BufferedReply:
    """A reply that is read as a whole; the sink that collects it."""

    def __init__(self) -> None:
        self.status, self.headers, self.body = 0, NO_HEADERS, b""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._parts, self._size = list[bytes](), 0

    def json(self) -> Any:
        """The body; None if it is no JSON."""
        return decoded(self.body)

    def on_head(self, status: int, headers: Mapping[str, str]) -> None:
        self.status, self.headers = status, headers

    def on_body(self, data: bytes) -> None:
        self._size += len(data)
        if self._size > MAX_REPLY_BYTES:
            raise ValueError(f"a reply of more than {MAX_REPLY_BYTES} bytes")
        self._parts.append(data)

    def on_end(self, problem: str) -> None:
        self.body = b"".join(self._parts)
        if self.done.done():
            return
        if problem:
            self.done.set_exception(BrokenReply(problem))
        else:
            self.done.set_result(None)


class UpstreamClient:
    """HTTP client of one server."""

    def __init__(self, address: ServerAddress, connect_s: float, proxy: str = "") -> None:
        """`proxy`: the setting of that name; one of the environment is read now. Raises ValueError if it is none."""
        self.address, self._connect_s = address, connect_s
        self._proxy = proxy_for(proxy, address.host, address.port, secure=address.secure)
        self._ssl = ssl.create_default_context() if address.secure else None
        self._idle: list[UpstreamConnection] = []
        self._closed = False

    async def connection(self, *, fresh: bool = False) -> UpstreamConnection:
        """An idle connection, or a new one. `fresh`: a new one in any case. Raises ConnectError."""
        while self._idle and not fresh:
            connection = self._idle.pop()
            if connection.alive and time.monotonic() - connection.idle_since < KEEP_IDLE_S and connection.quiet:
                return connection
            connection.close()
        loop, address = asyncio.get_running_loop(), self.address
        try:
            async with asyncio.timeout(self._connect_s):
                if self._proxy is not None:
                    return await self._through(self._proxy)
                _, connection = await loop.create_connection(
                    UpstreamConnection, address.host, address.port, ssl=self._ssl
                )
        except TimeoutError:
            by = f" through the proxy {self._proxy.name}" if self._proxy is not None else ""
            raise ConnectError(f"no connection{by} within {self._connect_s:g} s") from None
        except (OSError, ssl.SSLError) as error:
            raise ConnectError(_words_of(error)) from None
        return connection

    async def _through(self, proxy: Proxy) -> UpstreamConnection:
        """A connection to the server through a proxy. Raises OSError, TimeoutError."""
        address, loop = self.address, asyncio.get_running_loop()
        transport = await proxy.connect(address.host, address.port)
        try:
            if self._ssl is not None:
                found = await loop.start_tls(
                    transport, transport.get_protocol(), self._ssl, server_hostname=address.host
                )
                if found is None:
                    raise ProxyError(f"the proxy {proxy.name} closed the tunnel")
                transport = found
        except BaseException:
            transport.abort()
            raise
        connection = UpstreamConnection()
        transport.set_protocol(connection)
        connection.connection_made(transport)
        return connection

    def send(self, connection: UpstreamConnection, data: bytes, sink: Sink) -> None:
        """Write a request, as `request` gives it, on a connection."""
        connection.send(data, sink, self._free)

    async def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        key: str = "",
        timeout_s: float = 10.0,
        trace: str = "",
        more: Mapping[str, str] = NO_HEADERS,
    ) -> BufferedReply:
        """Send one request and read its whole reply; `trace`, `more` as in `request`. Raises ConnectError, BrokenReply.

        If an idle connection turns out to be closed, it is sent again on a new one: the call changes nothing there.
        """
        encoded = b"" if body is None else msgspec.json.encode(body)
        data = self.request(method, path, encoded, key, trace=trace, more=more)
        connection, reply = await self.connection(), BufferedReply()
        may_be_closed = connection.used > 0
        try:
            await self._exchange(connection, data, reply, timeout_s)
        except BrokenReply as error:
            if not may_be_closed or reply.status or error.is_slow:
                raise
            reply = BufferedReply()
            await self._exchange(await self.connection(fresh=True), data, reply, timeout_s)
        return reply

    async def _exchange(
        self, connection: UpstreamConnection, data: bytes, reply: BufferedReply, timeout_s: float
    ) -> None:
        """Raises BrokenReply."""
        done = reply.done
        try:
            self.send(connection, data, reply)
            async with asyncio.timeout(timeout_s):
                await done
        except TimeoutError:
            raise BrokenReply(f"no reply within {timeout_s:g} s", is_slow=True) from None
        finally:
            if not done.done() or done.cancelled() or done.exception() is not None:
                connection.close()

    def close(self) -> None:
        self._closed = True
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    def _free(self, connection: UpstreamConnection) -> None:
        if self._closed:
            connection.close()
        else:
            self._idle.append(connection)

    def request(
        self,
        method: str,
        path: str,
        body: bytes,
        key: str,
        *,
        stream: bool = False,
        trace: str = "",
        more: Mapping[str, str] = NO_HEADERS,
    ) -> bytes:
        """The bytes of one request; `path` with the base. The key goes into the header alone. `trace`: its
        `traceparent`. `more`: further headers, of plain letters."""
        address = self.address
        host = f"[{address.host}]" if ":" in address.host else address.host
        lines = [
            f"{method} {path} HTTP/1.1",
            f"Host: {host}:{address.port}",
            f"Accept: {'text/event-stream' if stream else 'application/json'}",
            "Accept-Encoding: identity",
            "User-Agent: penstock",
            *[f"{name}: {value}" for name, value in more.items()],
        ]
        if body:
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        elif method != "GET":
            lines.append("Content-Length: 0")
        if trace:
            lines.append(f"traceparent: {trace}")
        if key:
            lines.append(f"Authorization: Bearer {key}")
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + body


def _words_of(error: OSError) -> str:
    """Why no connection was made, in the fewest words that say it."""
    said = str(error)
    refused = f"[Errno {errno.ECONNREFUSED}]"
    if refused in said and said.count("[Errno") == said.count(refused):  # by each address of the name
        return "connection refused"
    return said
