"""HTTP to model servers: connections that are kept, proxies, errors with their kind, and server-sent events.

A connection through a proxy is a tunnel (CONNECT), so that the proxy sees neither requests nor keys of an https server,
and connections are kept as without a proxy.
"""

from __future__ import annotations

import asyncio
import base64
import errno
import ipaddress
import json
import math
import re
import select
import ssl
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar, cast
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies_environment

import httptools
import msgspec

from workers.engines.text import mended
from workers.engines.upstream.settings import ENVIRONMENT, proxy_problem


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Where a server listens."""

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
        return cls(parts.hostname or "", port, secure, parts.path.rstrip("/") or "/v1")


MAX_WORDS = 500
"""Characters of a server's own error message that are passed on."""
MAX_PARAM = 128
HIDDEN = "***"
KEY_REFUSED = (401, 402)
"""403 is about the request, as of a moderated one."""
STATUS = re.compile("[1-5][0-9][0-9]")


def decoded(data: bytes) -> Any:
    """The JSON of these bytes, also of what servers take for JSON; None if they are none."""
    with suppress(msgspec.DecodeError, ValueError, RecursionError):
        return msgspec.json.decode(data)
    return leniently_decoded(data)


INFINITY = 9999.0
"""In place of an infinite number: as a log-probability, what servers give that have none."""


MAX_LENIENT_BYTES = 64 << 10
"""Of what is decoded leniently, which takes about 2 us a byte."""


def leniently_decoded(data: bytes) -> Any:
    """What servers take for JSON; None if it is none, or too long. NaN becomes null, 1.0 becomes 1, and bytes and
    surrogates that are no text become U+FFFD."""
    if len(data) > MAX_LENIENT_BYTES:
        return None
    constants = {"NaN": None, "Infinity": INFINITY, "-Infinity": -INFINITY}
    with suppress(ValueError, RecursionError):
        found = json.loads(data.decode(errors="replace"), parse_constant=constants.get, parse_float=_number)
        return json.loads(mended(json.dumps(found, ensure_ascii=False)))
    return None


def _number(text: str) -> int | float:
    number = float(text)
    if math.isinf(number):
        return math.copysign(INFINITY, number)
    return int(number) if number.is_integer() else number


class ServerError(NamedTuple):
    """An error in a server's words."""

    words: str
    status: int
    """The HTTP status that its code names; 0: none."""
    param: str | None
    name: str
    """Its code if that is a word, as at OpenAI; "" if it has none."""


def error_of(decoded: Any) -> ServerError | None:
    """The error in any server's form; None if it is none."""
    if not isinstance(decoded, Mapping):
        return None
    error = decoded.get("error")
    if isinstance(error, str):  # TGI, Ollama
        error = {"message": error, "type": decoded.get("error_type")}
    elif not isinstance(error, Mapping):
        if decoded.get("object") != "error" and not decoded.keys() & {"message", "detail"}:
            return None
        error = decoded  # SGLang, trtllm-serve, FastAPI
    said, code, param = error.get("message", error.get("detail")), error.get("code"), error.get("param")
    words = said if isinstance(said, str) and said else str(error.get("type") or "an error without words")
    name = code if isinstance(code, str) else ""
    code = int(name) if STATUS.fullmatch(name) else code
    status = code if isinstance(code, int) and 100 <= code <= 599 else 0
    return ServerError(plain(words), status, plain(param) if isinstance(param, str) else None, name)


def plain(text: str) -> str:
    """Words in one line, without control characters: they end in terminals and logs."""
    return " ".join("".join(each if each.isprintable() else " " for each in text).split())


def without(secrets: Iterable[str], text: str) -> str:
    """A server's words without the keys that it was sent. They are cut only after this, which leaves no half of one."""
    for secret in secrets:
        text = text.replace(secret, HIDDEN) if secret else text
    return text


