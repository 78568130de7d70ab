"""When a job that waits will be begun, by what the scheduler published: also while no worker is there at all."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

from streaming.fleet.plans import Plan
from streaming.priority import Priority

STALE_S = 10.0
"""A plan nobody has renewed for so long says nothing any more."""


class PlanReader:
    """The plans as this process last read them."""

    def __init__(self) -> None:
        self._plans: Mapping[str, Plan] = {}
        self._ages: dict[str, float] = {}
        self._read = time.monotonic()

    def learn(self, plans: Mapping[str, Plan], now_ms: int) -> None:
        """The plans as they are at `now_ms` of Redis time."""
        self._plans, self._read = plans, time.monotonic()
        self._ages = {model: max(0, now_ms - plan.at_ms) / 1000 for model, plan in plans.items()}

    def eta_ms(self, model: str, lane: Priority, before: int) -> int | None:
        """Milliseconds until a job with `before` others ahead of it in its lane is begun; None: nobody can say.

        From what was expected at the lane's end then, by what a job more or less is worth; never before a worker is
        there.
        """
        plan, age = self._plans.get(model), self._age(model)
        prospect = plan.lanes.get(lane) if plan is not None else None
        if plan is None or prospect is None or prospect.wait_s is None or age > STALE_S:
            return None
        # At zero workers this very job is what wakes one: its start has not begun, and whoever still drains is no help.
        wake_s = max(0.0, plan.wake_s - age) if plan.want else max(plan.wake_s, plan.cold_start_s)
        behind_s = prospect.wait_s - plan.wake_s + (before - prospect.waiting) * prospect.each_s
        return int(1000 * (wake_s + max(0.0, behind_s)))

    def knows(self, model: str) -> bool:
        """Whether some scheduler stands behind what is said of this model, also when it says that nobody can say."""
        return self._age(model) <= STALE_S

    def _age(self, model: str) -> float:
        """Seconds since the plan was made; infinite without one."""
        return self._ages.get(model, math.inf) + time.monotonic() - self._read
