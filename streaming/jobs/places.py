"""How many jobs come before a waiting one. A lane is read once for all who ask about it within a moment."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections.abc import Sequence

from streaming.redis.client import RedisClient

MAX_COUNTED = 1_000
"""The first jobs of a lane, whose places are exact; any other is told this number."""
KEPT_S = 5.0
"""How long a lane that nobody asks about any more is remembered."""


class LaneHead:
    """The first entries of one lane, as they were at one time, or will be once they are read."""

    def __init__(self, began: float, ids: asyncio.Task[Sequence[bytes]]) -> None:
        self.began, self.ids = began, ids


class QueuePositions:
    """One per process."""

    def __init__(self, wire: RedisClient) -> None:
        self._wire = wire
        self._looks: dict[str, LaneHead] = {}
        """By lane, the last one."""

    async def before(self, partition: int, lane: str, entry: str, old_s: float = 0.0) -> int:
        """How many waiting jobs of its lane come before an entry, as it was at most `old_s` ago. Raises Unavailable."""
        asked = time.monotonic()
        while True:
            look = self._looks.get(lane)
            if look is None or look.began < asked - old_s or old_s == 0:
                look = self._look(partition, lane)
            ids = await asyncio.shield(look.ids)
            # What was put since then is not in it: its place may be behind others that are not, either.
            if look.began >= asked or len(ids) >= MAX_COUNTED or (ids and _number(ids[-1]) >= _number(entry)):
                return bisect_left(ids, _number(entry), key=_number)
            if self._looks.get(lane) is look:
                del self._looks[lane]

    def _look(self, partition: int, lane: str) -> LaneHead:
        now = time.monotonic()
        self._looks = {name: look for name, look in self._looks.items() if look.began > now - KEPT_S}
        look = self._looks[lane] = LaneHead(now, asyncio.create_task(self._read(partition, lane)))
        look.ids.add_done_callback(lambda ids: self._forget(lane, look, ids))
        return look

    def _forget(self, lane: str, look: LaneHead, ids: asyncio.Task[Sequence[bytes]]) -> None:
        """One that failed is not asked again. Whoever waited for it has the error; perhaps nobody does any more."""
        if (ids.cancelled() or ids.exception()) and self._looks.get(lane) is look:
            del self._looks[lane]

    async def _read(self, partition: int, lane: str) -> Sequence[bytes]:
        ids: Sequence[bytes] = await self._wire.call("waiting", partition, lane, MAX_COUNTED)
        return ids


def _number(entry: bytes | str) -> tuple[int, int]:
    """An entry's id, to be compared."""
    text = entry.decode() if isinstance(entry, bytes) else entry
    ms, _, number = text.partition("-")
    return int(ms), int(number)
