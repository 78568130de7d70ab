"""Autoscalers under comparison: Penstock's own policy, and the rules of others, each at its own interval.

Freeness, by which Llumnix scales, is (free cache blocks - blocks of what waits inside) / jobs held: blocks by which
each job may still grow.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from planner.simulator.pool_worker import worker_report
from scheduler.policy.decide import PolicyState, decide
from scheduler.policy.limits import ScalingLimits
from scheduler.policy.snapshot import Snapshot
from streaming.fleet.process import Process

BLOCK_TOKENS = 32
"""Tokens of one cache block (TensorRT-LLM's default)."""
SLOT_TOKENS = 1024
"""Taken for a slot where the cache has no size of its own."""


def freeness(worker: Process) -> float:
    """Blocks per job held; infinite for a worker that holds none, negative when more waits inside than fits.

    A job that waits inside is taken to need as much as the mean of those that run.
    """
    held = worker.running + worker.waiting
    if not held:
        return math.inf
    if worker.kv_tokens:
        size, used = worker.kv_tokens, worker.kv_used
    else:
        size, used = worker.slots * SLOT_TOKENS, worker.running * SLOT_TOKENS
    each = used / worker.running if worker.running else SLOT_TOKENS
    return (size - used - worker.waiting * each) / BLOCK_TOKENS / held


def merged(workers: Sequence[Process]) -> float:
    """Freeness of all of them as if they were one; minus infinity when there is none."""
    if not workers:
        return -math.inf
    sums = [sum(getattr(worker, name) for worker in workers) for name in ("slots", "running", "waiting")]
    whole = all(worker.kv_tokens for worker in workers)
    size, used = (sum(w.kv_tokens for w in workers), sum(w.kv_used for w in workers)) if whole else (0, 0)
    return freeness(worker_report("all", slots=sums[0], running=sums[1], waiting=sums[2], kv_tokens=size, kv_used=used))


TICK_S = 2.0
"""Of Penstock's scheduler here: half as often as by default, which costs it a second and saves half of the run."""
HPA_SYNC_S = 15.0
HPA_TOLERANCE = 0.1
HPA_DOWN_WINDOW_S = 300.0
HPA_UP_PODS, HPA_UP_SHARE = 4, 1.0
"""Defaults of Kubernetes' HorizontalPodAutoscaler: at most 4 pods or a doubling per sync, whichever is more; down to
the highest of the last five minutes' recommendations."""


class Contender(Protocol):
    """`want` is asked every `every_s` seconds."""

    every_s: float

    def want(self, snapshot: Snapshot, now: float) -> int: ...

    @property
    def cordoned(self) -> Sequence[str]: ...


@dataclass(slots=True)
class Own:
    """Penstock's policy, as the scheduler process runs it."""

    limits: ScalingLimits
    every_s: float = TICK_S
    state: PolicyState | None = None
    cordoned: tuple[str, ...] = ()

    def want(self, snapshot: Snapshot, now: float) -> int:
        plan = decide(snapshot, self.limits, self.state, now)
        self.state, self.cordoned = plan.state, tuple(cordon.worker for cordon in plan.cordon)
        return plan.want


@dataclass(slots=True)
class Static:
    """Always the same number."""

    workers: int
    every_s: float = 3600.0
    cordoned: tuple[str, ...] = ()

    def want(self, snapshot: Snapshot, now: float) -> int:
        return self.workers


@dataclass(slots=True)
class Hpa(ABC):
    """Kubernetes' HorizontalPodAutoscaler: workers in proportion to a metric over its target, read by a subclass."""

    limits: ScalingLimits
    every_s: float = HPA_SYNC_S
    cordoned: tuple[str, ...] = ()
    have: int = 0
    past: deque[tuple[float, int]] = field(default_factory=deque)

    def want(self, snapshot: Snapshot, now: float) -> int:
        self.have = self.have or max(1, len(snapshot.ready) + snapshot.starting)
        wish = self.limits.clamp(self.wish(snapshot))
        self.past.append((now, wish))
        while self.past[0][0] < now - HPA_DOWN_WINDOW_S:
            self.past.popleft()
        if wish < self.have:
            wish = min(self.have, max(each for _, each in self.past))
        most = max(self.have + HPA_UP_PODS, math.ceil(self.have * (1 + HPA_UP_SHARE)))
        self.have = self.limits.clamp(min(wish, most))
        return self.have

    @abstractmethod
    def wish(self, snapshot: Snapshot) -> int:
        """How many the metric asks for."""

    def scaled(self, base: int, ratio: float) -> int:
        """desired = ceil(base x metric / target), unless that is within the tolerance of 1."""
        return self.have if abs(ratio - 1) <= HPA_TOLERANCE else math.ceil(base * ratio)


@dataclass(slots=True)
class Utilisation(Hpa):
    """The usual HPA on how busy workers are: the share of slots in use, held at a target."""

    target: float = 0.7

    def wish(self, snapshot: Snapshot) -> int:
        slots = sum(worker.slots for worker in snapshot.ready)
        if not slots:
            return self.have
        used = sum(worker.running for worker in snapshot.ready) / slots
        return self.scaled(len(snapshot.ready), used / self.target)


@dataclass(slots=True)
class KedaRule(Hpa):
    """KEDA on the work at hand, waiting and running, per worker: what docker/kubernetes/keda asks for. The HPA it makes
    does the rest."""

    target: float = 5.6

    def wish(self, snapshot: Snapshot) -> int:
        have = max(1, self.have)
        return self.scaled(have, (snapshot.waiting + snapshot.running) / self.target / have)


@dataclass(slots=True)
class Freeness:
    """Llumnix' scaler: every 10 s, one more while the freeness of all together is under 10, one fewer when it would
    still be over 60 without the last."""

    limits: ScalingLimits
    low: float = 10.0
    high: float = 60.0
    every_s: float = 10.0
    cordoned: tuple[str, ...] = ()
    have: int = 0

    def want(self, snapshot: Snapshot, now: float) -> int:
        self.have = self.have or max(1, len(snapshot.ready) + snapshot.starting)
        ready = snapshot.ready
        if not ready:
            return self.have
        # One that starts will be as free as can be.
        coming = [worker_report(f"s{n}", kv_tokens=ready[0].kv_tokens) for n in range(self.have - len(ready))]
        waiting = worker_report("lanes", waiting=snapshot.waiting, kv_tokens=1)
        together = [*ready, *coming]
        if merged([*together, waiting]) < self.low:
            self.have += 1
        elif len(together) > 1 and merged([*_without_last(together), waiting]) > self.high:
            self.have -= 1
        self.have = self.limits.clamp(self.have)
        return self.have


def _without_last(workers: Sequence[Process]) -> list[Process]:
    """The last one's jobs on the others."""
    *rest, last = workers
    taken = worker_report("moved", running=last.running, kv_tokens=1, kv_used=last.kv_used)
    return [*rest, taken]
