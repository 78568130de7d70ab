"""The HTTP client of the engine `upstream`: no request gets another one's answer; replies that end in any way; TLS; and
proxies, real ones that open tunnels, by the setting and by the environment."""

from __future__ import annotations

import asyncio
import base64
import select
import socket
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
import uvloop
from certificates import Authority, secured
from fake_upstream import ANSWER, FakeUpstream, Fault, serving
from flow import until
from upstream_bench import HELLO, bench

from workers.engines.upstream import http
from workers.engines.upstream.http import (
    MAX_TURN_BYTES,
    BrokenReply,
    ConnectError,
    Reply,
    ServerAddress,
    UpstreamClient,
    UpstreamConnection,
    proxy_for,
)
from workers.engines.upstream.settings import UpstreamSettings, url_problem

HINTS = b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n"
PROCESSING = b"HTTP/1.1 102 Processing\r\n\r\n"
SWITCHES = b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n"
END = b"END"
"""In place of a part: the server closes the connection."""


def reply(text: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(text), text)


class Server:
    """Writes for each request the parts of the next reply, each of which the client reads by itself."""

    def __init__(self, replies: list[list[bytes]]) -> None:
        self.replies = replies
        self.connections = 0
        self.left = asyncio.Event()
        """Set once a connection has ended."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                await reader.readuntil(b"\r\n\r\n")
                for part in self.replies.pop(0):
                    if part is END:
                        return
                    writer.write(part)
                    await asyncio.sleep(0.02)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.left.set()
            writer.close()


def client_at(port: int) -> UpstreamClient:
    return UpstreamClient(ServerAddress.of(f"http://127.0.0.1:{port}"), 5.0)


@asynccontextmanager
async def talking(*replies: list[bytes]) -> AsyncIterator[tuple[Server, UpstreamClient]]:
    server = Server(list(replies))
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    client = client_at(listening.sockets[0].getsockname()[1])
    try:
        yield server, client
    finally:
        client.close()
        listening.close()


INTERIM: dict[str, list[bytes]] = {
    "in one read": [HINTS + reply(b"alice")],
    "in reads of their own": [PROCESSING, HINTS, PROCESSING, reply(b"alice")],
    "cut anywhere": [HINTS[:20], HINTS[20:] + PROCESSING[:5], PROCESSING[5:] + reply(b"alice")[:-2], b"ce"],
    "with a length": [b"HTTP/1.1 103 X\r\nContent-Length: 9\r\n\r\n", reply(b"alice")],
}


@pytest.mark.parametrize("parts", INTERIM.values(), ids=INTERIM)
async def test_an_interim_reply_ends_nothing(parts: list[bytes]) -> None:
    """The final reply goes to the request that it answers, and the next request gets its own."""
    async with talking(parts, [reply(b"bob")]) as (server, client):
        first = await client.ask("POST", "/a", {})
        second = await client.ask("POST", "/b", {})
    assert [(found.status, found.body) for found in (first, second)] == [(200, b"alice"), (200, b"bob")]
    assert "link" not in first.headers and server.connections == 1


async def test_two_requests_during_an_interim_reply_get_their_own_answers() -> None:
    """The connection is not free while its final reply has not come."""
    async with talking([HINTS, b"", reply(b"alice")], [reply(b"bob")]) as (server, client):
        alice = asyncio.create_task(client.ask("POST", "/a", {}))
        await until(lambda: len(server.replies) == 1)
        bob = await client.ask("POST", "/b", {})
        assert (bob.body, (await alice).body) == (b"bob", b"alice")
    assert server.connections == 2


@pytest.mark.parametrize("tail", [reply(b"bob's?"), b"HTTP/1.1", b"x", b"\0"])
async def test_a_connection_on_which_more_than_the_reply_came_is_closed(tail: bytes) -> None:
    """In the same read: it enters the pool neither twice nor once, so two requests never share it."""
    async with talking([reply(b"alice") + tail], [reply(b"bob")], [reply(b"carol")]) as (server, client):
        assert (await client.ask("POST", "/a", {})).body == b"alice"
        bob, carol = await asyncio.gather(client.ask("POST", "/b", {}), client.ask("POST", "/c", {}))
    assert {bob.body, carol.body} == {b"bob", b"carol"} and server.connections == 3


async def test_a_byte_that_nobody_has_read_yet_closes_an_idle_connection() -> None:
    """The event loop has had no turn since it came."""
    listening = socket.create_server(("127.0.0.1", 0))
    more, accepted = threading.Event(), list[socket.socket]()

    def serve() -> None:
        for text in (b"alice", b"bob"):
            connection, _ = listening.accept()
            accepted.append(connection)
            connection.recv(1 << 16)
            connection.sendall(reply(text))
            if text == b"alice":
                more.wait()
                connection.sendall(reply(b"whose?"))

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    client = client_at(listening.getsockname()[1])
    assert (await client.ask("POST", "/a", {})).body == b"alice"
    held = client._idle[0]._transport
    more.set()
    select.select([held.get_extra_info("socket").fileno()], [], [])  # blocks the loop until the bytes are there
    assert (await client.ask("POST", "/b", {})).body == b"bob"
    thread.join()
    client.close()
    for each in (*accepted, listening):
        each.close()


@pytest.mark.parametrize("line", [b"x: " + b"y" * 900 + b"\r\n", b"x%d: y\r\n", b"y" * 900])
async def test_a_header_without_end_is_refused(line: bytes) -> None:
    """Names that repeat and values count as well."""
    lines = b"".join(line % number if b"%d" in line else line for number in range((1 << 21) // len(line)))
    async with talking([b"HTTP/1.1 200 OK\r\n" + lines]) as (_, client):
        with pytest.raises(BrokenReply, match="its header is too long"):
            await client.ask("GET", "/")


LINE = b"x: " + b"y" * 900 + b"\r\n"
ENDLESS = {
    "a body": b"\r\n" + LINE * 400,
    "chunks": b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\ny\r\n" * 60_000,
    "trailers": b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n" + LINE * 400,
    "a chunk's extension": b"Transfer-Encoding: chunked\r\n\r\n2;" + b"y" * 360_000,
}


@pytest.mark.parametrize("what", ENDLESS)
async def test_a_reply_without_end_is_refused(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """Whatever it is made of: also what no callback of the parser tells, and what follows its body."""
    monkeypatch.setattr(http, "MAX_REPLY_BYTES", 300_000)
    async with talking([b"HTTP/1.1 200 OK\r\n" + ENDLESS[what]]) as (_, client):
        with pytest.raises(BrokenReply, match="a reply of more than"):
            await client.ask("GET", "/")


LARGEST_READ = 256 << 10
"""Of both event loops."""


class Sink(Reply):
    """Takes whatever comes."""

    is_excessive = False

    def on_body(self, data: bytes) -> None:
        self.body = data[:1]


@pytest.mark.parametrize("runs", [asyncio.run, uvloop.run])
def test_a_fast_server_gets_a_part_of_each_turn(runs: Callable[[Coroutine[None, None, None]], None]) -> None:
    """Of the event loop, to however many connections it writes; all of them are read, and a small stream beside them
    comes to its end."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        is_small = b"/small" in await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        with suppress(ConnectionError):
            for _ in range(30 if is_small else 10**6):
                writer.write(b"token" if is_small else b"y" * (1 << 18))
                await writer.drain()
                await asyncio.sleep(0.002 if is_small else 0)
        writer.close()

    async def read() -> None:
        listening = await asyncio.start_server(serve, "127.0.0.1", 0)
        client, loop = client_at(listening.sockets[0].getsockname()[1]), asyncio.get_running_loop()
        sinks, most, before = list[Sink](), 0, 0

        def begin(_: UpstreamConnection) -> Sink:
            sinks.append(Sink())
            return sinks[-1]

        def turn() -> None:
            nonlocal most, before
            total = sum(sink.size for sink in sinks)
            most, before = max(most, total - before), total
            loop.call_soon(turn)

        turn()
        large, small = (client.request("GET", path, b"", "", more={}) for path in ("/large", "/small"))
        reading = [asyncio.create_task(client.exchange(large, begin)) for _ in range(8)]
        await until(lambda: len(sinks) == 8 and all(sink.size > 10**6 for sink in sinks))
        assert not (await client.exchange(small, begin)).problem
        for each in reading:
            each.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
        listening.close()
        assert most <= 2 * MAX_TURN_BYTES + 2 * LARGEST_READ

    runs(read())


