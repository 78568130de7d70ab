"""What a worker counts of its work for whoever decides about workers: it only ever grows, rates are made elsewhere."""

from __future__ import annotations

from streaming.fleet.processes import Served
from streaming.jobs.terminal import Terminal


class WorkCounters:
    """One per worker process."""

    def __init__(self) -> None:
        self.steps = 0
        self.step_s = 0.0
        self.step_tokens = 0
        self.served: dict[str, Served] = {}
        """By lane."""
        self._last: float | None = None

    def step(self, tokens: int, now: float, *, more: bool) -> None:
        """An engine step gave `tokens` at `now` (monotonic seconds); `more`: something still runs. A step's time is
        what went by since the one before; the first after a pause has none."""
        if self._last is not None:
            self.steps += 1
            self.step_s += now - self._last
            self.step_tokens += tokens
        self._last = now if more else None

    def ended(self, lane: str, end: Terminal) -> None:
        """A job has ended here."""
        before = self.served.get(lane, Served())
        failed = end.failure is not None and end.failure.status >= 500
        self.served[lane] = Served(
            before.jobs + 1, before.tokens + end.usage.prompt + end.usage.completion, before.failed + failed
        )
