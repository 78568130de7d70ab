"""Draining server: uvicorn's server, which stops without resetting connections whose request is on its way, and looks
around once a second."""

from __future__ import annotations

import asyncio
import selectors
import socket
from types import FrameType

import uvicorn

from penstock.loops import wait

TICK_INTERVAL_S = 1.0
"""The date in the heads of answers is renewed then. The library ticks ten times as often; each tick wakes a process
whose caches are cold, which was 3.5 % of the CPU per token at 16 streams (`bench gateway --base`, 2026-11-26)."""
RENEW = 0
"""The library's count of a tick that renews the date."""

TURNS = 4
"""Turns of the event loop from accepting a connection to reading its first bytes."""
MAX_TURNS = 1000


class DrainingServer(uvicorn.Server):
    """Closing a listening socket resets the connections that wait in its queue, with the requests that their clients
    have sent already. This server accepts them first. Create it in the event loop that serves."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._loop, self._told = asyncio.get_running_loop(), asyncio.Event()

    async def main_loop(self) -> None:
        """Tick until the server is told to stop."""
        while not await self.on_tick(RENEW):
            await wait(self._told, TICK_INTERVAL_S)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop: called for a signal, which may come in the middle of any callback."""
        super().handle_exit(sig, frame)
        self._loop.call_soon_threadsafe(self._told.set)

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
