"""Server in this process: real sockets, the protocol of connections and its guard, and any application behind them."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar, cast

import uvicorn

from api.settings import ApiSettings
from api.stream.connection import Connection
from api.stream.connection_guard import ConnectionGuard
from api.stream.handshake import Handshake
from api.tls import Certificate

PATIENCE_S = 30.0

App = TypeVar("App")


@dataclass
class Served(Generic[App]):
    """The server, and what stands behind it."""

    app: App
    port: int
    guard: ConnectionGuard
    server: uvicorn.Server
    refused: Counter[str]
    certificate: Certificate | None = None

    @property
    def open(self) -> int:
        return len(self.server.server_state.connections)

    @property
    def connection(self) -> Connection:
        """The only one."""
        (found,) = self.server.server_state.connections
        return cast(Connection, found)


@asynccontextmanager
async def serving(app: App, **settings: Any) -> AsyncIterator[Served[App]]:
    """Serve until the block ends. Its sockets have small buffers."""
    refused = Counter[str]()
    guard = ConnectionGuard(ApiSettings(**settings), lambda code: refused.update([code]))
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 * 1024)
        certificate = Certificate.of(guard.settings)
        protocol = partial(Handshake, certificate=certificate) if certificate else Connection
        http = cast(type[asyncio.Protocol], partial(protocol, guard=guard))
        config = uvicorn.Config(cast(Any, app), http=http, log_config=None, lifespan="off", timeout_graceful_shutdown=1)
        server, sweeping = uvicorn.Server(config), asyncio.create_task(guard.keep_sweeping())
        task = asyncio.create_task(server._serve([listener]))
        await soon(lambda: server.started)
        yield Served(app, listener.getsockname()[1], guard, server, refused, certificate)
        server.should_exit = True
        await asyncio.wait({task}, timeout=PATIENCE_S)
        sweeping.cancel()


async def soon(condition: Callable[[], object]) -> None:
    """Wait until it holds."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.005)
