"""Outgoing proxies, real ones that open tunnels, by the setting and by the environment; and addresses of servers."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvloop
from certificates import Authority, secured
from fake_upstream import ANSWER, FakeUpstream, Fault, serving
from upstream_bench import HELLO, bench

from workers.engines.upstream.http import ConnectError, ServerAddress, UpstreamClient
from workers.engines.upstream.proxy import proxy_for
from workers.engines.upstream.settings import UpstreamSettings, url_problem

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
                    assert (await client.ask("GET", "/v1/models")).status == 200
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
