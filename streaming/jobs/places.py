"""Queue positions: counts the jobs before a waiting one; concurrent requests about a lane share one read of it."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections.abc import Sequence

from streaming.redis.client import RedisClient

MAX_COUNTED = 1_000
"""Jobs read from a lane, whose positions are exact; every other job gets this number."""
CACHE_S = 5.0
"""How long a lane's read is cached without requests."""


class LaneHead:
    """One read of a lane's first entries, finished or under way; `began` is monotonic time."""

    def __init__(self, began: float, ids: asyncio.Task[Sequence[bytes]]) -> None:
        self.began, self.ids = began, ids


class QueuePositions:
    """Positions of waiting jobs, with a cache of lane reads. One per process."""

    def __init__(self, client: RedisClient) -> None:
        self._client = client
        self._looks: dict[str, LaneHead] = {}
        """By lane: its last read."""

    async def before(self, partition: int, lane: str, entry: str, old_s: float = 0.0) -> int:
        """Count the waiting jobs before an entry of a lane, by a read at most `old_s` old. Raises Unavailable."""
        asked = time.monotonic()
        while True:
            look = self._looks.get(lane)
            if look is None or look.began < asked - old_s or old_s == 0:
                look = self._look(partition, lane)
            ids = await asyncio.shield(look.ids)
            # An entry behind the last one read was put later, perhaps behind others that were not read either.
            if look.began >= asked or len(ids) >= MAX_COUNTED or (ids and _number(ids[-1]) >= _number(entry)):
                return bisect_left(ids, _number(entry), key=_number)
            if self._looks.get(lane) is look:
                del self._looks[lane]

    def _look(self, partition: int, lane: str) -> LaneHead:
        now = time.monotonic()
        self._looks = {name: look for name, look in self._looks.items() if look.began > now - CACHE_S}
        look = self._looks[lane] = LaneHead(now, asyncio.create_task(self._read(partition, lane)))
        look.ids.add_done_callback(lambda ids: self._forget(lane, look, ids))
        return look

    def _forget(self, lane: str, look: LaneHead, ids: asyncio.Task[Sequence[bytes]]) -> None:
        """Drop a failed read from the cache, and retrieve its error: perhaps no caller waits for it any more."""
        if (ids.cancelled() or ids.exception()) and self._looks.get(lane) is look:
            del self._looks[lane]

    async def _read(self, partition: int, lane: str) -> Sequence[bytes]:
        ids: Sequence[bytes] = await self._client.call("waiting", partition, lane, MAX_COUNTED)
        return ids


def _number(entry: bytes | str) -> tuple[int, int]:
    """Parse an entry's id into numbers that can be compared."""
    text = entry.decode() if isinstance(entry, bytes) else entry
    ms, _, number = text.partition("-")
    return int(ms), int(number)
