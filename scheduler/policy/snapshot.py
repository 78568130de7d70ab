"""Snapshot of one model's lanes and workers at one moment: the only input of a scaling decision besides its state.

Counters (`added`, `served`, `steps`...) only grow; the policy derives rates from two snapshots.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from streaming.fleet.process import Served


@dataclass(frozen=True, slots=True)
class DueJob:
    """A waiting job with a deadline."""

    in_s: float
    ahead: int
    """Jobs of its lane that are ahead of it."""


@dataclass(frozen=True, slots=True)
class LaneLoad:
    """One lane, summed over all partitions."""

    name: str
    waiting: int = 0
    running: int = 0
    """Jobs of this lane that workers hold."""
    oldest_s: float = 0.0
    """Age of the oldest waiting job; 0 if none waits."""
    added: int = 0
    """Jobs ever put here."""
    due: tuple[DueJob, ...] = ()
    """The nearest deadlines."""


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """One worker's last report."""

    id: str
    """New for each process."""
    state: str = "ready"
    """starting | ready | draining"""
    slots: int = 0
    running: int = 0
    waiting: int = 0
    """Jobs it holds that wait inside the engine."""
    kv_tokens: int = 0
    """Capacity of its KV cache; 0: not limited beyond the slots."""
    kv_used: int = 0
    served: Mapping[str, Served] = field(default_factory=dict)
    """By lane."""
    steps: int = 0
    """Engine steps so far, which took `step_s` seconds and produced `step_tokens` tokens."""
    step_s: float = 0.0
    step_tokens: int = 0
    shape: str = ""
    """The pool of the model that it belongs to."""


@dataclass(frozen=True)
class Snapshot:
    """One model's lanes and workers at one moment."""

    model: str
    lanes: tuple[LaneLoad, ...] = ()
    """Highest first."""
    workers: tuple[WorkerLoad, ...] = ()
    elsewhere: int = 0
    """Jobs that workers of the model's other shapes have reported."""

    @cached_property
    def waiting(self) -> int:
        return sum(lane.waiting for lane in self.lanes)

    @cached_property
    def running(self) -> int:
        return sum(lane.running for lane in self.lanes)

    @cached_property
    def oldest_s(self) -> float:
        return max((lane.oldest_s for lane in self.lanes), default=0.0)

    @cached_property
    def ready(self) -> tuple[WorkerLoad, ...]:
        """Workers that take jobs; draining ones do not count."""
        return tuple(worker for worker in self.workers if worker.state == "ready")

    @cached_property
    def starting(self) -> int:
        return sum(worker.state == "starting" for worker in self.workers)
