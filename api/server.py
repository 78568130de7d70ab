"""The HTTP server's own loop: it looks around once a second, and once it is told to stop.

The library looks ten times a second, and each look wakes a process whose caches are cold: that was a third of what an
API process without work cost (bench/NOTES.md).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import FrameType

import uvicorn

from runtime.loops import wait

TICK_INTERVAL_S = 1.0
"""The date in the answers' heads is made anew then."""
RENEW = 0
"""The library's count of a turn in which it renews the date."""


class ApiServer(uvicorn.Server):
    """Made and served in one event loop. `on_tick` is called once every TICK_INTERVAL_S."""

    def __init__(self, config: uvicorn.Config, on_tick: Callable[[], None] = lambda: None) -> None:
        super().__init__(config)
        self._on_tick = on_tick
        self._loop = asyncio.get_running_loop()
        self._told = asyncio.Event()

    async def main_loop(self) -> None:
        """Until the server is to end."""
        while not await self.on_tick(RENEW):
            self._on_tick()
            await wait(self._told, TICK_INTERVAL_S)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal, wherever it meets the loop."""
        super().handle_exit(sig, frame)
        self._loop.call_soon_threadsafe(self._told.set)