MAX_LINE_BYTES = 1 << 20
"""A line, an event, or an answer in one piece beyond this is refused: a server that never ends it must not fill the
worker's memory, and one event is decoded in one turn of the event loop."""
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
        self._rest = bytearray()
        """The line without an end. It grows in place: some servers write it byte by byte."""
        self._data: list[bytes] = []
        """Lines of the open event."""
        self._size = 0
        """Bytes of them."""
        self._began = self._returned = self._skips = False
        """Whether the first line has come; whether the last byte was a CR; and whether the open event is a ping."""

    def feed(self, data: bytes) -> list[bytes]:
        """The data of each event that these bytes complete. Raises LineTooLongError, if they complete no line."""
        is_open = self._rest or self._data or self._skips
        if self._returned or b"\r" in data:
            data = self._without_returns(data)
        elif not is_open and data.endswith(b"\n\n") and data.startswith(b"data: {") and data.count(b"\n") == 2:
            self._began = True
            return [data[6:-2]]  # one event, as nearly all reads bring it
        *lines, tail = data.split(b"\n")
        if lines and self._rest:
            lines[0] = bytes(self._rest) + lines[0]
            self._rest.clear()
        self._rest += tail
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


PROXY_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})")


@dataclass(frozen=True, slots=True)
class Proxy:
    """An HTTP proxy."""

    host: str
    port: int
    secure: bool
    """Whether the connection to the proxy itself is encrypted."""
    authorization: str = field(default="", repr=False)
    """Header with user and password; shown by nothing."""

    @property
    def name(self) -> str:
        """Its address without user and password."""
        return f"{'https' if self.secure else 'http'}://{bracketed(self.host)}:{self.port}"

    async def connect(self, host: str, port: int, context: ssl.SSLContext | None) -> asyncio.Transport:
        """Open a tunnel to a server, encrypted with `context`. Raises OSError, in words that name the proxy."""
        loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        own = ssl.create_default_context() if self.secure else None
        transport: asyncio.Transport | None
        try:
            transport, _ = await loop.create_connection(lambda: protocol, self.host, self.port, ssl=own)
        except OSError as error:
            raise OSError(f"no connection to the proxy {self.name}: {error.strerror or error}") from None
        target, tunnel = f"{bracketed(host)}:{port}", transport
        lines = [f"CONNECT {target} HTTP/1.1", f"Host: {target}", "User-Agent: penstock"]
        lines += [f"Proxy-Authorization: {self.authorization}"] if self.authorization else []
        head = b""
        try:
            tunnel.write(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"))
            with suppress(asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
                head = await reader.readuntil(b"\r\n\r\n")  # the server says nothing before it is spoken to
            if (found := PROXY_STATUS.match(head)) is None:
                raise OSError(f"the proxy {self.name} gave no valid reply to CONNECT {target}")
            if (status := int(found[1])) not in range(200, 300):
                reason = "needs other credentials" if status == 407 else f"refuses CONNECT {target}"
                raise OSError(f"the proxy {self.name} {reason} (HTTP {status})")
            if context is not None:
                transport = await loop.start_tls(tunnel, protocol, context, server_hostname=host)
            if transport is None:
                raise OSError(f"the proxy {self.name} closed the tunnel")
        except BaseException:  # a time limit too
            tunnel.abort()
            raise
        return transport


def proxy_for(setting: str, host: str, port: int, *, secure: bool) -> Proxy | None:
    """The proxy that leads to a server; None: there is none. Raises ValueError for a variable that names none.

    Args:
        setting: "", ENVIRONMENT, or the address of a proxy.
    """
    url = setting
    if setting == ENVIRONMENT:
        proxies = getproxies_environment()
        if _is_excluded(host, port, proxies.get("no", "")):
            return None
        url = (proxies.get("https" if secure else "http") or proxies.get("all", "")).strip()
        url = url if "://" in url or not url else f"http://{url}"
        if problem := proxy_problem(url):
            raise ValueError(f"the environment names no proxy for {host}: {problem}")
    if not url:
        return None
    parts = urlsplit(url)
    secure = parts.scheme == "https"
    authorization = ""
    if parts.username:
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        authorization = "Basic " + base64.b64encode(pair.encode()).decode()
    return Proxy(parts.hostname or "", parts.port or (443 if secure else 80), secure, authorization)


def _is_excluded(host: str, port: int, rules: str) -> bool:
    """Whether NO_PROXY excludes a server: by its name or its domain, each with or without a port, or by its address or
    network; `*` excludes all."""
    host = host.lower().rstrip(".")
    given = [rule.rstrip(".") for rule in rules.lower().replace(",", " ").split()]
    names = [rule.removeprefix("*").removeprefix(".") or rule for rule in given]
    bare, whole = f".{bracketed(host)}", f".{bracketed(host)}:{port}"
    by_name = any(name == "*" or bare.endswith(f".{name}") or whole.endswith(f".{name}") for name in names)
    return by_name or any(_is_within(host, port, name) for name in names)


def _is_within(host: str, port: int, rule: str) -> bool:
    """Whether a rule is an address or a network of the host's, with or without its port."""
    network, _, at = rule.rpartition(":")
    for each in (rule, network if at == str(port) else ""):
        with suppress(ValueError):  # one of them is a name
            if ipaddress.ip_address(host) in ipaddress.ip_network(each.strip("[]"), strict=False):
                return True
    return False


def bracketed(host: str) -> str:
    """A host in an address: one of version 6 is put into brackets."""
    return f"[{host}]" if ":" in host else host


MAX_HEAD_BYTES = 64 << 10
"""Beyond it no more of a reply's head is read."""
MAX_REPLY_BYTES = 8 << 20
"""Of a reply that is read as a whole, and of one that brings nothing: head, comments and trailers count."""
EXCESS = f"a reply of more than {MAX_REPLY_BYTES} bytes"
MAX_TURN_BYTES = 128 << 10
"""Of one server, in one turn of the event loop: a step of 256 streams has about half of it."""
CLOSED = "the server closed the connection"
SWITCHING_PROTOCOLS, FIRST_FINAL_STATUS = 101, 200
NO_HEADERS: Mapping[str, str] = MappingProxyType({})
ASK_S = 10.0
"""For what a server answers without computing."""
KEEP_IDLE_S = 4.0
"""An idle connection is used again for so long: uvicorn closes one after 5 s, and a request may meet the close."""


class ConnectError(Exception):
    """No connection to the server could be opened."""


class BrokenReply(Exception):
    """The reply broke before its end, or did not come in time."""


class Reply:
    """One reply, which is collected as a whole. The parser, httptools, calls it; the API's server needs that anyway."""

    def __init__(self) -> None:
        self.status, self.body = 0, b""
        """The status of the final reply; 0: its head has not come."""
        self.headers: Mapping[str, str] = NO_HEADERS
        self._head: dict[str, str] = {}
        self.problem = ""
        """Why it is not whole."""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.parser: Any = httptools.HttpResponseParser(self)
        """None after the end: each holds the other."""
        self.complete = self.reusable = False
        """Whether it has come to its end, and whether the server then keeps the connection."""
        self.size = 0
        """Bytes that have come, whatever they are."""

    @property
    def is_excessive(self) -> bool:
        """Whether more has come than may."""
        return self.size > MAX_REPLY_BYTES

    def json(self) -> Any:
        """The body; None if it is no JSON."""
        return decoded(self.body)

    def on_message_begin(self) -> None:
        if self.complete:
            raise ValueError("a second reply to one request")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        status = self.parser.get_status_code()
        if status == SWITCHING_PROTOCOLS:
            raise ValueError("it switches to another protocol")
        if status < FIRST_FINAL_STATUS:  # an interim reply: the final one follows
            self._head = {}
        else:
            self.status, self.headers = status, self._head

    def on_body(self, data: bytes) -> None:
        """May raise any exception, which closes the connection."""
        self.body += data

    def on_message_complete(self) -> None:
        if self.status:
            self.complete, self.reusable = True, self.parser.should_keep_alive()

    def on_end(self, problem: str) -> None:
        """Nothing follows. `problem`: why the reply is not whole; "" if it is."""
        self.problem = problem
        if not self.done.done():
            self.done.set_result(None)


R = TypeVar("R", bound=Reply)


class UpstreamConnection(asyncio.Protocol):
    """One connection. It ends with its request unless the server keeps it open.

    It pushes bodies into a reply as they are read, in its own callback, so a streamed chunk wakes no task.
    """

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._reply: Reply | None = None
        self._head_bytes = 0
        self._client: UpstreamClient
        self.idle_since = 0.0
        """When it has carried a request and could carry another one (monotonic); 0.0: it is new."""

    @property
    def usable(self) -> bool:
        """Whether it can carry another request: it is open, and nothing waits to be read, neither bytes that nobody
        asked for nor the end of the connection."""
        if self._transport is None or self._transport.is_closing() or time.monotonic() - self.idle_since > KEEP_IDLE_S:
            return False
        poll = select.poll()
        poll.register(self._transport.get_extra_info("socket").fileno(), select.POLLIN)
        return not poll.poll(0)

    def send(self, data: bytes, reply: Reply, client: UpstreamClient) -> None:
        """Write a request of this client, which is told of each read, and gets the connection back once it can carry
        another."""
        assert self._transport is not None
        self._reply, self._client, self._head_bytes = reply, client, 0
        self._transport.write(data)

    def hold(self, *, read: bool) -> None:
        """Pause reading, or go on."""
        if self._transport is not None and not self._transport.is_closing():
            (self._transport.resume_reading if read else self._transport.pause_reading)()

    def close(self) -> None:
        """Close at once, with nothing more to the reply. Idempotent."""
        self._reply = None
        if self._transport is not None:
            self._transport.abort()

    # --- the transport's callbacks -------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's has another base class

    def data_received(self, data: bytes) -> None:
        reply = self._reply
        if reply is None:  # bytes that nobody asked for
            self.close()
            return
        size, turns = len(data), self._client.turns
        reply.size += size
        turns.size += size
        if turns.size > MAX_TURN_BYTES:
            turns.look(self, size)
        if not reply.status:
            self._head_bytes += size
        try:
            reply.parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:  # raised by a reply about a strange body
            self._end(str(error.__context__ or error))
        except httptools.HttpParserError as error:
            self._end(f"no valid HTTP reply: {error}")
        else:
            if reply.size > MAX_REPLY_BYTES and reply.is_excessive:
                self._end(EXCESS)
            elif reply.complete:
                self._end("", keep=reply.reusable)
            elif not reply.status and self._head_bytes > MAX_HEAD_BYTES:
                self._end("its header is too long")

    def connection_lost(self, exc: Exception | None) -> None:
        if (reply := self._reply) is not None:
            length_known = "content-length" in reply.headers or "chunked" in reply.headers.get("transfer-encoding", "")
            ends_body = reply.status and not length_known and exc is None  # such a body ends with its connection
            self._end("" if ends_body else CLOSED)

    def _end(self, problem: str, *, keep: bool = False) -> None:
        """Nothing more comes of the reply. `keep`: what was read ends with it, and the connection stays open."""
        reply, self._reply = self._reply, None
        assert self._transport is not None
        if keep and not self._transport.is_closing():
            self.idle_since = time.monotonic()
            self._client.free(self)
        else:
            self._transport.abort()
        if reply is not None:
            reply.parser = None
            reply.on_end("" if reply.complete and not reply.is_excessive else problem)


class ReadTurns:
    """How much is read from one server in one turn of the event loop, however many connections it writes to: heartbeat,
    writes and other servers have their turn between."""

    def __init__(self) -> None:
        self.busy = set[UpstreamConnection]()
        """Those that carry a request."""
        self.size, self._watched = 0, False
        """Bytes since the last look at a turn, and whether this turn is looked at."""
        self._held = deque[UpstreamConnection]()
        """Those that have read much, in the order in which they may again."""
        self._timer: asyncio.TimerHandle | None = None

    def look(self, connection: UpstreamConnection, size: int) -> None:
        """More than MAX_TURN_BYTES have been read, in one turn or in many, the last of them by this connection: look at
        the rest of this turn, or pause if it was one. So a stream of tokens costs no more than an addition a read."""
        self.size = 0
        if self._watched or size > MAX_TURN_BYTES:
            self._pause(connection)
        else:
            self._watched = True
            asyncio.get_running_loop().call_soon(self._end)

    def _end(self) -> None:
        self.size, self._watched = 0, False

    def _pause(self, connection: UpstreamConnection) -> None:
        """Pause all connections for this turn. The one that has read much goes on as the last of its kind: one at a
        time, each after as long as the turn of the one before took, so that all else has half of the time."""
        began, paused = time.monotonic(), list(self.busy)
        for each in paused:
            each.hold(read=False)
        if connection not in self._held:
            self._held.append(connection)

        def go_on() -> None:
            for each in paused:
                if each not in self._held:
                    each.hold(read=True)
            self._rest(time.monotonic() - began)

        asyncio.get_running_loop().call_soon(go_on)

    def _rest(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._held:
            self._timer = asyncio.get_running_loop().call_later(seconds, self._release, seconds)

    def _release(self, seconds: float) -> None:
        """The first may read. If it does not pause again, the next one may after the same time."""
        self._held.popleft().hold(read=True)
        self._rest(seconds)


class UpstreamClient:
    """HTTP client of one server."""

    def __init__(self, address: ServerAddress, connect_s: float, proxy: str = "") -> None:
        """`proxy`: the setting of that name; one of the environment is read now. Raises ValueError if it is none."""
        self.address, self._connect_s = address, connect_s
        self._proxy = proxy_for(proxy, address.host, address.port, secure=address.secure)
        self._ssl = ssl.create_default_context() if address.secure else None
        self._idle: list[UpstreamConnection] = []
        self.turns = ReadTurns()
        self._closed = False

    async def exchange(self, data: bytes, begin: Callable[[UpstreamConnection], R]) -> R:
        """Send a request, as `request` gives it, and wait for its reply, which `begin` makes for the connection that
        carries it. If an idle connection turns out to be closed, the request is sent again on a new one: the server
        has not read it. Raises ConnectError."""
        connection = self._kept()
        while True:
            was_kept = connection is not None
            connection = connection or await self._connected()
            reply = begin(connection)
            try:
                self.turns.busy.add(connection)
                connection.send(data, reply, self)
                await reply.done
            finally:
                self.turns.busy.discard(connection)
                if not reply.done.done() or reply.done.cancelled():
                    connection.close()
            if not was_kept or reply.status or reply.problem != CLOSED:
                return reply
            connection = None

    def _kept(self) -> UpstreamConnection | None:
        """An idle connection."""
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection
            connection.close()
        return None

    async def _connected(self) -> UpstreamConnection:
        """A new connection. Raises ConnectError."""
        loop, address, proxy = asyncio.get_running_loop(), self.address, self._proxy
        try:
            async with asyncio.timeout(self._connect_s):
                if proxy is None:
                    made = loop.create_connection(UpstreamConnection, address.host, address.port, ssl=self._ssl)
                    return (await made)[1]
                transport = await proxy.connect(address.host, address.port, self._ssl)
        except TimeoutError:
            by = f" through the proxy {proxy.name}" if proxy is not None else ""
            raise ConnectError(f"no connection{by} within {self._connect_s:g} s") from None
        except OSError as error:
            refused = f"[Errno {errno.ECONNREFUSED}]" in str(error)  # perhaps by each address of the name
            raise ConnectError("connection refused" if refused else str(error) or type(error).__name__) from None
        connection = UpstreamConnection()
        transport.set_protocol(connection)
        connection.connection_made(transport)
        return connection

    async def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        key: str = "",
        timeout_s: float = ASK_S,
        more: Mapping[str, str] = NO_HEADERS,
        *,
        based: bool = True,
    ) -> Reply:
        """The whole reply to one request. `based`: the path is behind the base, such as /v1, else behind the root;
        `more` as in `request`. Raises ConnectError, BrokenReply."""
        encoded = b"" if body is None else msgspec.json.encode(body)
        whole = (self.address.base if based else self.address.root) + path
        data = self.request(method, whole, encoded, key, more=more)
        try:
            async with asyncio.timeout(timeout_s):
                reply = await self.exchange(data, lambda _: Reply())
        except TimeoutError:
            raise BrokenReply(f"no reply within {timeout_s:g} s") from None
        if reply.problem:
            raise BrokenReply(reply.problem)
        return reply

    def close(self) -> None:
        self._closed = True
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    def free(self, connection: UpstreamConnection) -> None:
        """The connection can carry another request."""
        if self._closed:
            connection.close()
        else:
            self._idle.append(connection)

    def request(
        self, method: str, path: str, body: bytes, key: str, *, more: Mapping[str, str], stream: bool = False
    ) -> bytes:
        """The bytes of one request; `path` with the base. The key goes into the header alone. `more`: further headers,
        of plain letters; empty ones are left out."""
        headers = {
            "Host": f"{bracketed(self.address.host)}:{self.address.port}",
            "Accept": "text/event-stream" if stream else "application/json",
            "Accept-Encoding": "identity",
            "User-Agent": "penstock",
            "Content-Type": "application/json" if body else "",
            "Content-Length": "" if method == "GET" else str(len(body)),
            "Authorization": f"Bearer {key}" if key else "",
        }
        lines = [f"{name}: {value}\r\n" for name, value in {**headers, **more}.items() if value]
        return f"{method} {path} HTTP/1.1\r\n{''.join(lines)}\r\n".encode("latin-1") + body
