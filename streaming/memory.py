"""How much room the store has left: jobs are refused while what is accepted can still be finished.

A full store refuses every write that needs memory, tokens of running jobs too. So admission stops earlier.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from streaming.errors import Unavailable
from streaming.wire import Wire

log = logging.getLogger(__name__)

FULL = 0.8
LOOK_S, LONGEST_S = 0.2, 2.0
"""Between two looks: near FULL, and where there is no limit. What a flood brings meanwhile must fit above FULL: a
second was too long for 10 MB/s into 16 MB."""
FLOOD = 100 << 20
"""Bytes a second that are never expected to come faster."""


class Headroom:
    """One per process that accepts jobs. As it was at the last look; room is taken to be there before the first."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self.reason = ""
        """Why nothing may be accepted, for people; "" while there is room."""
        self._memories: list[tuple[int, int]] = []

    @property
    def full(self) -> bool:
        """Whether to refuse new jobs."""
        return bool(self.reason)

    async def look(self) -> None:
        """Ask every primary. Raises Unavailable."""
        self._memories = await self._wire.memory()
        reason = crowded(self._memories)
        if bool(reason) != self.full:
            log.warning("%s", f"no more jobs are accepted: {reason}" if reason else "jobs are accepted again")
        self.reason = reason

    async def keep_looking(self) -> None:
        """Look for ever, whatever Redis does."""
        while True:
            try:
                await self.look()
            except Unavailable as error:
                log.debug("memory as it was: %s", error)
            await asyncio.sleep(until_next(self._memories))


def until_next(memories: Iterable[tuple[int, int]]) -> float:
    """Seconds in which no flood can fill the fullest of (bytes used, bytes allowed, 0: no limit): it is soon enough to
    look again then."""
    room = min((FULL * most - used for used, most in memories if most), default=LONGEST_S * FLOOD)
    return min(max(LOOK_S, room / FLOOD), LONGEST_S)


def crowded(memories: Iterable[tuple[int, int]]) -> str:
    """What is said of the fullest of (bytes used, bytes allowed), 0 allowed meaning no limit; "" if all have room."""
    share, used, allowed = max(((used / most, used, most) for used, most in memories if most), default=(0.0, 0, 0))
    if share < FULL:
        return ""
    return f"Redis uses {used >> 20} MiB of {allowed >> 20} MiB ({share:.0%}), and {FULL:.0%} is the most for new jobs"
