"""Redis time without asking Redis: this process's monotonic clock its offset to the server's, a bound of error.

Where two clocks stand is known only as exactly as the round trip that compared them, so every time told here has a
bound. Fences and deadlines do not use it: those go by the server's own clock, inside the scripts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from runtime.loops import ExpectedErrors, run_periodically
from streaming.errors import Unavailable
from streaming.redis.client import RedisClient

log = logging.getLogger(__name__)

RENEW_INTERVAL_S = 5.0
PROBES = 5
"""Questions per renewal, of which the fastest answer counts."""

DRIFT = 50e-6
"""How far two clocks may part, in seconds per second: what a quartz does, or a clock that is being put right."""


@dataclass(frozen=True, slots=True)
class Offset:
    """Server time less monotonic time, as it was at `taken`; all in microseconds."""

    value: int
    error: int
    taken: int

    def error_at(self, now: int) -> int:
        """The bound, grown with age."""
        return self.error + int(abs(now - self.taken) * DRIFT)

    def agrees(self, other: Offset, now: int) -> bool:
        """Whether both can be right."""
        return abs(self.value - other.value) <= self.error_at(now) + other.error_at(now)


def measured(before: int, server: int, after: int) -> Offset:
    """From one question: own time before and after it, the server's in between.

    The answer was made at some moment in between: the offset is ((server - before) + (server - after)) / 2, and is
    wrong by half the round trip at most.
    """
    return Offset(((server - before) + (server - after)) // 2, (after - before + 1) // 2 + 1, after)


def better(known: Offset | None, fresh: Offset, now: int) -> Offset:
    """Which of two to go by: the narrower, but never an old one that the new one contradicts (a clock was set)."""
    if known is None or not known.agrees(fresh, now) or fresh.error_at(now) <= known.error_at(now):
        return fresh
    return known


class Clock:
    """One per process; `keep` renews it. On a cluster each partition goes by the clock of its own server."""

    def __init__(self, wire: RedisClient) -> None:
        self._wire = wire
        self._offsets: dict[int, Offset] = {}

    def at(self, monotonic: float, partition: int) -> int:
        """A time of `time.monotonic` (0: not known) in microseconds of Redis time; 0 while that is not known either."""
        return self.times((monotonic,), partition)[0]

    def times(self, monotonic: Sequence[float], partition: int) -> list[int]:
        """The same of several."""
        offset = self._offsets.get(partition)
        if offset is None:
            return [0] * len(monotonic)
        value = offset.value
        return [int(at * 1_000_000) + value if at else 0 for at in monotonic]

    def error_us(self, partition: int) -> int:
        """The bound of what `at` tells now; 0 while it tells nothing."""
        offset = self._offsets.get(partition)
        return offset.error_at(_now_us()) if offset is not None else 0

    async def renew(self) -> None:
        """Compare the clocks. Raises Unavailable."""
        for place, partitions in (await self._wire.homes()).items():
            fresh = await self._ask(place)
            for _ in range(PROBES - 1):
                fresh = min(fresh, await self._ask(place), key=lambda offset: offset.error)
            for partition in partitions:
                self._offsets[partition] = better(self._offsets.get(partition), fresh, _now_us())

    async def _ask(self, place: str) -> Offset:
        before = _now_us()
        server = await self._wire.time_us(place)
        return measured(before, server, _now_us())

    async def keep(self) -> None:
        """Renew for ever; while Redis does not answer the bound grows."""
        expected = ExpectedErrors(Unavailable, log.debug, "the clocks could not be compared: %s")
        await run_periodically(self.renew, RENEW_INTERVAL_S, expected)


def _now_us() -> int:
    return time.monotonic_ns() // 1000
