"""When one attempt passed the worker and its engine: a few times per job, never one per token.

It knows no clock but this process's monotonic one; in the record they stand in Redis time.
"""

from __future__ import annotations

import time

from streaming.jobs.terminal import Generated
from streaming.redis.clock import Clock
from workers.engines.base import EngineTimes


class AttemptStamps:
    """By `time.monotonic`; 0.0: it has not come so far, or nobody knows."""

    __slots__ = ("first", "last", "released", "scheduled")

    def __init__(self) -> None:
        self.released = self.scheduled = self.first = self.last = 0.0

    def release(self) -> None:
        """It is given to the engine now."""
        self.released = time.monotonic()

    def begin(self, now: float) -> None:
        """Its first token came `now`."""
        self.first = self.first or now

    def finish(self, times: EngineTimes | None, now: float) -> None:
        """One of its texts came to its end `now`; `times` are the engine's own, which count before ours. The first of
        several texts to be begun, and the last to end, are the job's."""
        if times is not None:
            self.scheduled = _earlier(self.scheduled, times.scheduled)
            self.first = _earlier(self.first, times.first)
        self.last = max(self.last, times.last if times is not None and times.last else now)

    def generated(self, clock: Clock, partition: int) -> Generated:
        """For the record. A job without a token has no last one either."""
        known = (self.released, self.scheduled, self.first, self.last if self.first else 0.0)
        released, scheduled, first, last = clock.times(known, partition)
        return Generated(released, scheduled, first, last, clock.error_us(partition))


def _earlier(known: float, other: float) -> float:
    return min(known, other) if known and other else known or other
