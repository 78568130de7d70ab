"""The kit's TCP proxy: it forwards, it is a black hole in one direction or both, and it never delivers a hole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from bench.chaos.http import HOST
from bench.chaos.processes import until
from bench.chaos.proxy import Proxy

Line = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def an_echo(heard: list[bytes]) -> AsyncIterator[Proxy]:
    """A proxy before a server that sends back what it hears."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with suppress(ConnectionError):
                while data := await reader.read(100):
                    heard.append(data)
                    writer.write(data)
        finally:
            writer.transport.abort()

    server = await asyncio.start_server(echo, HOST, 0)
    proxy = Proxy(server.sockets[0].getsockname()[1])
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.stop()
        server.close()


@asynccontextmanager
async def a_line(proxy: Proxy) -> AsyncIterator[Line]:
    """A connection through it."""
    line = await asyncio.open_connection(HOST, proxy.port)
    try:
        yield line
    finally:
        line[1].transport.abort()
        await asyncio.sleep(0)


async def say(line: Line, word: bytes) -> bytes:
    line[1].write(word)
    async with asyncio.timeout(30):
        return await line[0].read(100)


async def rest_of(line: Line) -> bytes:
    """What still comes before the connection ends."""
    async with asyncio.timeout(30):
        with suppress(ConnectionError):
            return await line[0].read()
    return b""


@pytest.mark.parametrize(
    ("way", "arrives"), [({}, False), ({"to_client": False}, False), ({"to_server": False}, True)], ids=str
)
async def test_a_cut_swallows_its_direction_and_is_not_healed_with_a_hole(way: dict[str, bool], arrives: bool) -> None:
    """The connection stays open; when the cut ends, it is closed, and a new one works."""
    heard: list[bytes] = []
    async with an_echo(heard) as proxy, a_line(proxy) as line:
        assert await say(line, b"one") == b"one"
        proxy.cut(**way)
        line[1].write(b"lost")
        await until(lambda: proxy.swallowed == 4, 5)
        assert (b"lost" in heard) is arrives and not line[0].at_eof()
        proxy.heal()
        assert await rest_of(line) == b""
        async with a_line(proxy) as again:
            assert await say(again, b"two") == b"two"
            proxy.drop()
            assert await rest_of(again) == b""