WHOLE = [
    b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n1\r\n}\r\n0\r\n\r\n",
    b"HTTP/1.0 200 OK\r\n\r\n{}",
    b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n{}",
]
BROKEN = [
    b"",
    b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n{}",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Le",
    b"SSH-2.0-OpenSSH_9.2\r\n",
    SWITCHES,
]


@pytest.mark.parametrize("data", [*WHOLE, *BROKEN])
async def test_a_reply_is_whole_or_an_error(data: bytes) -> None:
    """Also one that ends with its connection."""
    async with talking([data, END]) as (_, client):
        if data in WHOLE:
            found = await client.ask("GET", "/")
            assert (found.status, found.json()) == (200, {})
        else:
            with pytest.raises(BrokenReply):
                await client.ask("GET", "/", timeout_s=5.0)


async def test_an_idle_connection_that_is_closed_is_no_error() -> None:
    """The server closes it as the next request arrives; it is sent again on a new one."""
    async with talking([WHOLE[0]], [END], [WHOLE[0]], [END], [WHOLE[0]]) as (server, client):
        for _ in range(3):
            assert (await client.ask("POST", "/tokenize", {})).status == 200
    assert server.connections == 3


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_server_that_is_silent_is_left(*, cancelled: bool) -> None:
    """Its connection is closed, after the time or by a cancel."""
    async with talking([]) as (server, client), asyncio.timeout(30):
        asking = asyncio.create_task(client.ask("GET", "/", timeout_s=60 if cancelled else 0.2))
        await until(lambda: not (cancelled and server.replies))
        if cancelled:
            asking.cancel()
        (ended,) = await asyncio.gather(asking, return_exceptions=True)
        assert isinstance(ended, asyncio.CancelledError) if cancelled else str(ended) == "no reply within 0.2 s"
        await server.left.wait()


