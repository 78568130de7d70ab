"""What a client may send before anybody knows it, on a real server and real sockets: sizes, times, how many."""

from __future__ import annotations

import asyncio
import gc
import json
import resource
import weakref
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from connections import PATIENCE_S, Served, serving, soon
from starlette.types import Receive, Scope, Send

from api.settings import ApiSettings
from api.stream import connection, connection_guard
from api.stream.connection import MAX_PIPELINED, Connection
from api.stream.connection_guard import ConnectionGuard, DeadlineQueue

pytestmark = pytest.mark.slow

GET = b"GET / HTTP/1.1\r\nHost: a\r\n"
POST = b"POST / HTTP/1.1\r\nHost: a\r\n"


@dataclass
class App:
    """Answers with what it was sent. `/hold` ends, and `/late` is read, when `go_on` is set; `/early` is not read."""

    asked: list[Scope] = field(default_factory=list)
    left: int = 0
    go_on: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.asked.append(scope)
        body, more = b"", scope["path"] != "/early"
        if scope["path"] == "/late":
            await self.go_on.wait()
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.left += 1
                return
            body += message["body"]
            more = message["more_body"]
        if scope["path"].startswith("/hold"):
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"<", "more_body": True})
            await self.go_on.wait()
            await send({"type": "http.response.body", "body": b">"})
            return
        if scope["path"] == "/large":
            body = b"x" * 8 * 1024 * 1024
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
        await send({"type": "http.response.body", "body": body})


@asynccontextmanager
async def opened(**settings: Any) -> AsyncIterator[Served[App]]:
    async with serving(App(), **settings) as served:
        yield served
        served.app.go_on.set()


@pytest.fixture(autouse=True)
def look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_guard, "SWEEP_INTERVAL_S", 0.02)


