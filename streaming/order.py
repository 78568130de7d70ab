"""Order of the queue: the rule by which a worker gets its next job, the lanes and the constants of the rule.

`streaming/lua/shared/claims.lua` implements the rule in O(log n). bench/order/rule.py states it as a pure function, to
which tests/streaming/jobs/test_order_stateful.py holds the script. The rule, in this order:

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

In a worker of a model with adapters, one of the tenant's next jobs goes before its first one, if it needs no load and
the first one does (loaded_job in claims.lua bounds that). bench/order/rule.py leaves that out.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


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


@dataclass(frozen=True, slots=True)
class LaneDepth:
    """Counts of one lane of one model, summed over all partitions."""

    model: str
    priority: Priority
    waiting: int = 0
    running: int = 0
    """Jobs of this lane that workers hold."""
    oldest_ms: int = 0
    """Age of the job that waits longest; 0 when none waits."""
    added: int = 0
    """Jobs ever put here; 0 on a server that does not count them."""

    @property
    def oldest_s(self) -> float:
        return self.oldest_ms / 1000


@dataclass(frozen=True, slots=True)
class WaitingDeadline:
    """A waiting job with a deadline."""

    model: str
    priority: Priority
    in_ms: int
    """Until it expires."""
    age_ms: int


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


def units(prompt_tokens: int, output_tokens: int) -> int:
    """Units of work of a job: its prompt, once for each choice, and its output."""
    return max(1, prompt_tokens + OUTPUT_UNITS * output_tokens)


def patience_ms(priority: Priority, deadline_ms: int | None, max_queue_ms: int | None, answer_tokens: int) -> int:
    """The time from a job's arrival to its latest start: by its limits, but at most the patience of its lane.
    `answer_tokens`: of the longest choice."""
    limits = [PATIENCE_MS[priority]]
    if deadline_ms is not None:
        limits.append(deadline_ms - TOKEN_MS * answer_tokens)
    if max_queue_ms is not None:
        limits.append(max_queue_ms)
    return max(0, min(limits))


JOB_BYTES = 1536
"""What a job takes of the store beside its request and its tokens: fields of its hash that come with claim and end, its
places in streams and sets."""


def lua_constants() -> str:
    """The constants of the rule, and the weight of a job, for the scripts."""
    boosts = ", ".join(str(BOOST_MS.get(priority, "false")) for priority in Priority)
    patience = ", ".join(f"{priority} = {PATIENCE_MS[priority]}" for priority in Priority)
    numbers = {"FLOOR": FLOOR, "OUTPUT_UNITS": OUTPUT_UNITS, "COUNTER_SCALE": COUNTER_SCALE, "MAX_DROPPED": MAX_DROPPED,
               "JOB_BYTES": JOB_BYTES}  # fmt: skip
    tables = f"local BOOST_MS = {{{boosts}}}\nlocal PATIENCE_MS = {{{patience}}}\n"
    return tables + "".join(f"local {name} = {each}\n" for name, each in numbers.items())