async def test_tls_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server whose authority is known is asked, and any other is not."""
    known, other = Authority(tmp_path / "known"), Authority(tmp_path / "other")
    fake = FakeUpstream("vllm")
    async with serving(fake), secured(known.server("localhost"), fake.port) as port:
        monkeypatch.setenv("SSL_CERT_FILE", str(known.file))
        client = UpstreamClient(ServerAddress.of(f"https://localhost:{port}"), 5.0)
        assert (await client.ask("GET", "/models")).status == 200
        client.close()
        monkeypatch.setenv("SSL_CERT_FILE", str(other.file))
        stranger = UpstreamClient(ServerAddress.of(f"https://localhost:{port}"), 5.0)
        with pytest.raises(ConnectError, match="certificate verify failed"):
            await stranger.ask("GET", "/models")


@pytest.mark.parametrize(
    ("url", "base", "root", "port"),
    [("http://h:1/v1", "/v1", "", 1), ("http://h", "/v1", "", 80), ("https://h/api/v1/", "/api/v1", "/api", 443)],
)
def test_addresses(url: str, base: str, root: str, port: int) -> None:
    address = ServerAddress.of(url)
    assert (address.base, address.root, address.port) == (base, root, port)


VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


class ConnectProxy:
    """Opens tunnels, to the servers of the test whatever name is asked for."""

    def __init__(self, credentials: str = "") -> None:
        self._wanted = b"Basic " + base64.b64encode(credentials.encode()) if credentials else b""
        self.heads: list[bytes] = []
        self.port = 0
        self.reply = b"HTTP/1.1 200 Connection established\r\n\r\n"
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def targets(self) -> list[str]:
        return [head.split(b" ")[1].decode() for head in self.heads]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        self.heads.append(head)
        if self._wanted and b"Proxy-Authorization: " + self._wanted not in head:
            writer.write(b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n")
        else:
            writer.write(self.reply)
        if b" 200 " not in self.reply or self._wanted not in head:
            writer.close()
            return
        port = int(head.split(b" ")[1].rpartition(b":")[2])
        there, back = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(_pour(reader, back), _pour(there, writer))


async def _pour(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    try:
        while data := await source.read(1 << 16):
            sink.write(data)
            await sink.drain()
    except ConnectionError:
        pass
    finally:
        sink.close()


@asynccontextmanager
async def proxying(proxy: ConnectProxy) -> AsyncIterator[str]:
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{proxy.port}"
    finally:
        server.close()


@pytest.mark.parametrize("runs", [asyncio.run, uvloop.run])
def test_requests_go_through_the_proxy_and_keep_their_connection(runs: object, tmp_path: Path) -> None:
    """Plain and encrypted; the proxy sees the server's name, and the server's certificate is checked."""

    async def ask() -> None:
        authority, proxy, fake = Authority(tmp_path / "ca"), ConnectProxy("me:s3cret"), FakeUpstream("vllm")
        async with serving(fake), secured(authority.server("localhost"), fake.port) as port, proxying(proxy) as url:
            patch.setenv("SSL_CERT_FILE", str(authority.file))
            setting = url.replace("//", "//me:s3cret@")
            for address in (f"https://localhost:{port}", f"http://localhost:{fake.port}"):
                client = UpstreamClient(ServerAddress.of(address), 5.0, setting)
                for _ in range(3):
                    assert (await client.ask("GET", "/models")).status == 200
                client.close()
        assert proxy.targets == [f"localhost:{port}", f"localhost:{fake.port}"]

    with pytest.MonkeyPatch.context() as patch:
        runs(ask())  # type: ignore[operator]


async def test_answers_and_probes_go_through_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the environment, where the settings say so; and a broken tunnel is continued like a broken connection."""
    proxy, fake = ConnectProxy(), FakeUpstream("vllm", [Fault(after=5, cut=True)])
    async with proxying(proxy) as url:
        monkeypatch.setenv("HTTP_PROXY", url)
        async with bench(fake, proxy="environment") as desk:
            answer = await desk.ask(HELLO, max_tokens=20)
        assert answer.text == "".join(ANSWER[:20]) and set(proxy.targets) == {f"127.0.0.1:{fake.port}"}
        before = len(proxy.heads)
        async with bench(FakeUpstream("vllm")) as desk:
            await desk.ask(HELLO, max_tokens=5)
        assert len(proxy.heads) == before, "the environment alone leads to no proxy"


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (b"HTTP/1.1 403 Forbidden\r\n\r\n", "refuses CONNECT 127.0.0.1:9 (HTTP 403)"),
        (b"HTTP/1.1 407 No\r\n\r\n", "needs other credentials (HTTP 407)"),
        (b"hello\r\n\r\n", "gave no valid reply"),
    ],
)
async def test_a_proxy_that_opens_no_tunnel_is_named(reply: bytes, said: str) -> None:
    """Without its password."""
    proxy = ConnectProxy()
    proxy.reply = reply
    async with proxying(proxy) as url:
        client = UpstreamClient(ServerAddress.of("http://127.0.0.1:9"), 5.0, url.replace("//", "//me:s3cret@"))
        with pytest.raises(ConnectError) as raised:
            await client.ask("GET", "/")
        assert f"the proxy {url}" in str(raised.value) and said in str(raised.value)
    with pytest.raises(ConnectError, match=f"no connection to the proxy {url}"):
        await client.ask("GET", "/")


