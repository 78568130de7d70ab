"""Order of the queue: which waiting job a worker gets next, and why. Pure: plain data in, a pick out.

`streaming/lua/shared/claims.lua` implements the same rule in O(log n); tests/streaming/jobs/test_order_stateful.py
holds both equal. The rule, in this order:

1. Lane: the highest lane in which a job waits. A lower lane goes first when its credit pays for its next job: each
   unit of work claimed from a higher lane, while a job of the lower one waits, is one part of credit, and a unit of its
   own work costs FLOOR parts. So it gets at least one unit of work in FLOOR + 1 (5 %). If its oldest job has waited for
   longer than the lane's boost time, the lane counts as one lane higher: a unit claimed from that lane is FLOOR parts
   of credit, so both take turns.
2. Requeued jobs of the lane, oldest first: a worker had begun them.
3. Tenant: the one with the smallest virtual counter, by name if equal. A claim adds the units of the job's prompt,
   divided by the tenant's weight. The end adds those of what the job generated, corrected by how far the estimate of
   the prompt was wrong, but nothing below zero, so counters never go down. A tenant that returns from idle starts at
   the lane's virtual time at least, so that it cannot save up turns (VTC, Sheng et al. 2024). A worker keeps its last
   slots from tenants that hold more than their share of it: there, their jobs are passed over. While they wait, a lower
   lane gets such a slot only when its credit pays for it.
4. Urgency: the earliest latest start. A job without a deadline has the patience of its lane.
5. Arrival.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto


class Priority(StrEnum):
    """The lanes of a model, highest first."""

    INTERACTIVE = "interactive"
    STANDARD = "standard"
    BATCH = "batch"

    @property
    def rank(self) -> int:
        """0 is the highest lane."""
        return RANKS[self]


RANKS = {priority: rank for rank, priority in enumerate(Priority)}

HIGHER = {lane: tuple(above for above in Priority if above.rank < lane.rank) for lane in Priority}
"""The lanes above each lane, highest first."""


FLOOR = 19
"""A waiting lower lane gets at least one unit of work in FLOOR + 1."""

PATIENCE_MS = {Priority.INTERACTIVE: 30_000, Priority.STANDARD: 600_000, Priority.BATCH: 86_400_000}
"""By lane: how long after its arrival a job without a deadline should start at the latest. A deadline can only bring a
job forward, so no job waits behind one of its tenant that arrived so much later."""

BOOST_MS = {Priority.STANDARD: 600_000, Priority.BATCH: 43_200_000}
"""By lane: the age from which on its oldest job makes it count as one lane higher. Of batches: half of their window."""

COUNTER_SCALE = 1000
"""Virtual counters count thousandths of a unit, so that small jobs of tenants with large weights are told apart."""

OUTPUT_UNITS = 2
"""Units of a generated token; a token of the prompt is one (VTC)."""

TOKEN_MS = 10
"""Estimate of the time of one token, for the latest start of a job with a deadline."""

MAX_DROPPED = 256
"""Jobs whose time is over that one claim ends: then it answers, so that the store serves others before the next one."""


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


# --- virtual counters ------------------------------------------------------------------------------------------------


def units(prompt_tokens: int, output_tokens: int) -> int:
    """Units of work of a job: its prompt, once for each choice, and its output."""
    return max(1, prompt_tokens + OUTPUT_UNITS * output_tokens)


def charge(cost: int, weight: float) -> int:
    """What a job adds to its tenant's counter."""
    return math.ceil(COUNTER_SCALE * cost / weight)


def virtual_time(last: int, counters: Mapping[str, int]) -> int:
    """The virtual time of a lane: the least counter of the tenants that have waiting jobs, `counters`; if none has
    any, the one that the last of them had when its last job left, `last`. A tenant that returns starts there at
    least."""
    return min(counters.values(), default=last)


def patience_ms(priority: Priority, deadline_ms: int | None, max_queue_ms: int | None, answer_tokens: int) -> int:
    """The time from a job's arrival to its latest start: by its limits, but at most the patience of its lane.
    `answer_tokens`: of the longest choice."""
    limits = [PATIENCE_MS[priority]]
    if deadline_ms is not None:
        limits.append(deadline_ms - TOKEN_MS * answer_tokens)
    if max_queue_ms is not None:
        limits.append(max_queue_ms)
    return max(0, min(limits))


def lua_constants() -> str:
    """The constants of the rule for the scripts."""
    boosts = ", ".join(str(BOOST_MS.get(priority, "false")) for priority in Priority)
    patience = ", ".join(f"{priority} = {PATIENCE_MS[priority]}" for priority in Priority)
    numbers = {"FLOOR": FLOOR, "OUTPUT_UNITS": OUTPUT_UNITS, "COUNTER_SCALE": COUNTER_SCALE, "MAX_DROPPED": MAX_DROPPED}
    tables = f"local BOOST_MS = {{{boosts}}}\nlocal PATIENCE_MS = {{{patience}}}\n"
    return tables + "".join(f"local {name} = {each}\n" for name, each in numbers.items())
