"""In-flight budget of one server: how many requests this worker may have there at once. Pure.

Requests that wait inside a server are ordered by it, not by our lanes. So the budget grows while the server computes
all that it has, and shrinks when requests wait in it, when its KV cache fills up, or when it refuses one. A new server
with gauges is tried with twice as many each time they say that none waits, until one does (TCP's slow start).
"""

from __future__ import annotations

import math

START = 16
"""Of a server that does not say how many requests it runs."""
START_FACTOR = 2.0
BUSY_FACTOR, WAITING_FACTOR = 0.5, 0.9
MAX_KV = 0.8
"""Share of the KV cache in use from which on no more is begun."""
CUT_INTERVAL_S = 1.0
"""Within this time one cut is enough: what is in flight was sent before it."""


class InFlightBudget:
    """The budget of one server; `now` is in monotonic seconds."""

    def __init__(self, cap: int, slots: int = 0) -> None:
        """
        Args:
            cap: the most, by the settings.
            slots: how many the server runs at once, if it says so.
        """
        self._cap, self._limit = cap, 1.0
        self._workers = 1
        self._clean = 0
        self._cut_at = -math.inf
        self.saturated = False
        """Whether the gauges last said that the server has no room."""
        self.reset(slots)

    @property
    def limit(self) -> int:
        """Requests at once."""
        return max(1, min(int(self._limit), self._most // self._workers))

    def reset(self, slots: int) -> None:
        """Begin again, with a server that runs `slots` at once; 0: it does not say."""
        self._most = min(self._cap, slots) if slots else self._cap
        self._limit = float(self._most if slots else min(self._cap, START))
        self._clean, self.saturated = 0, False
        self._starting = not slots
        """Whether it was never too much yet."""

    def share(self, workers: int) -> None:
        """Take an equal part of the budget that so many workers share."""
        self._workers = max(1, workers)

    def has_room(self, in_flight: int) -> bool:
        """Whether one more request may be sent. With none in flight always: others may hold the gauges up."""
        return in_flight < self.limit and not (self.saturated and in_flight)

    def note_success(self) -> None:
        """An answer was completed. After as many as the limit, the limit grows by one."""
        self._clean += 1
        if self._clean >= self.limit and not self.saturated:
            self._limit, self._clean = min(self._limit + 1, float(self._most)), 0

    def note_busy(self, now: float) -> None:
        """The server refused a request for want of room."""
        self._cut(BUSY_FACTOR, now)

    def note_gauges(self, waiting: float, kv_share: float, in_flight: int, now: float) -> None:
        """The server says how many requests wait in it, and how full its KV cache is; `in_flight`: this worker's there.
        Those that do not wait are what it runs: no more are sent, but at least half as many as before."""
        self.saturated = waiting > 0 or kv_share > MAX_KV
        if waiting > 0:
            runs = (in_flight - waiting) / max(1.0, min(self._limit, self._most))
            self._cut(max(BUSY_FACTOR, min(WAITING_FACTOR, runs)), now)
        elif self._starting and not self.saturated and in_flight >= self.limit:
            self._limit, self._clean = min(START_FACTOR * self._limit, float(self._most)), 0

    def _cut(self, factor: float, now: float) -> None:
        self._clean, self._starting = 0, False
        if now - self._cut_at >= CUT_INTERVAL_S:
            self._limit, self._cut_at = max(1.0, min(self._limit, self._most) * factor), now
