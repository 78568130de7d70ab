"""Timestamps of one attempt: when the engine got the job, and when its tokens came."""

from __future__ import annotations

import time

from penstock.engine import EngineTimes
from streaming.jobs.terminal import Generated
from streaming.redis.clock import Clock


class AttemptStamps:
    """Timestamps of one attempt, a few per job, in seconds of `time.monotonic`; 0.0: not reached yet, or unknown."""

    __slots__ = ("first", "last", "released", "scheduled")

    def __init__(self) -> None:
        self.released = self.scheduled = self.first = self.last = 0.0

    def release(self) -> None:
        """Stamp the hand-over to the engine."""
        self.released = time.monotonic()

    def begin(self, now: float) -> None:
        """Stamp the first token, which came `now`."""
        self.first = self.first or now

    def finish(self, times: EngineTimes | None, now: float) -> None:
        """Stamp the end of one text, which came `now`. `times`, the engine's own stamps, take precedence.

        A job of several texts begins with the first to begin and ends with the last to end.
        """
        if times is not None:
            self.scheduled = _earlier(self.scheduled, times.scheduled)
            self.first = _earlier(self.first, times.first)
        self.last = max(self.last, times.last if times is not None and times.last else now)

    def generated(self, clock: Clock, partition: int) -> Generated:
        """The stamps in Redis time, for the record. A job without a first token has no last one either."""
        known = (self.released, self.scheduled, self.first, self.last if self.first else 0.0)
        released, scheduled, first, last = clock.times(known, partition)
        return Generated(released, scheduled, first, last, clock.error_us(partition))


def _earlier(known: float, other: float) -> float:
    return min(known, other) if known and other else known or other
