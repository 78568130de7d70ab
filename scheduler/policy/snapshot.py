"""Snapshot of one model's lanes and workers at one moment: the only input of a scaling decision besides its state.

Counters (`added`, `served`, `steps`...) only grow; the policy derives rates from two snapshots.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from streaming.fleet.process import Process


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


@dataclass(frozen=True)
class Snapshot:
    """One model's lanes and workers at one moment."""

    model: str
    lanes: tuple[LaneLoad, ...] = ()
    """Highest first."""
    workers: tuple[Process, ...] = ()
    """As each last reported itself."""
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
    def ready(self) -> tuple[Process, ...]:
        """Workers that take jobs; draining ones do not count."""
        return tuple(worker for worker in self.workers if worker.state == "ready")

    @cached_property
    def away(self) -> tuple[str, ...]:
        """The servers that all ready workers wait for; none if one of them can take jobs, or if none is ready."""
        ready = self.ready
        return ready[0].away if ready and all(worker.away for worker in ready) else ()

    @cached_property
    def starting(self) -> int:
        return sum(worker.state == "starting" for worker in self.workers)
