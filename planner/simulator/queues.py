"""Queues of the simulator: who goes next by the order of the product, by arrival, or by lane and arrival. Pure."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Protocol

from planner.simulator.engine import ModelText
from streaming.order import (
    LaneQueue,
    Pick,
    RequeuedJob,
    WaitingJob,
    charge,
    credits_after,
    next_job,
    patience_ms,
    units,
    virtual_time,
)
from streaming.priority import Priority

LANES = tuple(Priority)


class TextQueue(Protocol):
    """Where texts wait until a worker takes them. `len` counts them."""

    def __len__(self) -> int: ...

    def put(self, text: ModelText, now_s: float) -> None:
        """A text arrives."""
        ...

    def put_back(self, text: ModelText) -> None:
        """A text that a worker had begun waits again."""
        ...

    def take(self, now_s: float, lanes: Collection[Priority], crowding: Collection[str] = ()) -> ModelText | None:
        """Remove the next text of these lanes, which is not of the tenants `crowding`; None if there is none."""
        ...

    def drop(self, text: ModelText) -> None:
        """A waiting text is given up."""
        ...

    def note_end(self, text: ModelText) -> None:
        """A text has been answered."""
        ...


def by_arrival(text: ModelText) -> tuple[int, float]:
    """First come, first served."""
    return 0, text.arrived_s


def by_lane(text: ModelText) -> tuple[int, float]:
    """Strict priority between lanes; in a lane, by arrival."""
    return text.rank


class SortedQueue:
    """Goes by a key alone."""

    def __init__(self, key: Callable[[ModelText], tuple[int, float]]) -> None:
        self._key = key
        self._heap: list[tuple[tuple[int, float], int, ModelText]] = []
        self._puts = 0
        self._dropped: set[int] = set()

    def __len__(self) -> int:
        return len(self._heap) - len(self._dropped)

    def put(self, text: ModelText, now_s: float) -> None:
        self._puts += 1
        heapq.heappush(self._heap, (self._key(text), self._puts, text))

    def put_back(self, text: ModelText) -> None:
        self.put(text, 0.0)

    def take(self, now_s: float, lanes: Collection[Priority], crowding: Collection[str] = ()) -> ModelText | None:
        """Of all lanes and tenants: a queue without lanes knows none."""
        while self._heap:
            text = heapq.heappop(self._heap)[2]
            if id(text) not in self._dropped:
                return text
            self._dropped.discard(id(text))
        return None

    def drop(self, text: ModelText) -> None:
        self._dropped.add(id(text))

    def note_end(self, text: ModelText) -> None:
        return


@dataclass(slots=True)
class _Lane:
    """One lane, with what the store keeps of its tenants."""

    waiting: dict[str, WaitingJob] = field(default_factory=dict)
    """By id, oldest first."""
    lines: defaultdict[str, list[tuple[tuple[int, tuple[int, int]], str]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    """By tenant, a heap by urgency; ids that no longer wait are skipped."""
    counts: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    requeued: dict[str, RequeuedJob] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    served: dict[str, int] = field(default_factory=dict)
    last: int = 0
    """Counter of the tenant whose job left last, if none waits."""
    credit: int = 0

    @property
    def time(self) -> int:
        return virtual_time(self.last, self.counters)

    def queue(self, crowding: Collection[str] = ()) -> LaneQueue:
        """The jobs of which `next_job` can choose one: the most urgent of each tenant, and the oldest."""
        jobs = [self.waiting[self._head(tenant)] for tenant in self.counters]
        if self.waiting:
            jobs.append(next(iter(self.waiting.values())))
        return LaneQueue(jobs, tuple(self.requeued.values()), self.counters, self.credit, crowding)

    def _head(self, tenant: str) -> str:
        line = self.lines[tenant]
        while line[0][1] not in self.waiting:
            heapq.heappop(line)
        return line[0][1]

    def join(self, job: WaitingJob) -> None:
        """A new job of a tenant waits."""
        if job.tenant not in self.counters:
            if not self.counters:
                self.credit = 0
            self.counters[job.tenant] = max(self.served.pop(job.tenant, 0), self.time)
        self.waiting[job.id] = job
        self.counts[job.tenant] += 1
        heapq.heappush(self.lines[job.tenant], (job.urgency, job.id))

    def leave(self, job: WaitingJob, charged: int = 0) -> None:
        """A waiting job is claimed for a charge, or given up."""
        del self.waiting[job.id]
        self.counts[job.tenant] -= 1
        self.counters[job.tenant] += charged
        if not self.counts[job.tenant]:
            self.served[job.tenant] = self.counters.pop(job.tenant)
            if not self.counters:
                self.last = self.served[job.tenant] - charged


class PenstockQueue:
    """The order of the product: every choice is `next_job`'s; its numbers are kept here as the store keeps them."""

    def __init__(self) -> None:
        self._lanes = {lane: _Lane() for lane in LANES}
        self._texts: dict[str, ModelText] = {}
        self._ids: dict[int, str] = {}
        self.picks: defaultdict[str, int] = defaultdict(int)
        """How often each turn came."""

    def __len__(self) -> int:
        return sum(len(lane.waiting) + len(lane.requeued) for lane in self._lanes.values())

    def put(self, text: ModelText, now_s: float) -> None:
        lane, now_ms = Priority(text.lane), int(1000 * now_s)
        deadline = None if text.deadline_s == math.inf else int(1000 * (text.deadline_s - now_s))
        job_id = str(len(self._ids))
        self._ids[id(text)], self._texts[job_id] = job_id, text
        patience = patience_ms(lane, deadline, None, text.limit)
        number = (now_ms, len(self._ids))
        self._lanes[lane].join(
            WaitingJob(job_id, text.tenant, number, now_ms, patience, units(text.prompt, text.limit))
        )

    def put_back(self, text: ModelText) -> None:
        job_id = self._ids[id(text)]
        self._lanes[Priority(text.lane)].requeued[job_id] = RequeuedJob(job_id, units(text.prompt, text.limit))

    def take(self, now_s: float, lanes: Collection[Priority], crowding: Collection[str] = ()) -> ModelText | None:
        now_ms = int(1000 * now_s)
        snapshot = {name: lane.queue(crowding) for name, lane in self._lanes.items() if name in lanes}
        pick = next_job(snapshot, now_ms)
        if pick is None:
            return None
        self.picks[pick.turn.name] += 1
        for name, credit in credits_after(snapshot, pick, now_ms).items():
            self._lanes[name].credit = credit
        self._claim(pick)
        return self._texts[pick.job.id]

    def _claim(self, pick: Pick) -> None:
        lane, job = self._lanes[pick.lane], pick.job
        if isinstance(job, RequeuedJob):
            del lane.requeued[job.id]
            return
        lane.leave(job, charge(units(self._texts[job.id].prompt, 0), 1.0))

    def drop(self, text: ModelText) -> None:
        job_id, lane = self._ids[id(text)], self._lanes[Priority(text.lane)]
        if lane.requeued.pop(job_id, None) is None:
            lane.leave(lane.waiting[job_id])

    def note_end(self, text: ModelText) -> None:
        lane = self._lanes[Priority(text.lane)]
        change = charge(units(text.prompt, text.generated), 1.0) - charge(units(text.prompt, 0), 1.0)
        if text.tenant in lane.counters:
            lane.counters[text.tenant] += change
        else:
            lane.served[text.tenant] = max(lane.served.get(text.tenant, 0), lane.time) + change
