"""The order of the queue (streaming/order.py) as a pure function: plain data in, a pick out; and the simulator's queue
in this order. Tests hold the script that claims jobs to it."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from planner.simulator.engine import ModelText
from planner.simulator.queues import LANES, TextQueue, by_lane
from streaming.order import BOOST_MS, COUNTER_SCALE, FLOOR, Priority, patience_ms, units


@dataclass(frozen=True, slots=True)
class WaitingJob:
    """A new job that waits in a lane."""

    id: str
    tenant: str
    number: tuple[int, int]
    """Of its entry in the lane: these grow in the order of arrival."""
    arrived_ms: int
    patience_ms: int
    cost: int
    """Units of work, see `units`."""

    @property
    def urgency(self) -> tuple[int, tuple[int, int]]:
        """The smallest goes first: latest start, then arrival."""
        return (self.arrived_ms + self.patience_ms, self.number)


@dataclass(frozen=True, slots=True)
class RequeuedJob:
    """A job that a worker had begun and that waits again."""

    id: str
    cost: int


@dataclass(frozen=True, slots=True)
class LaneQueue:
    """What waits in one lane of a model and partition."""

    waiting: Sequence[WaitingJob] = ()
    requeued: Sequence[RequeuedJob] = ()
    """Oldest first."""
    counters: Mapping[str, int] = field(default_factory=dict)
    """Virtual counter of each tenant with waiting jobs."""
    credit: int = 0
    crowding: Collection[str] = ()
    """Tenants whose new jobs are not claimed now, as the worker has only the places left that it keeps for others."""

    def __bool__(self) -> bool:
        """Whether it has a job that may be claimed now."""
        return bool(self.requeued or self.candidates)

    @property
    def is_empty(self) -> bool:
        """Whether no job waits, also none that is passed over."""
        return not (self.requeued or self.waiting)

    @property
    def candidates(self) -> Sequence[WaitingJob]:
        """The new jobs that may be claimed now."""
        return [job for job in self.waiting if job.tenant not in self.crowding] if self.crowding else self.waiting

    @property
    def oldest(self) -> WaitingJob:
        return min(self.waiting, key=lambda job: (job.arrived_ms, job.number))

    @property
    def fairest(self) -> WaitingJob:
        """The most urgent job of the tenant that got least."""
        jobs = self.candidates
        tenant = min({job.tenant for job in jobs}, key=lambda name: (self.counters[name], name.encode()))
        return min((job for job in jobs if job.tenant == tenant), key=lambda job: job.urgency)


Snapshot = Mapping[Priority, LaneQueue]
"""The lanes of one model in one partition; a lane from which the worker may claim nothing is left out."""


class Turn(Enum):
    """Why a lane goes first."""

    LANE = auto()
    """It is the highest lane in which a job waits."""
    FLOOR = auto()
    """Its lane gets at least one unit of work in FLOOR + 1 while higher lanes are busy."""
    AGE = auto()
    """It waited so long that its lane takes turns with the next higher one."""


@dataclass(frozen=True, slots=True)
class Pick:
    """The job that goes next."""

    job: WaitingJob | RequeuedJob
    lane: Priority
    turn: Turn


def next_job(snapshot: Snapshot, now_ms: int) -> Pick | None:
    """Choose the job that a worker gets next; None if none waits, or if all places left are kept from those that do."""
    lanes = [priority for priority in Priority if priority in snapshot and not snapshot[priority].is_empty]
    if not lanes:
        return None
    lane, turn = lanes[0], Turn.LANE
    for lower in lanes[1:]:
        if snapshot[lower] and is_owed(snapshot[lower]):
            lane, turn = lower, Turn.AGE if is_aged(snapshot[lower], lower, now_ms) else Turn.FLOOR
            break
    queue = snapshot[lane]
    if not queue:
        return None
    return Pick(queue.requeued[0] if queue.requeued else queue.fairest, lane, turn)


def is_aged(queue: LaneQueue, lane: Priority, now_ms: int) -> bool:
    """Whether the lane counts as one lane higher."""
    return bool(queue.waiting) and lane in BOOST_MS and now_ms - queue.oldest.arrived_ms > BOOST_MS[lane]


def is_owed(queue: LaneQueue) -> bool:
    """Whether a lane goes before higher ones: its credit pays for its next new job. A lane of requeued jobs alone may
    owe for one of them afterwards."""
    if not queue.candidates:
        return queue.credit > 0
    return queue.credit >= FLOOR * queue.fairest.cost


def credits_after(snapshot: Snapshot, pick: Pick, now_ms: int) -> dict[Priority, int]:
    """The credit of each lane after a pick. `snapshot`: before it."""
    after = {lane: queue.credit for lane, queue in snapshot.items()}
    if pick.turn is not Turn.LANE:
        after[pick.lane] -= FLOOR * pick.job.cost
    for lane, queue in snapshot.items():
        if queue and lane.rank > pick.lane.rank:
            turns = lane.rank == pick.lane.rank + 1 and is_aged(queue, lane, now_ms)
            after[lane] += pick.job.cost * (FLOOR if turns else 1)
    return after


def charge(cost: int, weight: float) -> int:
    """What a job adds to its tenant's counter."""
    return math.ceil(COUNTER_SCALE * cost / weight)


def virtual_time(last: int, counters: Mapping[str, int]) -> int:
    """The virtual time of a lane: the least counter of the tenants that have waiting jobs, `counters`; if none has
    any, the one that the last of them had when its last job left, `last`. A tenant that returns starts there at
    least."""
    return min(counters.values(), default=last)


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

    def leave(self, job: WaitingJob, charged: int) -> None:
        """A waiting job is claimed for a charge."""
        del self.waiting[job.id]
        self.counts[job.tenant] -= 1
        self.counters[job.tenant] += charged
        if not self.counts[job.tenant]:
            self.served[job.tenant] = self.counters.pop(job.tenant)
            if not self.counters:
                self.last = self.served[job.tenant] - charged


class PenstockQueue(TextQueue):
    """The order of the product: every choice is `next_job`'s; its numbers are kept here as the store keeps them."""

    def __init__(self) -> None:
        super().__init__(by_lane)
        self._lanes = {lane: _Lane() for lane in LANES}
        self._texts: dict[str, ModelText] = {}
        self._ids: dict[int, str] = {}

    def __len__(self) -> int:
        return sum(len(lane.waiting) + len(lane.requeued) for lane in self._lanes.values())

    def put(self, text: ModelText, now_s: float) -> None:
        lane, now_ms = Priority(text.lane), int(1000 * now_s)
        job_id = str(len(self._ids))
        self._ids[id(text)], self._texts[job_id] = job_id, text
        patience = patience_ms(lane, None, None, text.limit)
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

    def note_end(self, text: ModelText) -> None:
        lane = self._lanes[Priority(text.lane)]
        change = charge(units(text.prompt, text.generated), 1.0) - charge(units(text.prompt, 0), 1.0)
        if text.tenant in lane.counters:
            lane.counters[text.tenant] += change
        else:
            lane.served[text.tenant] = max(lane.served.get(text.tenant, 0), lane.time) + change
