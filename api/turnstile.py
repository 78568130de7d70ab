"""Lets a few requests in per turn of the event loop, so that the first of many are under way while the next are read.

Without it all that came at once would be read before the first is put, and then the server, the worker and this
process would each in turn work for all of them while the others wait. It knows no request: whoever passes has a turn.
"""

from __future__ import annotations

import asyncio
from collections import deque

FEW = 8
"""In one turn: some 1 ms of reading. Fewer would make more commands of the same puts (bench/NOTES.md)."""


class Turnstile:
    """One per event loop."""

    def __init__(self, few: int = FEW) -> None:
        self._few = self._left = few
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._turning = False

    async def take(self) -> None:
        """Go on in this turn, or in a later one, in the order of coming."""
        if not self._turning:
            self._turning = True
            asyncio.get_running_loop().call_soon(self._turn)
        if self._left and not self._waiting:
            self._left -= 1
            return
        place = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        await place

    def _turn(self) -> None:
        """The next few; again in the next turn, until nobody waits."""
        self._left = self._few
        while self._waiting and self._left:
            place = self._waiting.popleft()
            if not place.done():  # its task was cancelled
                place.set_result(None)
                self._left -= 1
        self._turning = self._left < self._few
        if self._turning:
            asyncio.get_running_loop().call_soon(self._turn)