RULES = {
    "api.example.com": {
        "*": True, "example.com": True, ".example.com": True, "*.example.com": True, "example.com.": True,
        "api.example.com:443": True, "api.example.com:80": False, "ample.com": False, "other.org, EXAMPLE.com": True,
        "": False, "10.0.0.0/8": False,
    },
    "10.1.2.3": {
        "10.1.2.3": True, "10.0.0.0/8": True, "10.1.2.3:80": False, "11.0.0.0/8": False, "10.0.0.0/8:443": True,
        "10.0.0.0/8:8000": False,
    },
    "::1": {"[::1]:443": True, "[::1]:8000": False, "::1": True},
    "fd00::1": {"fd00::/8": True, "[fd00::1]:443": True, "::1": False},
}  # fmt: skip


@pytest.mark.parametrize("host", RULES)
def test_no_proxy_excludes(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    for rule, excluded in RULES[host].items():
        monkeypatch.setenv("NO_PROXY", rule)
        assert (proxy_for("environment", host, 443, secure=True) is None) == excluded, rule


def test_the_environment_is_read_as_other_programs_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {"https_proxy": "proxy:1", "HTTPS_PROXY": "http://proxy:2", "ALL_PROXY": "http://proxy:3"}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    found = [proxy_for("environment", "h", 1, secure=secure) for secure in (True, False)]
    assert [each.port for each in found if each is not None] == [1, 3]
    monkeypatch.setenv("ALL_PROXY", "socks5://me:s3cret@p:1")
    with pytest.raises(ValueError, match="got socks5"):
        proxy_for("environment", "h", 1, secure=False)


@pytest.mark.parametrize(
    "proxy", ["proxy:3128", "socks5://p:1", "http://", "http://p:1/x", "http://me:s3cret@p:x", "http://me:s3cret@p"]
)
def test_a_setting_that_names_no_proxy_is_refused(proxy: str) -> None:
    with pytest.raises(ValueError, match="proxy: ") as raised:
        UpstreamSettings(proxy=proxy)
    assert "s3cret" not in str(raised.value)


@pytest.mark.parametrize(
    "url",
    ["", "gpu-1:8000", "ftp://gpu-1", "http://", "http://u:p@h/v1", "http://h/v1?x=1", "http://h:0/v1", "http://h:x/"],
)
def test_addresses_that_cannot_be_used_are_refused(url: str) -> None:
    assert url_problem(url) and "p@" not in url_problem(url)
