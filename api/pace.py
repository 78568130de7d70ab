"""Completion rate: how many jobs of each model ended lately in this process; the ETA when there is no scheduler."""

from __future__ import annotations

import time
from collections import defaultdict, deque

WINDOW_S = 60.0
MAX_ENDS = 4096


class CompletionRate:
    """Counts ended jobs by model, over the last WINDOW_S seconds."""

    def __init__(self) -> None:
        self._ends: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=MAX_ENDS))

    def ended(self, model: str) -> None:
        """Count a job that ended now."""
        self._ends[model].append(time.monotonic())

    def eta_ms(self, model: str, position: int) -> int | None:
        """Return the milliseconds until `position` more jobs have ended at the present rate; None if it is unknown."""
        ends, now = self._ends[model], time.monotonic()
        while ends and ends[0] < now - WINDOW_S:
            ends.popleft()
        if len(ends) < 2:
            return None
        per_second = len(ends) / max(now - ends[0], 0.001)
        return int(1000 * (position + 1) / per_second)

    def retry_s(self, model: str, waiting: int) -> float:
        """Return when to retry a full lane: once a tenth of it should have ended; 5 s if the rate is unknown."""
        eta = self.eta_ms(model, waiting // 10)
        return 5.0 if eta is None else eta / 1000
