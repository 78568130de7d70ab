"""Wait-time estimates: when a waiting job will start, by the scheduler's plan or, without a scheduler, by the
completion rate of this process."""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Mapping

from streaming.fleet.plans import Plan
from streaming.priority import Priority

STALE_S = 10.0
"""A plan older than this is ignored."""
WINDOW_S = 60.0
MAX_ENDS = 4096


class PlanReader:
    """Answers from the plans that this process read last."""

    def __init__(self) -> None:
        self._plans: Mapping[str, Plan] = {}
        self._ages: dict[str, float] = {}
        self._read = time.monotonic()

    def learn(self, plans: Mapping[str, Plan], now_ms: int) -> None:
        """Store the plans, read at `now_ms` of Redis time."""
        self._plans, self._read = plans, time.monotonic()
        self._ages = {model: max(0, now_ms - plan.at_ms) / 1000 for model, plan in plans.items()}

    def eta_ms(self, model: str, lane: Priority, before: int) -> int | None:
        """Return the milliseconds until a job with `before` others ahead of it in its lane starts; None: unknown.

        The plan holds the wait at the lane's end when it was made; each job more or less since then adds or removes
        the plan's time per job. A job never starts before the first worker is ready.
        """
        plan, age = self._plans.get(model), self._age(model)
        prospect = plan.lanes.get(lane) if plan is not None else None
        if plan is None or prospect is None or prospect.wait_s is None or age > STALE_S:
            return None
        # With zero workers wanted, this job causes the cold start, which has not begun; draining workers do not help.
        wake_s = max(0.0, plan.wake_s - age) if plan.want else max(plan.wake_s, plan.cold_start_s)
        behind_s = prospect.wait_s - plan.wake_s + (before - prospect.waiting) * prospect.each_s
        return int(1000 * (wake_s + max(0.0, behind_s)))

    def knows(self, model: str) -> bool:
        """Whether a scheduler has published a fresh plan for this model, even one without an estimate."""
        return self._age(model) <= STALE_S

    def _age(self, model: str) -> float:
        """Return the seconds since the plan was made; infinite without one."""
        return self._ages.get(model, math.inf) + time.monotonic() - self._read


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
