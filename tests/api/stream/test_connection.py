"""The short way for tokens, on a real server and real sockets: order, a reader who is behind, a client who leaves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from connections import serving, soon
from starlette.types import Receive, Scope, Send

from api.stream.connection import MAX_UNSENT_BYTES, Connection


@dataclass
class Door:
    """An ASGI application that begins a body and then leaves the connection to the test."""

    connection: Connection | None = None
    lost: list[bool] = field(default_factory=list)
    go_on: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection = scope["state"]["connection"]
        connection.watch(lambda: self.lost.append(True))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"<", "more_body": True})
        self.connection = connection
        await self.go_on.wait()
        await send({"type": "http.response.body", "body": b">", "more_body": False})


@dataclass
class Streams:
    """An ASGI application whose answers are streams, by their short way; each says the path that was asked for."""

    told: list[str] = field(default_factory=list)
    full: bool = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection: Connection = scope["state"]["connection"]
        path: bytes = scope["path"].encode()
        try:
            connection.begin_stream([(b"x-path", path.replace(b"|", b"\r\n"))])
        except ValueError as error:
            self.told.append(str(error))
            raise
        await asyncio.sleep(0.01)
        while self.full and connection.write_chunk(b"." * 65536):
            pass
        if not connection.end_stream(path):
            self.told.append("behind")
            await send({"type": "http.response.body", "body": path, "more_body": False})


@dataclass
class Begun:
    """An ASGI application that notes by path when each request began, and answers 204 once go_on is set."""

    noted: dict[str, float] = field(default_factory=dict)
    go_on: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.noted[scope["path"]] = scope["state"]["received"]
        await self.go_on.wait()
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})


@pytest.fixture
async def door() -> AsyncIterator[tuple[Door, int]]:
    door = Door()
    async with serving(door) as served:
        yield door, served.port
        door.go_on.set()


@asynccontextmanager
async def asking(door: Door, port: int) -> AsyncIterator[tuple[asyncio.StreamReader, Connection]]:
    """A client that has read the head of the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    await reader.readuntil(b"\r\n\r\n")
    await soon(lambda: door.connection is not None)
    assert door.connection is not None
    try:
        yield reader, door.connection
    finally:
        writer.close()
        await writer.wait_closed()


async def rest(reader: asyncio.StreamReader) -> bytes:
    """Up to the end of the body."""
    body = b""
    while not body.endswith(b"\r\n0\r\n\r\n"):
        body += await asyncio.wait_for(reader.read(2**14), 20)
    return body


async def test_chunks_stand_between_what_is_sent_before_and_after(door: tuple[Door, int]) -> None:
    async with asking(*door) as (reader, connection):
        assert connection.write_chunk(b"a" * 17) and connection.write_chunk(b"b")
        door[0].go_on.set()
        assert await rest(reader) == b"1\r\n<\r\n11\r\n" + b"a" * 17 + b"\r\n1\r\nb\r\n1\r\n>\r\n0\r\n\r\n"


async def test_a_reader_who_is_behind_gets_nothing_more_until_there_is_room(door: tuple[Door, int]) -> None:
    async with asking(*door) as (reader, connection):
        written = 0
        while connection.write_chunk(b"%08d" % written + b"." * 4088):
            written += 1
            await asyncio.sleep(0)
            assert written < 100_000, "the connection never says that it is congested"
        assert connection.transport.get_write_buffer_size() < MAX_UNSENT_BYTES + 8192, (
            "its rest waits in the log, not here"
        )
        body = b""
        while not connection.write_chunk(b"after"):
            body += await asyncio.wait_for(reader.read(2**14), 20)
        door[0].go_on.set()
        body += await rest(reader)
        numbers = [int(line[:8]) for line in body.split(b"\r\n") if line.endswith(b"....")]
        assert numbers == list(range(written))
        assert body.endswith(b"5\r\nafter\r\n1\r\n>\r\n0\r\n\r\n")


