"""HTTP server: uvicorn with a main loop that ticks once a second instead of ten times.

Each tick wakes an idle process; ten a second were a third of the CPU time of an idle API process (bench/NOTES.md).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import FrameType

import uvicorn

from runtime.loops import wait

TICK_INTERVAL_S = 1.0
"""Also how often the Date header of answers is renewed."""
RENEW = 0
"""Value of uvicorn's tick counter at which it renews the Date header."""


class ApiServer(uvicorn.Server):
    """Create and run it in the same event loop. Calls `on_tick` every TICK_INTERVAL_S."""

    def __init__(self, config: uvicorn.Config, on_tick: Callable[[], None] = lambda: None) -> None:
        super().__init__(config)
        self._on_tick = on_tick
        self._loop = asyncio.get_running_loop()
        self._exit_requested = asyncio.Event()

    async def main_loop(self) -> None:
        """Tick until the server must exit."""
        while not await self.on_tick(RENEW):
            self._on_tick()
            await wait(self._exit_requested, TICK_INTERVAL_S)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal; safe at any point of the loop."""
        super().handle_exit(sig, frame)
        self._loop.call_soon_threadsafe(self._exit_requested.set)
