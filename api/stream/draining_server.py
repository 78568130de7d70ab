"""Draining server: uvicorn's server, which stops without resetting connections whose request is on its way."""

from __future__ import annotations

import asyncio
import selectors
import socket

import uvicorn

TURNS = 4
"""Turns of the event loop from accepting a connection to reading its first bytes."""
MAX_TURNS = 1000


class DrainingServer(uvicorn.Server):
    """Closing a listening socket resets the connections that wait in its queue, with the requests that their clients
    have sent already. This server accepts them first."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        listeners = [*(sockets or ()), *(each for server in self.servers for each in server.sockets)]
        with selectors.DefaultSelector() as selector:
            for number in {each.fileno() for each in listeners}:
                selector.register(number, selectors.EVENT_READ)
            await _until_quiet(selector)
        await super().shutdown(sockets)


async def _until_quiet(selector: selectors.BaseSelector) -> None:
    """Let the event loop accept connections until none has waited for some turns; under a flood, for MAX_TURNS."""
    quiet = 0
    for _ in range(MAX_TURNS):
        await asyncio.sleep(0)
        quiet = 0 if selector.select(0) else quiet + 1
        if quiet == TURNS:
            return
