"""Work counters of a worker, which the scheduler reads: they only grow, and the scheduler derives rates from them."""

from __future__ import annotations

from streaming.fleet.process import Served
from streaming.jobs.terminal import Terminal


class WorkCounters:
    """Counts engine steps, and ended jobs by lane. One per worker process."""

    def __init__(self) -> None:
        self.steps = 0
        self.step_s = 0.0
        self.step_tokens = 0
        self.served: dict[str, Served] = {}
        """By lane."""
        self._last: float | None = None

    def step(self, tokens: int, now: float, *, more: bool) -> None:
        """Count an engine step that produced `tokens` at `now` (monotonic seconds); `more`: some job still runs.

        A step's duration is the time since the previous one; the first step after a pause is not counted.
        """
        if self._last is not None:
            self.steps += 1
            self.step_s += now - self._last
            self.step_tokens += tokens
        self._last = now if more else None

    def ended(self, lane: str, end: Terminal) -> None:
        """Count a job that ended."""
        before = self.served.get(lane, Served())
        failed = end.failure is not None and end.failure.status >= 500
        self.served[lane] = Served(
            before.jobs + 1, before.tokens + end.usage.prompt + end.usage.completion, before.failed + failed
        )
