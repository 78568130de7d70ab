"""Scaling limits of one model: the bounds and targets of every decision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from scheduler.policy.shapes import Shape

TARGETS: Mapping[str, float] = {"interactive": 2.0, "standard": 30.0, "batch": 3600.0}
"""Seconds a job of each lane may wait before it is begun."""


@dataclass(frozen=True, slots=True)
class ScalingLimits:
    """See [scheduler] and [models.<name>] in docs/configuration.md."""

    min: int = 1
    max: int = 1
    targets: Mapping[str, float] = field(default_factory=lambda: TARGETS)
    """Queue-time targets in seconds by lane; a lane that is missing has no target."""
    idle_s: float = 60.0
    """How long a worker must have been unneeded, at least, before it is removed."""
    sleep_s: float = 300.0
    """How long there must have been no job before the last worker is removed; only with min 0."""
    cold_start_s: float = 10.0
    """Assumed time from the decision to add a worker until it is ready; used until it has been measured."""
    cover: float = 0.99
    """Share of recent bursts that the pool should have met in time."""
    cost: float = 0.0
    """Cost of one worker for an hour, in any unit."""
    budget: float | None = None
    """Maximum cost of all workers for an hour."""
    pinned: int | None = None
    """Manual override of the number of workers."""
    paused: bool = False
    """Keep the current number of workers."""
    shapes: tuple[Shape, ...] = ()
    """The model's pools, by rising load, if it has several."""
    pools: Mapping[str, ScalingLimits] = field(default_factory=dict)
    """The limits of each of these pools."""

    @property
    def ceiling(self) -> int:
        """The maximum, reduced to what the budget pays for."""
        if self.budget is None or not self.cost:
            return self.max
        return min(self.max, int(self.budget / self.cost))

    def clamp(self, workers: int) -> int:
        """The nearest allowed number; the budget takes precedence over the minimum."""
        return min(max(self.min, workers), self.ceiling)
