"""What a decision says of one pool: how many workers, and why, and what waiting jobs may expect."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from scheduler.policy.demand import Demand
from scheduler.policy.health import CordonDecision, PoolHealth
from scheduler.policy.rush import Peaks


@dataclass(frozen=True, slots=True)
class PolicyState:
    """What the next decision must know of the last one."""

    want: int
    demand: Demand = field(default_factory=Demand)
    needs: Peaks = ()
    """Workers needed at single moments of the last while."""
    fell: bool = False
    """Whether the last change was downwards."""
    no_small_step_until: float = -math.inf
    health: PoolHealth = field(default_factory=PoolHealth)


@dataclass(frozen=True, slots=True)
class LaneOutlook:
    """What is expected of one lane."""

    waiting: int
    tokens: float
    """That wait in it."""
    arrivals: float
    """Jobs a second."""
    wait_s: float
    """Until a job that is put now is begun; infinite: nobody will begin it, or nobody knows when."""
    each_s: float
    """More for each further job before it; 0: unknown."""


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """The number of workers a pool should have, and the sentence that explains it."""

    model: str
    want: int
    """Without those that are cordoned."""
    reason: str
    state: PolicyState
    """For the next decision."""
    cordon: tuple[CordonDecision, ...] = ()
    outlook: Mapping[str, LaneOutlook] = field(default_factory=dict)
    """By lane."""
    wake_s: float = 0.0
    """Until the first worker is there; 0 when one is."""
    cold_start_s: float = 0.0
    cost: float = 0.0
    """Of the workers wanted, for an hour."""
