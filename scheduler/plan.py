"""What a decision says of one pool: how many workers, and why, and what waiting jobs may expect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scheduler.policy import State


@dataclass(frozen=True, slots=True)
class Cordon:
    """A worker that is to take no more jobs, finish what it has, and be replaced."""

    worker: str
    reason: str


@dataclass(frozen=True, slots=True)
class Outlook:
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
class Plan:
    """The number of workers a pool should have, and the sentence that explains it."""

    model: str
    want: int
    """Without those that are cordoned."""
    reason: str
    state: State
    """For the next decision."""
    cordon: tuple[Cordon, ...] = ()
    outlook: Mapping[str, Outlook] = field(default_factory=dict)
    """By lane."""
    wake_s: float = 0.0
    """Until the first worker is there; 0 when one is."""
    cold_start_s: float = 0.0
    cost: float = 0.0
    """Of the workers wanted, for an hour."""
