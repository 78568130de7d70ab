"""Clock synchronisation with Redis: converts this process's monotonic times to Redis time, with an error bound.

Two clocks can be compared only as exactly as the round trip of the comparison, so every converted time has a bound.
Fencing and deadlines do not use this clock: scripts read the server's own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.loops import ExpectedErrors, run_periodically
from streaming.errors import Unavailable
from streaming.redis.client import RedisClient

log = logging.getLogger(__name__)

RENEW_INTERVAL_S = 5.0
PROBES = 5
"""TIME commands per renewal; the one with the shortest round trip counts."""

DRIFT = 50e-6
"""The most that two clocks drift apart, in seconds per second: by their quartzes, or while one is being adjusted."""


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """Server time minus monotonic time, as measured at `taken`; all in microseconds."""

    value: int
    error: int
    taken: int


def measured(before: int, server: int, after: int) -> ClockOffset:
    """Compute the offset from one round trip: this process's time before and after it, the server's in between.

    The server read its clock at some moment in between, so the offset ((server - before) + (server - after)) / 2 is
    wrong by at most half the round trip.
    """
    return ClockOffset(((server - before) + (server - after)) // 2, (after - before + 1) // 2 + 1, after)


class Clock:
    """Redis clock of one process; `keep` renews it. On a cluster each partition has the clock of its own server."""

    def __init__(self, client: RedisClient) -> None:
        self._client = client
        self._offsets: dict[int, ClockOffset] = {}

    def at(self, monotonic: float, partition: int) -> int:
        """Convert a time of `time.monotonic` (0: unknown) to Redis time in microseconds; 0 while it cannot."""
        offset = self._offsets.get(partition)
        return int(monotonic * 1_000_000) + offset.value if monotonic and offset is not None else 0

    def times(self, monotonic: Sequence[float], partition: int) -> list[int]:
        """Convert several times."""
        offset = self._offsets.get(partition)
        if offset is None:
            return [0] * len(monotonic)
        return [int(at * 1_000_000) + offset.value if at else 0 for at in monotonic]

    def error_us(self, partition: int) -> int:
        """The error bound of `at` now, in microseconds, which grows with the measurement's age; 0 without an offset."""
        offset = self._offsets.get(partition)
        return offset.error + int((_now_us() - offset.taken) * DRIFT) if offset is not None else 0

    async def renew(self) -> None:
        """Measure the offset to every server. Raises Unavailable."""
        for server, partitions in (await self._client.homes()).items():
            probes = [await self._ask(server) for _ in range(PROBES)]
            self._offsets |= dict.fromkeys(partitions, min(probes, key=lambda offset: offset.error))

    async def _ask(self, server: str) -> ClockOffset:
        before = _now_us()
        server_us = await self._client.time_us(server)
        return measured(before, server_us, _now_us())

    async def keep(self) -> None:
        """Renew in a loop until cancelled; while Redis is unavailable the bound grows."""
        expected = ExpectedErrors(Unavailable, log.debug, "the clocks could not be compared: %s")
        await run_periodically(self.renew, RENEW_INTERVAL_S, expected)


def _now_us() -> int:
    return time.monotonic_ns() // 1000
