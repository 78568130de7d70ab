"""What is allowed and what is aimed at, for one model: the bounds of every decision."""

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
    """Queue-time targets in seconds by lane; a lane without one has none."""
    idle_s: float = 60.0
    """How long a worker must have been one too many, at the least, before it is given back."""
    sleep_s: float = 300.0
    """How long there must have been no job at all before the last worker goes; only with min 0."""
    cold_start_s: float = 10.0
    """From deciding on a worker to having it, until it has been measured."""
    cover: float = 0.99
    """Share of the recent past whose rushes the pool would have met in time."""
    cost: float = 0.0
    """Of one worker for an hour, in any unit."""
    budget: float | None = None
    """The most all workers may cost in an hour."""
    pinned: int | None = None
    """A number set by hand: no other is decided while it stands."""
    paused: bool = False
    """Nothing is changed, only watched."""
    shapes: tuple[Shape, ...] = ()
    """The model's pools in the order of the load they are for, where it has several."""
    pools: Mapping[str, ScalingLimits] = field(default_factory=dict)
    """The limits of each of them."""

    @property
    def most(self) -> int:
        """The maximum, and no more than the budget pays for."""
        if self.budget is None or not self.cost:
            return self.max
        return min(self.max, int(self.budget / self.cost))

    def clamp(self, workers: int) -> int:
        """The nearest number that is allowed; the budget goes before the minimum."""
        return min(max(self.min, workers), self.most)
