"""One model as seen at one moment: its lanes and its workers. All a decision may know of the world.

Counters (`added`, `served`, `steps`...) only grow; what they say about rates is worked out from two snapshots.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property


@dataclass(frozen=True, slots=True)
class DueJob:
    """A waiting job that is lost to its owner unless it is begun in time."""

    in_s: float
    ahead: int
    """Jobs of its lane that are before it."""


@dataclass(frozen=True, slots=True)
class LaneLoad:
    """One lane, all partitions together."""

    name: str
    waiting: int = 0
    running: int = 0
    """Jobs of this lane that workers hold."""
    oldest_s: float = 0.0
    """Age of the job that waits longest; 0 when none waits."""
    added: int = 0
    """Jobs ever put here."""
    due: tuple[DueJob, ...] = ()
    """The nearest deadlines."""


@dataclass(frozen=True, slots=True)
class ServedCount:
    """What a worker has ended of one lane since its start."""

    jobs: int = 0
    tokens: int = 0
    """Prompt and answer together."""
    failed: int = 0
    """Jobs among them that failed by the engine's fault."""


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """One worker as it last spoke."""

    id: str
    """New in each of its lives."""
    state: str = "ready"
    """starting | ready | draining"""
    slots: int = 0
    running: int = 0
    waiting: int = 0
    """Jobs it holds that wait inside the engine."""
    kv_tokens: int = 0
    """Room of its KV cache; 0: not limited beyond the slots."""
    kv_used: int = 0
    served: Mapping[str, ServedCount] = field(default_factory=dict)
    """By lane."""
    steps: int = 0
    """Engine steps so far, of which `step_s` seconds and `step_tokens` tokens are known."""
    step_s: float = 0.0
    step_tokens: int = 0
    shape: str = ""
    """Which of the model's pools it belongs to."""


@dataclass(frozen=True)
class Snapshot:
    """One model as seen at one moment."""

    model: str
    lanes: tuple[LaneLoad, ...] = ()
    """Highest first."""
    workers: tuple[WorkerLoad, ...] = ()
    elsewhere: int = 0
    """Jobs that workers of the model's other shapes hold, as far as they have said."""

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
        """Workers that take jobs. Those that drain count no more."""
        return tuple(worker for worker in self.workers if worker.state == "ready")

    @cached_property
    def starting(self) -> int:
        return sum(worker.state == "starting" for worker in self.workers)
