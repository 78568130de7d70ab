"""The HTTP client of the engine `upstream`: TLS, replies that end in any way, and both event loops."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from certificates import Authority, secured
from fake_upstream import FakeUpstream, serving

from workers.engines.upstream.http import BrokenReply, ConnectError, ServerAddress, UpstreamClient


@asynccontextmanager
async def answering(*replies: bytes) -> AsyncIterator[UpstreamClient]:
    """A client of a server that writes these bytes, one for each connection, and closes it."""
    left = list(replies)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(left.pop(0))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    client = UpstreamClient(ServerAddress.of(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"), 5.0)
    try:
        yield client
    finally:
        client.close()
        server.close()


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
    b"HTTP/1.1 200 OK\r\n" + b"".join(b"x-%d-%s: z\r\n" % (n, b"y" * 900) for n in range(200)) + b"\r\n",
]


@pytest.mark.parametrize("reply", WHOLE)
async def test_a_whole_reply_is_read(reply: bytes) -> None:
    """Also one that ends with its connection."""
    async with answering(reply) as client:
        found = await client.ask("GET", "/")
    assert (found.status, found.json()) == (200, {})


@pytest.mark.parametrize("reply", BROKEN)
async def test_a_reply_that_is_not_whole_is_an_error(reply: bytes) -> None:
    async with answering(reply) as client:
        with pytest.raises(BrokenReply):
            await client.ask("GET", "/", timeout_s=5)


async def test_an_idle_connection_that_is_closed_is_no_error() -> None:
    """The server closes it as the next request arrives; it is sent again on a new one."""
    heads: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        heads.append(len(heads))
        writer.write(WHOLE[0])
        await reader.read(1)  # the next request on it
        writer.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    client = UpstreamClient(ServerAddress.of(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"), 5.0)
    for _ in range(3):
        assert (await client.ask("POST", "/tokenize", {})).status == 200
    assert len(heads) == 3
    client.close()
    server.close()


async def test_a_server_that_is_silent_is_left() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()
        closed.set()

    closed = asyncio.Event()
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    client = UpstreamClient(ServerAddress.of(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"), 5.0)
    with pytest.raises(BrokenReply, match=r"no reply within 0\.2 s"):
        await client.ask("GET", "/", timeout_s=0.2)
    await closed.wait()
    client.close()
    server.close()


async def test_tls_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server whose authority is known is asked, and any other is not."""
    known, other = Authority(tmp_path / "known"), Authority(tmp_path / "other")
    fake = FakeUpstream("vllm")
    async with serving(fake), secured(known.server("localhost"), fake.port) as port:
        monkeypatch.setenv("SSL_CERT_FILE", str(known.file))
        client = UpstreamClient(ServerAddress.of(f"https://localhost:{port}"), 5.0)
        assert (await client.ask("GET", "/v1/models")).status == 200
        client.close()
        monkeypatch.setenv("SSL_CERT_FILE", str(other.file))
        stranger = UpstreamClient(ServerAddress.of(f"https://localhost:{port}"), 5.0)
        with pytest.raises(ConnectError, match="certificate verify failed"):
            await stranger.ask("GET", "/v1/models")
        stranger.close()


@pytest.mark.parametrize(
    ("url", "base", "root", "port"),
    [
        ("http://h:1/v1", "/v1", "", 1),
        ("http://h", "/v1", "", 80),
        ("https://h/api/v1/", "/api/v1", "/api", 443),
        ("https://h/openai", "/openai", "/openai", 443),
        ("http://[::1]:8/v1", "/v1", "", 8),
    ],
)
def test_addresses(url: str, base: str, root: str, port: int) -> None:
    address = ServerAddress.of(url)
    assert (address.base, address.root, address.port) == (base, root, port)