async def test_whoever_writes_by_itself_is_told_when_the_reader_is_behind(door: tuple[Door, int]) -> None:
    class Writer:
        paused = False

    writer, other = Writer(), Writer()
    async with asking(*door) as (reader, connection):
        assert not connection.carry(writer)
        while not writer.paused:
            connection.transport.write(b"3e8\r\n" + b"." * 1000 + b"\r\n")
            await asyncio.sleep(0)
        assert connection.carry(other) and not other.paused
        connection.carry(writer)
        while writer.paused:
            await asyncio.wait_for(reader.read(2**14), 20)
        connection.carry(None)
        door[0].go_on.set()
        await rest(reader)


async def test_a_client_who_leaves_is_told_of_at_once(door: tuple[Door, int]) -> None:
    """It can still be cut off: its end and that of our patience may come in one turn of the loop."""
    async with asking(*door) as (_, connection):
        pass
    await soon(lambda: door[0].lost == [True])
    assert connection.write_chunk(b"to nobody"), "a lost client is no congestion"
    connection.cut_off()
    assert connection.transport.is_closing()


async def said(port: int, *requests: bytes, ends: int) -> bytes:
    """What a connection answers to requests that are sent together, until that many bodies have ended."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"".join(requests))
    answers = b""
    async with asyncio.timeout(20):
        while answers.count(b"0\r\n\r\n") < ends and (data := await reader.read(2**14)):
            answers += data
    writer.close()
    return answers


async def test_a_stream_begins_with_its_head_and_ends_for_the_server_too() -> None:
    """Requests that wait on the connection get their own answers, in order; the last one closes it, if it says so."""
    async with serving(Streams()) as served:
        asked = [
            b"GET /%b HTTP/1.1\r\nHost: x\r\n%b\r\n" % each for each in ((b"a", b""), (b"b", b"Connection: close\r\n"))
        ]
        first, second = (await said(served.port, *asked, ends=2)).split(b"HTTP/1.1 200 OK\r\n")[1:]
        assert b"x-path: /a\r\n" in first and first.endswith(b"\r\n\r\n2\r\n/a\r\n0\r\n\r\n")
        assert b"x-path: /b\r\n" in second and b"connection: close\r\n" in second
        assert second.endswith(b"\r\n\r\n2\r\n/b\r\n0\r\n\r\n") and b"connection: close" not in first


async def test_a_header_that_holds_a_line_break_begins_no_answer() -> None:
    streams = Streams()
    async with serving(streams) as served:
        answer = await said(served.port, b"GET /a|set-cookie:%20x HTTP/1.1\r\nHost: x\r\n\r\n", ends=1)
    assert answer.startswith(b"HTTP/1.1 500 ") and b"set-cookie" not in answer
    assert streams.told == ["a header of an answer holds a control character"]


async def test_the_end_of_a_stream_waits_for_a_reader_who_is_behind() -> None:
    streams = Streams(full=True)
    async with serving(streams) as served:
        answer = await said(served.port, b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n", ends=1)
    assert answer.endswith(b"2\r\n/a\r\n0\r\n\r\n") and streams.told == ["behind"]


@pytest.mark.parametrize("fields", [b"", b"Connection: Upgrade\r\nUpgrade: h2c\r\n"])
async def test_a_request_begins_with_its_first_byte(fields: bytes) -> None:
    """Not with the end of its head, nor when it is its turn to be answered, nor as its head is read once more."""
    begun, asked = Begun(), time.monotonic()
    async with serving(begun) as served:
        _, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(b"GET /a HTTP/1.1\r\n")
        await soon(lambda: served.open and served.connection._begun)
        more = time.monotonic()
        writer.write(b"Host: x\r\n" + fields + b"\r\n")
        await soon(lambda: begun.noted)
        next_ = time.monotonic()
        writer.write(b"GET /b HTTP/1.1\r\nHost: x\r\n\r\n")
        await soon(lambda: served.connection.pipeline)
        waits = time.monotonic()
        begun.go_on.set()
        await soon(lambda: len(begun.noted) == 2)
        writer.close()
    assert asked <= begun.noted["/a"] <= more <= next_ <= begun.noted["/b"] <= waits
