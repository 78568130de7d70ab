"""Result types of a scaling decision: a pool's size with its reason, and the expected waits of its lanes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from scheduler.policy.demand import Demand
from scheduler.policy.health import CordonDecision, PoolHealth
from scheduler.policy.rush import Peaks


@dataclass(frozen=True, slots=True)
class PolicyState:
    """State that one decision of a pool passes to the next."""

    want: int
    demand: Demand = field(default_factory=Demand)
    needs: Peaks = ()
    """Peaks of the workers needed in the last `keep_s` seconds."""
    fell: bool = False
    """Whether the last change was downwards."""
    no_small_step_until: float = -math.inf
    health: PoolHealth = field(default_factory=PoolHealth)


@dataclass(frozen=True, slots=True)
class LaneOutlook:
    """Forecast of one lane."""

    waiting: int
    tokens: float
    """Tokens of the waiting jobs."""
    arrivals: float
    """Jobs a second."""
    wait_s: float
    """Seconds until a job put now is begun; infinite: never, or unknown."""
    each_s: float
    """Additional seconds for each further job ahead of it; 0: unknown."""


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """The number of workers that a pool should have, and the reason."""

    model: str
    want: int
    """Not counting cordoned workers."""
    reason: str
    state: PolicyState
    """Input of the next decision."""
    cordon: tuple[CordonDecision, ...] = ()
    outlook: Mapping[str, LaneOutlook] = field(default_factory=dict)
    """By lane."""
    wake_s: float = 0.0
    """Seconds until the first worker is ready; 0 if one is."""
    cold_start_s: float = 0.0
    cost: float = 0.0
    """Cost of the wanted workers for an hour."""
