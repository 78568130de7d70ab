"""How a server stops: with no request lost that was sent before its listening socket closed."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import cast

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from api.settings import ApiSettings
from api.stream.connection import Connection
from api.stream.connection_guard import ConnectionGuard, DrainingServer

ASK = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
CLIENTS = 5
PATIENCE_S = 60


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@asynccontextmanager
async def serving(kind: type[uvicorn.Server] = DrainingServer) -> AsyncIterator[tuple[uvicorn.Server, int]]:
    """A server that drains for as long as the test has patience, and its port."""
    guard = ConnectionGuard(ApiSettings())
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        http = cast(type[asyncio.Protocol], partial(Connection, guard=guard))
        config = uvicorn.Config(app, http=http, log_config=None, lifespan="off", timeout_graceful_shutdown=PATIENCE_S)
        config.load()
        server = kind(config)
        server.lifespan = config.lifespan_class(config)
        await server.startup(sockets=[listener])
        sweeping = asyncio.create_task(guard.keep_sweeping())
        yield server, listener.getsockname()[1]
        sweeping.cancel()


async def answer(client: socket.socket) -> bytes:
    """All that a client is sent. Raises ConnectionResetError."""
    client.setblocking(False)
    found, loop = b"", asyncio.get_running_loop()
    while more := await loop.sock_recv(client, 4096):
        found += more
    return found


@pytest.mark.parametrize("turns", range(8))
@pytest.mark.parametrize("begins", [b"", ASK[:10]], ids=["nothing sent", "a head begun"])
async def test_a_request_that_was_sent_before_the_end_is_answered(turns: int, begins: bytes) -> None:
    """However far the server had come with its connection: in the listener's queue, accepted, read in part."""
    async with asyncio.timeout(PATIENCE_S), serving() as (server, port):
        clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(CLIENTS)]
        for client in clients:
            client.sendall(begins)
        for _ in range(turns):
            await asyncio.sleep(0)
        for client in clients:
            client.sendall(ASK[len(begins) :])
        stopping = asyncio.create_task(server.shutdown())
        answers = [await answer(client) for client in clients]
        for client in clients:
            client.close()
        assert all(each.startswith(b"HTTP/1.1 200") and each.endswith(b"ok") for each in answers), answers
        await stopping


@pytest.mark.parametrize("begins", [b"", ASK[:10]], ids=["nothing sent", "a head begun"])
async def test_a_request_that_its_client_is_about_to_send_is_answered(begins: bytes) -> None:
    """Its connection was made before the end, so the client cannot know of it."""
    async with asyncio.timeout(PATIENCE_S), serving() as (server, port):
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(begins)
            stopping = asyncio.create_task(server.shutdown())
            while server.servers[0].sockets:
                await asyncio.sleep(0)
            client.sendall(ASK[len(begins) :])
            assert (await answer(client)).endswith(b"ok")
            await stopping


@pytest.mark.parametrize("begins", [b"", ASK], ids=["silent", "idle"])
async def test_a_client_that_asks_nothing_does_not_hold_up_the_end(begins: bytes) -> None:
    """It is disconnected long before the drain time is over."""
    async with asyncio.timeout(PATIENCE_S / 2), serving() as (server, port):
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(begins)
            while not (connections := server.server_state.connections) or (
                begins and not all(each.cycle and each.cycle.response_complete for each in connections)
            ):
                await asyncio.sleep(0.001)
            await server.shutdown()
            with suppress(ConnectionResetError):
                assert (await answer(client)).endswith(b"ok" if begins else b"")


async def test_a_signal_ends_the_server_without_waiting_for_its_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("api.stream.connection_guard.TICK_INTERVAL_S", 10 * PATIENCE_S)
    async with asyncio.timeout(PATIENCE_S), serving() as (server, _):
        ticking = asyncio.create_task(server.main_loop())
        await asyncio.sleep(0)
        assert not ticking.done()
        server.handle_exit(signal.SIGTERM, None)
        await ticking
        await server.shutdown()
