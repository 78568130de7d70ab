"""How fast jobs of a model have been ending lately, as far as this process has seen: the ground of every ETA."""

from __future__ import annotations

import time
from collections import defaultdict, deque

WINDOW_S = 60.0
MAX_ENDS = 4096


class CompletionRate:
    """Jobs ended per second by model, over the last minute."""

    def __init__(self) -> None:
        self._ends: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=MAX_ENDS))

    def ended(self, model: str) -> None:
        """One job ended now."""
        self._ends[model].append(time.monotonic())

    def eta_ms(self, model: str, position: int) -> int | None:
        """Milliseconds until `position` more jobs have ended at the present pace; None when there is none to go by."""
        ends, now = self._ends[model], time.monotonic()
        while ends and ends[0] < now - WINDOW_S:
            ends.popleft()
        if len(ends) < 2:
            return None
        per_second = len(ends) / max(now - ends[0], 0.001)
        return int(1000 * (position + 1) / per_second)

    def retry_s(self, model: str, waiting: int) -> float:
        """When to try again a lane that is full: when a tenth of it should have moved, or in 5 s if nobody knows."""
        eta = self.eta_ms(model, waiting // 10)
        return 5.0 if eta is None else eta / 1000