@dataclass
class Client:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def rest(self) -> bytes:
        """Everything until the server closes."""
        async with asyncio.timeout(PATIENCE_S):
            return await self.reader.read()

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        """One answer of known length."""
        async with asyncio.timeout(PATIENCE_S):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            status, *lines = head.strip().split("\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
            body = await self.reader.readexactly(int(headers.get("content-length", "0")))
            return int(status.split()[1]), headers, body


@asynccontextmanager
async def client(door: Served[App], data: bytes = b"") -> AsyncIterator[Client]:
    reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
    try:
        it = Client(reader, writer)
        if data:
            await it.send(data)
        yield it
    finally:
        writer.close()


def expire(queue: DeadlineQueue[Connection]) -> int:
    """Let all deadlines of a queue pass, however little time did; how many there were."""
    return queue.sweep(asyncio.get_running_loop().time() + 10**6, 10**6)


def code_of(body: bytes) -> str:
    return str(json.loads(body)["error"]["code"])


# --- sizes ---------------------------------------------------------------------------------------------------------


def long_field(size: int) -> bytes:
    return GET + b"X: " + b"x" * size + b"\r\n\r\n"


TOO_LARGE = {
    "a long field": [long_field(17 * 1024)],
    "a field of 2 MiB": [GET + b"X: "] + [b"x" * 65536] * 32,
    "long URL": [b"GET /" + b"x" * 17 * 1024 + b" HTTP/1.1\r\nHost: a\r\n\r\n"],
    "long name": [GET + b"x" * 17 * 1024 + b": 1\r\n\r\n"],
    "many fields": [GET + b"X: 1\r\n" * 100 + b"\r\n"],
    "blank lines": [b"\r\n" * 9 * 1024],
    "trailers": [POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\n"] + [b"X: " + b"x" * 4096 + b"\r\n"] * 12,
    "chunk extension": [POST + b"Transfer-Encoding: chunked\r\n\r\n1;"] + [b"x" * 4096] * 12,
}


@pytest.mark.parametrize("what", TOO_LARGE)
@pytest.mark.parametrize("before", [b"", GET + b"\r\n", POST + b"Content-Length: 20000\r\n\r\n" + b"x" * 20000])
async def test_a_head_beyond_its_limits_is_refused(what: str, before: bytes) -> None:
    """431 and the end of the connection, also for a later request of it; the application sees nothing of it."""
    async with opened() as door, client(door, before) as it:
        if before:
            assert (await it.answer())[0] == 200
        for part in TOO_LARGE[what]:
            await it.send(part)
        status, headers, body = await it.answer()
        assert (status, code_of(body), headers["connection"]) == (431, "headers_too_large", "close")
        assert await it.rest() == b""
        assert door.refused == {"headers_too_large": 1}
        assert all(dict(scope["headers"]).keys() <= {b"host", b"content-length", b"transfer-encoding"}
                   for scope in door.app.asked)  # fmt: skip


async def test_heads_within_the_limits_pass() -> None:
    """Byte for byte up to the limit, in one piece or many, alone or behind another request."""
    room = 16 * 1024 - len(long_field(0))
    async with opened() as door, client(door) as it:
        for whole in (long_field(room), GET + b"X: 1\r\n" * 99 + b"\r\n"):
            await it.send(whole + whole)
            assert [(await it.answer())[0] for _ in range(2)] == [200, 200]
            for at in range(0, len(whole), 1021):
                await it.send(whole[at : at + 1021])
            assert (await it.answer())[0] == 200


@pytest.mark.parametrize("cut", [0, 1000, 60_000])
@pytest.mark.parametrize("behind", [long_field(90 * 1024), GET + b"X: 1\r\n" * 5000 + b"\r\n"])
async def test_a_pipelined_head_is_bounded_too(behind: bytes, cut: int) -> None:
    """Behind a body whose end comes in the same read. The request before it is answered, then the connection ends."""
    async with opened() as door, client(door, POST + b"Content-Length: 70000\r\n\r\n") as it:
        await soon(lambda: len(door.app.asked) == 1)
        (connection,) = cast(set[Connection], door.server.server_state.connections)
        whole = b"x" * 70_000 + behind
        connection.data_received(whole[: len(whole) - cut])
        connection.data_received(whole[len(whole) - cut :])
        status, _, body = await it.answer()
        assert (status, len(body)) == (200, 70_000)
        assert await it.rest() == b""
        assert not door.refused, "nobody was told"
        assert len(door.app.asked) == 1


async def test_trailers_do_not_become_header_fields() -> None:
    async with opened() as door, client(door) as it:
        await it.send(POST + b"Transfer-Encoding: chunked\r\n\r\n3;a=b\r\nabc\r\n0\r\nAuthorization: Bearer x\r\n\r\n")
        assert (await it.answer())[2] == b"abc"
        assert b"authorization" not in dict(door.app.asked[0]["headers"])


async def test_small_chunks_are_no_abuse() -> None:
    async with opened() as door, client(door) as it:
        await it.send(POST + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 50_000 + b"0\r\n\r\n")
        assert len((await it.answer())[2]) == 50_000


async def test_requests_in_advance_are_bounded() -> None:
    """So many are answered in order; more of them end the connection with the answers to those before."""
    async with opened() as door:
        async with client(door, (GET + b"\r\n") * (MAX_PIPELINED + 1)) as it:
            assert [(await it.answer())[0] for _ in range(MAX_PIPELINED + 1)] == [200] * (MAX_PIPELINED + 1)
        async with client(door, (GET + b"\r\n") * 5000) as it:
            said = await it.rest()
            assert said.count(b" 200 OK") == MAX_PIPELINED + 1
        assert len(door.app.asked) == 2 * (MAX_PIPELINED + 1)


# --- what is no request ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "head",
    [
        POST + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        POST + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n",
        POST + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
        POST + b"Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc",
        POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET /\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"CONNECT a:443 HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET / HTTP/1.1\r\nA : b\r\n\r\n",
        b"GET / HTTP/1.1\r\nA: b\r\n c\r\n\r\n",
        b"GET / HTTP/1.1\nA: b\n\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
)
async def test_what_is_no_request_is_refused(head: bytes) -> None:
    """400 in the one shape of errors, and the end of the connection."""
    async with opened() as door, client(door, head) as it:
        status, headers, body = await it.answer()
        assert (status, code_of(body), headers["connection"]) == (400, "invalid_http", "close")
        assert await it.rest() == b""
        assert all(scope["path"] == "/" for scope in door.app.asked)


@pytest.mark.parametrize(
    "head",
    [
        b"POST /v1/messages HTTP/1.1\r\nHost: a\r\nA : b\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: a\r\nAnthropic-Version: 1\r\nB: c\r\nA : b\r\n\r\n",
    ],
)
async def test_a_client_of_another_api_is_refused_in_its_form(head: bytes) -> None:
    async with opened() as door, client(door, head) as it:
        status, _, body = await it.answer()
        refused = json.loads(body)
        assert (status, refused["type"], refused["error"]["type"]) == (400, "error", "invalid_request_error")


async def test_garbage_behind_a_request_does_not_disturb_its_answer() -> None:
    async with opened() as door, client(door, b"GET /hold HTTP/1.1\r\nHost: a\r\n\r\n\x00\x01") as it:
        await soon(lambda: door.connection._dropping)
        await it.send(b"more")
        door.app.go_on.set()
        said = await it.rest()
        assert said.endswith(b"1\r\n<\r\n1\r\n>\r\n0\r\n\r\n") and b" 400 " not in said
        assert not door.refused, "nobody was told"


async def test_a_broken_body_behind_an_open_answer_ends_the_connection_untold() -> None:
    behind = POST + b"Transfer-Encoding: chunked\r\n\r\nno number\r\n"
    async with opened() as door, client(door, b"GET /hold HTTP/1.1\r\nHost: a\r\n\r\n" + behind) as it:
        assert b" 400 " not in await it.rest()
        assert not door.refused, "nobody was told"


OFFERS = (
    b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n",
    b"connection: keep-alive, UPGRADE\r\nupgrade: WebSocket\r\nSec-WebSocket-Version: 13\r\n",
    b"Upgrade: TLS/1.0, HTTP/2.0\r\nConnection: upgrade\r\n",
    b"Upgrade: h2c\r\nUpgrade: foo\r\nConnection: upgrade\r\n",
)
BODIES = (
    (b"\r\n", b""),
    (b"Content-Length: 3\r\n\r\nabc", b"abc"),
    (b"Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\nX: y\r\n\r\n", b"abc"),
    (b"Content-Length: 90000\r\n\r\n" + b"a" * 90_000, b"a" * 90_000),
)


@pytest.mark.parametrize("in_pieces", [False, True])
@pytest.mark.parametrize("offer", OFFERS)
async def test_an_offer_of_another_protocol_is_ignored(offer: bytes, in_pieces: bool) -> None:
    """Whatever its body; the connection goes on, with and without further offers, and with pipelined requests."""
    requests = [POST + offer + body for body, _ in BODIES] + [GET + b"\r\n"]
    async with opened() as door, client(door) as it:
        for request in requests if in_pieces else [b"".join(requests)]:
            for start in range(0, len(request), 40 if in_pieces and len(request) < 400 else 1_000_000):
                await it.send(request[start : start + (40 if in_pieces and len(request) < 400 else 1_000_000)])
                await asyncio.sleep(0)
        answers = [await it.answer() for _ in requests]
        assert [(status, body) for status, _, body in answers] == [(200, body) for _, body in (*BODIES, BODIES[0])]
        assert all("connection" not in headers for _, headers, _ in answers)


async def test_an_offer_changes_no_limit() -> None:
    offer = POST + b"Connection: Upgrade\r\nUpgrade: h2c\r\n"
    async with opened() as door:
        async with client(door, offer + b"X: " + b"x" * 20_000 + b"\r\n\r\n") as it:
            assert (await it.answer())[0] == 431
        async with client(door, b"".join(offer + b"\r\n" for _ in range(MAX_PIPELINED + 3))) as it:
            assert (await it.rest()).count(b"HTTP/1.1 200") == MAX_PIPELINED + 1
        async with client(door, offer + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n") as it:
            assert await it.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            await it.send(b"hi")
            assert (await it.answer())[2] == b"hi"


async def test_the_last_request_may_offer_another_protocol() -> None:
    last = POST + b"Connection: close, Upgrade\r\nUpgrade: h2c\r\nContent-Length: 2\r\n\r\nhi"
    async with opened() as door, client(door, last + b"what follows is not read") as it:
        status, headers, body = await it.answer()
        assert (status, headers["connection"], body) == (200, "close", b"hi")
        assert await it.rest() == b""


@pytest.mark.parametrize("fields", [b"", b"Connection: keep-alive\r\n", b"Connection: Upgrade\r\nUpgrade: h2c\r\n"])
async def test_http_1_0_gets_no_chunks(fields: bytes) -> None:
    """Nor an interim answer; the end of the connection is that of the body."""
    request = b"POST /hold HTTP/1.0\r\n" + fields + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\nhi"
    async with opened() as door, client(door, request) as it:
        head = await it.reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200") and b"transfer-encoding" not in head and b"connection: close" in head
        assert await it.reader.read(1) == b"<", "before the answer has ended"
        door.app.go_on.set()
        assert await it.rest() == b">"


async def test_a_body_nobody_reads_does_not_cost_the_client_its_answer() -> None:
    """A small one is read to its end, and the connection goes on; a large one ends it, after its answer was read."""
    async with opened() as door, client(door) as it:
        early = b"POST /early HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n"
        await it.send(early % 1_000_000 + b"x" * 1_000_000 + GET + b"\r\n")
        assert [(await it.answer())[0] for _ in range(2)] == [200, 200]
        await it.send(early % 50_000_000)
        for _ in range(50):
            await it.send(b"x" * 1_000_000)
        status, headers, _ = await it.answer()
        assert (status, headers["connection"], await it.rest()) == (200, "close", b"")


async def test_a_body_without_end_that_nobody_reads_ends_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer is given before its end, which no header announces; then so much of it is read, and no more."""
    monkeypatch.setattr(connection, "MAX_UNREAD_BYTES", 1000)
    head = b"POST /early HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with opened(body_timeout_s=600) as door, client(door, head) as it:
        assert (await it.answer())[0] == 200
        await it.send(b"3e8\r\n" + b"x" * 1000 + b"\r\n")
        await soon(lambda: door.connection._body_bytes == 1000)
        assert not len(door.guard.lingering)
        await it.send(b"1\r\nx\r\n")
        assert await it.rest() == b""
        assert len(door.guard.lingering) == 1


# --- times -----------------------------------------------------------------------------------------------------------


async def test_a_connection_that_says_nothing_is_closed() -> None:
    """Without a word: an answer might be taken for that to the client's next request."""
    async with opened(header_timeout_s=0.1) as door, client(door) as it:
        assert await it.rest() == b""
        await soon(lambda: door.open == 0)
        assert not door.refused


async def test_a_head_that_does_not_end_is_refused() -> None:
    """Also one that goes on and on, byte by byte, and one on a connection that has served before."""
    async with opened(header_timeout_s=0.3) as door, client(door, GET + b"\r\n") as it:
        await it.answer()
        await it.send(b"G")

        async def trickle() -> None:
            while True:
                it.writer.write(b"E")
                await asyncio.sleep(0.05)

        it.writer.write(b"ET / HTTP/1.1\r\nX: ")
        more = asyncio.create_task(trickle())
        status, _, body = await it.answer()
        more.cancel()
        assert (status, code_of(body)) == (408, "request_timeout") and b"header_timeout_s" in body
        assert await it.rest() == b""


async def test_a_body_that_stops_or_trickles_is_refused() -> None:
    """408, and the application learns that its client is gone."""
    async with opened(body_timeout_s=0.2, min_body_bytes_per_s=1000) as door:
        for pieces in (0, 10_000):
            async with client(door, POST + b"Content-Length: 100000\r\n\r\nx") as it:

                async def trickle(it: Client = it, pieces: int = pieces) -> None:
                    for _ in range(pieces):
                        it.writer.write(b"x")
                        await asyncio.sleep(0.01)

                more = asyncio.create_task(trickle())
                status, _, body = await it.answer()
                more.cancel()
                assert (status, code_of(body)) == (408, "request_timeout") and b"body_timeout_s" in body
        await soon(lambda: door.app.left == 2)


async def test_long_uploads_that_go_on_are_not_cut() -> None:
    """What the first one on the connection brought is not asked of the second."""
    async with opened(body_timeout_s=600, min_body_bytes_per_s=1) as door, client(door) as it:
        for size in (5000, 1000):
            await it.send(POST + b"Content-Length: %d\r\n\r\nx" % size)
            await soon(lambda: len(door.guard.body) == 1)
            await it.send(b"x" * (size - 2))
            await soon(lambda size=size: door.connection._body_bytes == size - 1)  # type: ignore[misc]
            assert expire(door.guard.body) == 1
            await it.send(b"x")
            status, _, body = await it.answer()
            assert (status, len(body)) == (200, size)


async def test_a_body_that_nobody_asked_for_yet_is_not_late() -> None:
    """A client that asks before it sends waits for as long as the application does."""
    head = b"POST /late HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n"
    async with opened(body_timeout_s=600) as door, client(door, head) as it:
        await soon(lambda: len(door.app.asked) == 1)
        assert [expire(door.guard.body) for _ in range(3)] == [1, 1, 1]
        door.app.go_on.set()
        assert await it.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        await it.send(b"hi")
        assert (await it.answer())[2] == b"hi"


async def test_a_body_behind_an_open_stream_is_not_late() -> None:
    """The stream goes on, whose connection is read on so that its client's leaving is seen; then the body is read."""
    async with opened(body_timeout_s=600) as door, client(door, b"GET /hold HTTP/1.1\r\nHost: a\r\n\r\n") as it:
        await it.reader.readuntil(b"<\r\n")
        await it.send(POST + b"Content-Length: 2\r\n\r\nh")
        await soon(lambda: len(door.connection.pipeline) == 1)
        door.connection.watch(lambda: None)
        assert not door.connection.flow.read_paused
        assert [expire(door.guard.body) for _ in range(3)] == [1, 1, 1]
        door.app.go_on.set()
        assert await it.reader.readuntil(b"0\r\n\r\n") == b"1\r\n>\r\n0\r\n\r\n"
        await it.send(b"i")
        assert (await it.answer())[2] == b"hi"


async def test_a_body_that_this_process_does_not_read_is_not_late() -> None:
    """The application takes several windows of the deadline before it reads on."""
    head = b"POST /late HTTP/1.1\r\nHost: a\r\nContent-Length: 3000000\r\n\r\n"
    async with opened(body_timeout_s=0.1) as door, client(door, head) as it:
        sending = asyncio.create_task(it.send(b"x" * 3_000_000))
        await asyncio.sleep(0.5)
        door.app.go_on.set()
        status, _, body = await it.answer()
        await sending
        assert (status, len(body)) == (200, 3_000_000)


async def test_neither_a_stream_nor_a_wait_is_cut() -> None:
    """No deadline is left while an answer is open, whatever the client sends meanwhile; a short one comes after it."""
    held = b"GET /hold HTTP/1.1\r\nHost: a\r\n\r\n"
    async with (
        opened(header_timeout_s=0.1, body_timeout_s=0.1) as door,
        client(door, held) as quiet,
        client(door, held + b"GET / HTT") as busy,
    ):
        connections = cast(set[Connection], door.server.server_state.connections)
        await soon(lambda: any(each._dropping for each in connections))
        await asyncio.sleep(0.3)
        door.app.go_on.set()
        assert (await busy.rest()).endswith(b"1\r\n>\r\n0\r\n\r\n")
        async with asyncio.timeout(PATIENCE_S):
            assert (await quiet.reader.readuntil(b"0\r\n\r\n")).endswith(b"1\r\n>\r\n0\r\n\r\n")
        await quiet.send(GET + b"\r\n")
        assert (await quiet.answer())[0] == 200


async def test_an_answered_connection_is_kept_for_the_next_request() -> None:
    """Longer than a silent one, and not for ever."""
    async with (
        opened(header_timeout_s=0.05, idle_timeout_s=600) as door,
        client(door, GET + b"\r\n") as it,
        client(door) as silent,
    ):
        await it.answer()
        assert await silent.rest() == b""
        await asyncio.sleep(0.1)
        await it.send(GET + b"\r\n")
        assert (await it.answer())[0] == 200
        await soon(lambda: expire(door.guard.idle) == 1)
        assert await it.rest() == b""


async def test_a_reader_of_a_whole_answer_that_takes_nothing_is_cut_off() -> None:
    """One that takes a little is not."""
    async with opened(send_timeout_s=0.2) as door:
        async with client(door, b"GET /large HTTP/1.1\r\nHost: a\r\n\r\n"):
            await soon(lambda: len(door.app.asked) == 1)
            await soon(lambda: door.open == 0)
        async with client(door, b"GET /large HTTP/1.1\r\nHost: a\r\n\r\n") as it:
            got = 0
            async with asyncio.timeout(PATIENCE_S):
                while got < 8 * 1024 * 1024:
                    got += len(await it.reader.read(256 * 1024))
                    await asyncio.sleep(0.01)


LARGE = b"GET /large HTTP/1.1\r\nHost: a\r\n"


async def test_a_reader_that_stops_near_the_end_of_its_last_answer_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Below the low-water mark of the transport the answer is still not sent, though the application need not wait."""
    monkeypatch.setattr(connection, "MAX_UNSENT_BYTES", 64 * 1024 * 1024)
    async with opened(send_timeout_s=600) as door, client(door, LARGE + b"Connection: close\r\n\r\n"):
        await soon(lambda: len(door.guard.writing) == 1)
        door.connection.resume_writing()
        assert len(door.guard.writing) == 1
        await soon(lambda: expire(door.guard.writing) == 0 and door.open == 0)


async def test_an_idle_client_that_has_not_taken_its_answer_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it did not take is not kept for it."""
    monkeypatch.setattr(connection, "MAX_UNSENT_BYTES", 64 * 1024 * 1024)
    async with opened() as door, client(door, LARGE + b"\r\n"):
        await soon(lambda: len(door.guard.idle) == 1)
        assert expire(door.guard.idle) == 1
        await soon(lambda: door.open == 0)


async def test_a_refused_client_does_not_hold_up_the_end_of_the_server() -> None:
    """It gets no time to read why, where its application has nothing to say either."""
    async with opened(body_timeout_s=600) as door, client(door, POST + b"Content-Length: 100\r\n\r\nx") as it:
        await soon(lambda: len(door.app.asked) == 1)
        expire(door.guard.body)
        assert (await it.answer())[0] == 408
        assert not door.connection.transport.is_closing()
        door.connection.shutdown()
        assert door.connection.transport.is_closing()


async def test_a_client_that_sends_on_after_its_refusal_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_guard, "LINGER_TIMEOUT_S", 0.2)
    async with opened() as door, client(door, b"\x00" * 10) as it:
        with pytest.raises(OSError, match=r"reset|[Bb]roken|lost"):
            for _ in range(100_000):
                await it.send(b"x" * 1024)
                await asyncio.sleep(0.005)
        await soon(lambda: door.open == 0)


def test_a_queue_expires_what_entered_first_and_no_more_than_it_is_told() -> None:
    expired: list[str] = []
    queue = DeadlineQueue[str](10, expired.append)
    for number, name in enumerate("abcde"):
        queue.enter(name, number)
    queue.leave("b")
    queue.leave("b")
    assert queue.sweep(9, 100) == 0
    assert queue.sweep(13, 2) == 2 and expired == ["a", "c"]
    assert queue.sweep(13, 100) == 1 and expired == ["a", "c", "d"] and len(queue) == 1


async def test_a_connection_that_is_lost_leaves_nothing_to_the_garbage_collector() -> None:
    """Collections are rare here: what connections received would stay for as long."""
    gc.collect()
    gc.disable()
    try:
        async with opened() as door:
            for data in (GET + b"\r\n", POST + b"Content-Length: 9\r\n\r\n", GET, GET + b"\r\n" + GET):
                async with client(door, data):
                    await soon(lambda: door.open == 1)
                    await asyncio.sleep(0.05)
                    lost = [weakref.ref(each) for each in door.server.server_state.connections]
                await soon(lambda: door.open == 0)
                door.app.asked.clear()
                await soon(lambda lost=lost: [each() for each in lost] == [None])  # type: ignore[misc]
    finally:
        gc.enable()


# --- how many --------------------------------------------------------------------------------------------------------


async def test_beyond_the_cap_requests_are_refused_and_probes_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """503 with Retry-After. Health is told whatever others hold open; a place that is free again is taken."""
    monkeypatch.setattr(connection_guard, "MAX_SURPLUS", 8)
    async with opened(max_connections=3) as door, client(door) as first, client(door), client(door):
        await soon(lambda: door.open == 3)
        silent = [await asyncio.open_connection("127.0.0.1", door.port) for _ in range(40)]
        for path in (b"/healthz", b"/readyz?x=1"):
            async with client(door, b"GET " + path + b" HTTP/1.1\r\nHost: a\r\n\r\n") as it:
                status, headers, _ = await it.answer()
                assert (status, headers["connection"], await it.rest()) == (200, "close", b"")
        for data in (GET + b"\r\n", b"POST /healthz HTTP/1.1\r\nContent-Length: 9\r\n\r\n"):
            async with client(door, data) as it:
                status, headers, body = await it.answer()
                assert (status, code_of(body), headers["retry-after"]) == (503, "too_many_connections", "5")
                assert b"[api] max_connections)" in body
                assert await it.rest() == b""
        await soon(lambda: door.open <= 3 + 8)
        first.writer.close()
        await soon(lambda: door.open < 3 + 8)
        async with client(door, GET + b"\r\n") as it:
            assert (await it.answer())[0] == 200
            await it.send(GET + b"\r\n")
            assert (await it.answer())[0] == 200
        for _, writer in silent:
            writer.close()
    assert [scope["path"] for scope in door.app.asked] == ["/healthz", "/readyz", "/", "/"]


async def test_connections_beyond_the_cap_that_were_refused_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that reads its refusal and stays gives its place to the next one."""
    monkeypatch.setattr(connection_guard, "MAX_SURPLUS", 2)
    monkeypatch.setattr(connection_guard, "LINGER_TIMEOUT_S", 600)
    async with opened(max_connections=1) as door, client(door), AsyncExitStack() as stack:
        await soon(lambda: door.open == 1)
        for _ in range(6):
            it = await stack.enter_async_context(client(door, GET + b"\r\n"))
            assert (await it.answer())[0] == 503
        await soon(lambda: door.open <= 1 + 2)
        assert door.refused == {"too_many_connections": 6}


async def test_the_silent_beyond_the_cap_are_told_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_guard, "MAX_SURPLUS", 1)
    async with opened(max_connections=1) as door, client(door):
        await soon(lambda: door.open == 1)
        async with client(door) as silent:
            await soon(lambda: door.open == 2)
            async with client(door):
                status, headers, body = await silent.answer()
                assert (status, code_of(body), headers["connection"]) == (503, "too_many_connections", "close")
                assert door.refused == {"too_many_connections": 1}


class Fake:
    def __init__(self, address: str = "127.0.0.1") -> None:
        self.address = address
        self.turned_away = self.overdue = 0

    def turn_away(self) -> None:
        self.turned_away += 1

    def head_overdue(self) -> None:
        self.overdue += 1

    idle_overdue = head_overdue


def test_a_connection_that_got_a_place_later_is_not_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is a health probe that is being answered; of those that wait, the oldest is."""
    monkeypatch.setattr(connection_guard, "MAX_SURPLUS", 2)
    guard = ConnectionGuard(ApiSettings(max_connections=1))
    first, later, probe, *others = [Fake() for _ in range(9)]
    assert [guard.admit(cast(Any, fake)) for fake in (first, later, probe)] == [True, False, False]
    assert guard.admit_probe(cast(Any, probe))
    guard.release(cast(Any, first))
    assert guard.admit(cast(Any, later))
    assert [guard.admit(cast(Any, fake)) for fake in others] == [False] * 6
    assert (later.turned_away, probe.turned_away) == (0, 0)
    assert [fake.turned_away for fake in others] == [1, 1, 1, 1, 0, 0]


async def test_many_deadlines_that_pass_at_once_are_handled_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    """All queues together have one portion in a turn of the loop; the rest follows without another call."""
    monkeypatch.setattr(connection_guard, "MAX_EXPIRED_PER_SWEEP", 4)
    guard, fakes = ConnectionGuard(ApiSettings()), [Fake() for _ in range(10)]
    for fake in fakes[:3]:
        guard.head.enter(cast(Any, fake), -(10.0**6))
    for fake in fakes[3:]:
        guard.idle.enter(cast(Any, fake), -(10.0**6))
    guard.sweep()
    assert [fake.overdue for fake in fakes] == [1] * 4 + [0] * 6
    await soon(lambda: all(fake.overdue == 1 for fake in fakes))


def test_one_address_does_not_take_all() -> None:
    """Loopback, proxies that are named, and sockets without an address share no count."""
    guard = ConnectionGuard(
        ApiSettings(max_connections_per_client=2, trusted_proxies=("10.0.0.0/8", "192.0.2.7", "fd00::/8"))
    )
    for address, most in (
        ("198.51.100.1", 2), ("198.51.100.2", 2), ("2001:db8::1", 2), ("fe80::1%eth0", 2), ("::ffff:198.51.100.9", 2),
        ("127.0.0.1", 9), ("127.9.9.9", 9), ("::1", 9), ("::ffff:127.0.0.1", 9), ("", 9),
        ("10.1.2.3", 9), ("::ffff:10.1.2.3", 9), ("192.0.2.7", 9), ("192.0.2.8", 2), ("fd00::1", 9),
    ):  # fmt: skip
        fakes = [cast(Any, Fake(address)) for _ in range(9)]
        assert sum([guard.admit(fake) for fake in fakes]) == most, address
        guard.release(fakes[0])
        guard.release(fakes[0])
        assert guard.admit(cast(Any, Fake(address)))


def test_an_ipv6_network_is_one_client() -> None:
    """Whoever has a /64 has as many addresses as it likes. An IPv4 address is one client however it is written."""
    guard = ConnectionGuard(ApiSettings(max_connections_per_client=2))
    clients = (
        ("2001:db8:0:1::1", "2001:db8:0:1::2", "2001:db8:0:1:ffff:ffff:ffff:ffff", "2001:db8:0:1::1%eth0"),
        ("2001:db8:0:2::1", "2001:db8:0:2:8000::", "2001:db8:0:2::3"),
        ("198.51.100.9", "::ffff:198.51.100.9", "::ffff:c633:6409"),
        ("::ffff:198.51.100.10", "198.51.100.10", "198.51.100.10"),
    )
    for addresses in clients:
        fakes = [cast(Any, Fake(address)) for address in addresses]
        assert sum(map(guard.admit, fakes)) == 2, addresses
        guard.release(fakes[0])
        assert guard.admit(fakes[-1])


def test_probes_beyond_the_limits_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_guard, "MAX_SURPLUS", 2)
    guard = ConnectionGuard(ApiSettings(max_connections=1))
    fakes = [cast(Any, Fake("127.0.0.1")) for _ in range(5)]
    assert [guard.admit(fake) for fake in fakes] == [True, False, False, False, False]
    assert [guard.admit_probe(fake) for fake in fakes[1:]] == [True, True, False, False]
    guard.release(fakes[1])
    assert guard.admit_probe(fakes[3])


def test_a_refused_connection_is_told_which_limit_it_met() -> None:
    guard = ConnectionGuard(ApiSettings(max_connections=3, max_connections_per_client=1))
    for address, limit in (("198.51.100.1", "max_connections_per_client"), ("198.51.100.2", "max_connections)")):
        guard.admit(cast(Any, Fake(address)))
        if limit == "max_connections)":
            guard.admit(cast(Any, Fake("127.0.0.1")))
        assert not guard.admit(cast(Any, Fake(address)))
        assert f"[api] {limit}" in guard.refusal().message


def test_the_limit_on_open_files_is_raised_as_far_as_it_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(1024, 100_000)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: limits.append(pair))
    assert connection_guard.allowed_connections(20_000) == 20_000
    assert limits[-1] == (20_000 + connection_guard.RESERVED_FILES, 100_000)
    assert connection_guard.allowed_connections(10_000) == 10_000 and len(limits) == 2
    limits[:] = [(1024, 4096)]
    assert connection_guard.allowed_connections(20_000) == 4096 - connection_guard.RESERVED_FILES
    assert limits[-1] == (4096, 4096)
    limits[:] = [(1024, resource.RLIM_INFINITY)]
    assert connection_guard.allowed_connections(20_000) == 20_000
    limits[:] = [(64, 64)]
    assert connection_guard.allowed_connections(20_000) == 1
