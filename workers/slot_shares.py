"""Slot shares: which tenants hold more than their share of one worker's slots while others use it, too. Pure.

Of the tenants that use a worker, each has the share of its slots that its weight is of all their weights.

A worker keeps a few slots free of such tenants (`tenant_slots`), so that a light tenant's job begins at once and does
not wait until a text of the flooding one ends, which may take a minute. Nothing is kept while a single tenant uses the
worker. Other slots are
reserved from lane batch (`reserved_slots`). Victims are the batch jobs that a worker preempts when interactive jobs
need their slots.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from streaming.jobs.settings import DEFAULT_WEIGHT, NO_WEIGHTS
from streaming.order import Priority

MAX_PARKED_DELTAS = 20_000
"""Deltas up to which a job is preempted, and is put back with them by a worker that leaves: a few hundred kB, encoded
in some ten ms."""


MAX_VICTIMS = 16
"""Jobs that one job of lane interactive may preempt for its part of the KV cache: a long prompt needs that of several
short texts."""


MIN_RUN_S = 30.0
"""A job that continues earlier runs is not preempted in its first seconds here, so that it makes progress: at most one
preemption of a job in this time."""


@dataclass(frozen=True, slots=True)
class RunningJob:
    """What the choice needs to know of a job that this worker runs."""

    id: str
    lane: Priority
    began_s: float
    """Monotonic time at which this worker gave it to the engine."""
    texts: int
    """Choices that the engine runs or has queued."""
    is_continued: bool
    """Whether other runs of it came before this one."""
    is_resumable: bool
    """Whether another run can continue it exactly."""
    deltas: int = 0
    """Deltas that all its runs have logged."""


def preemptible(jobs: Iterable[RunningJob], now_s: float) -> list[RunningJob]:
    """The jobs of lane batch that may be preempted, the youngest first: these lose the least work. Another run must be
    able to continue them exactly, and one that was put back before must have run for a while."""
    allowed = [
        job
        for job in jobs
        if job.texts and job.lane is Priority.BATCH and job.is_resumable and job.deltas <= MAX_PARKED_DELTAS
        if not job.is_continued or now_s - job.began_s >= MIN_RUN_S
    ]
    return sorted(allowed, key=lambda job: (-job.began_s, job.id))


def choose_victims(jobs: Iterable[RunningJob], texts: int, now_s: float) -> list[str]:
    """Choose the youngest batch jobs whose choices together free `texts` slots; fewer if there are no more."""
    chosen, freed = list[str](), 0
    for job in preemptible(jobs, now_s):
        if freed >= texts:
            break
        chosen.append(job.id)
        freed += job.texts
    return chosen


ACTIVE_S = 300.0
"""How long after its last text a tenant counts as one that uses the worker."""
SLOTS_PER_KEPT = 128
MAX_CROWDING = 16
"""Tenants that `crowding` names, those with the most texts."""


def tenant_slots(slots: int, wanted: int | None) -> int:
    """Slots that tenants with more than their share may not fill, never all of them. `wanted` None: one in 128,
    rounded, at least one."""
    usual = max(1, (2 * slots + SLOTS_PER_KEPT) // (2 * SLOTS_PER_KEPT))
    return min(slots - 1, usual if wanted is None else wanted)


def reserved_slots(slots: int, wanted: int | None) -> int:
    """Slots that lane batch may not fill, never all of them. `wanted` None: one in sixty-four, at least one."""
    return min(slots - 1, max(1, slots // 64) if wanted is None else wanted)


def room_for_batch(slots: int, reserved: int, batch_texts: int) -> int | None:
    """How many more jobs of lane batch may be held while the reserved slots stay free. None: any number."""
    return max(0, slots - reserved - batch_texts) if reserved else None


class SlotShares:
    """The tenants of one worker's texts. Times are monotonic seconds."""

    def __init__(self, weights: Mapping[str, float] = NO_WEIGHTS) -> None:
        """`weights`: of the tenants that have another one than DEFAULT_WEIGHT."""
        self._weights = weights
        self._texts: dict[str, int] = {}
        """By tenant, the texts that the engine has."""
        self._left: dict[str, float] = {}
        """By tenant without texts, when its last one ended; the oldest first."""
        self.count = 0
        """Tenants that use the worker, or have; `tenants` forgets those of long ago."""

    def begin(self, tenant: str) -> None:
        """The engine gets a text of a tenant."""
        self._texts[tenant] = self._texts.get(tenant, 0) + 1
        self._left.pop(tenant, None)
        self.count = len(self._texts) + len(self._left)

    def end(self, tenant: str, now: float) -> None:
        """A text of a tenant has left the engine."""
        self._texts[tenant] -= 1
        if not self._texts[tenant]:
            del self._texts[tenant]
            self._left[tenant] = now

    def tenants(self, now: float) -> int:
        """How many tenants use the worker, or have lately."""
        for tenant in [tenant for tenant, ended in self._left.items() if ended < now - ACTIVE_S]:
            del self._left[tenant]
        self.count = len(self._texts) + len(self._left)
        return self.count

    def crowding(self, slots: int, now: float) -> tuple[str, ...]:
        """The tenants that would hold more than their share of the slots, and more than one, with another text; () if
        no other has used the worker lately."""
        if (tenants := self.tenants(now)) < 2:
            return ()
        known = [tenant for tenant in self._weights if tenant in self._texts or tenant in self._left]
        total = DEFAULT_WEIGHT * (tenants - len(known)) + sum([self._weights[tenant] for tenant in known])
        over = [
            (-texts, tenant)
            for tenant, texts in self._texts.items()
            if texts >= max(1.0, slots * self._weights.get(tenant, DEFAULT_WEIGHT) / total)
        ]
        return tuple([tenant for _, tenant in sorted(over)[:MAX_CROWDING]])
