"""Wait-time estimates: when a waiting job will start, by the scheduler's published plan, even with zero workers."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

from streaming.fleet.plans import Plan
from streaming.priority import Priority

STALE_S = 10.0
"""A plan older than this is ignored."""


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
