"""Queue places: how many jobs are expected to start before a waiting one, and why, in words for its owner.

The place follows the order of the queue (`streaming/order.py`) as if no other job came and none ended. It counts the
jobs of higher lanes, the requeued jobs of its lane, the earlier ones of its tenant, and an estimate of those of other
tenants: tenants take turns, so before the n-th job of a tenant each other one gets n turns; one that got less gets one
more; and all of them have no more turns than jobs. This is exact while one tenant has jobs in the lane, and for two
whose jobs cost the same and who have the same weight. The floor and the age boost of lower lanes are left out.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.engine import ModelCard
from streaming.jobs.job import Job
from streaming.jobs.work import cost_of
from streaming.keys import kind_of, parse_lane, partition_key
from streaming.order import COUNTER_SCALE
from streaming.priority import Priority
from streaming.redis.client import Call, RedisClient

MAX_COUNTED = 1_000
"""Jobs of one tenant that are read from a lane; the later ones get this number."""
CACHE_MAX_AGE_S = 5.0
"""How long a read is cached without requests."""


@dataclass(frozen=True, slots=True)
class QueuePlace:
    """The place of a waiting job, in numbers of jobs that are expected to start before it."""

    higher: int = 0
    """Of higher lanes."""
    requeued: int = 0
    """Of its lane, which a worker had begun."""
    own: int = 0
    """Of its tenant."""
    others: int = 0
    """Of other tenants; an estimate."""
    served: int = 0
    """Units of work that its tenant got more than the tenant that got least."""
    lane: Priority = Priority.STANDARD
    kind: str = "lane"
    """The stream in which it waits: lane, retry or suspects."""

    @property
    def in_lane(self) -> int:
        return self.requeued + self.own + self.others

    @property
    def before(self) -> int:
        return self.higher + self.in_lane

    @property
    def reason(self) -> str:
        """Why the job stands there, in words. It names no other tenant."""
        parts = [f"lane {self.lane}"]
        if self.higher:
            parts.append(f"{_jobs(self.higher)} of higher lanes first")
        if self.kind == "suspects":
            parts.append("it may have ended its workers, so it will run alone")
        elif self.kind == "retry":
            parts.append("a worker had begun it, so it goes before new jobs")
        if self.requeued:
            parts.append(f"{_jobs(self.requeued)} first that a worker had begun")
        if self.others:
            share = f"; your jobs got {self.served:,} units of work more than the least served" if self.served else ""
            parts.append(f"about {_jobs(self.others)} of others first, in turns{share}")
        parts.append(f"{_jobs(self.own)} of your own first, by deadline" if self.own else "next of your own")
        return "; ".join(parts)


FIRST = QueuePlace()


def _jobs(count: int) -> str:
    number = f"{count:,}" if count < MAX_COUNTED else f"{count:,} or more"
    return f"{number} job{'' if count == 1 else 's'}"


def place_of(read: Sequence[Any], places: Mapping[bytes, int], lane: str, entry: str) -> QueuePlace:
    """The place of an entry by the answer of the script `waiting`, and the places of the entries in it."""
    return _place(read, places.get(entry.encode(), len(read[0])), lane)


def _place(read: Sequence[Any], own: int, lane: str) -> QueuePlace:
    """The place of a job behind `own` others of its tenant."""
    _, higher, requeued, waiting, mine, tenants, less, counter, least = read
    priority, kind = parse_lane(lane)[1], kind_of(lane)
    if kind != "lane":
        return QueuePlace(higher, own, lane=priority, kind=kind)
    others = min(waiting - mine, (tenants - 1) * own + less)
    return QueuePlace(higher, requeued, own, max(0, others), max(0, counter - least) // COUNTER_SCALE, priority)


class LineHead:
    """One read of a tenant's first entries in a lane, finished or under way; `began` is monotonic time."""

    def __init__(self, began: float, read: asyncio.Task[Sequence[Any]]) -> None:
        self.began, self.read = began, read
        self._places: dict[bytes, int] = {}

    async def find(self) -> tuple[Sequence[Any], Mapping[bytes, int]]:
        """The answer, and the place of each entry in it."""
        read = await asyncio.shield(self.read)
        if not self._places:
            self._places = {entry: place for place, entry in enumerate(read[0])}
        return read, self._places


class QueuePlaces:
    """Finds the places of waiting jobs; concurrent requests about a tenant's jobs in a lane share one read. One per
    process."""

    def __init__(self, client: RedisClient) -> None:
        self._client = client
        self._looks: dict[tuple[str, str], LineHead] = {}
        """By lane and tenant: the last read."""

    async def find(self, partition: int, lane: str, tenant: str, entry: str, old_s: float = 0.0) -> QueuePlace:
        """The place of an entry of a lane, by a read at most `old_s` old. Raises Unavailable."""
        asked, line = time.monotonic(), (lane, tenant)
        while True:
            look = self._looks.get(line)
            if look is None or look.began < asked - old_s or old_s == 0:
                look = self._look(partition, line)
            read, places = await look.find()
            # An entry that an older read does not have was perhaps put later, unless the read ends before it.
            if look.began >= asked or len(places) >= MAX_COUNTED or entry.encode() in places:
                return place_of(read, places, lane, entry)
            if self._looks.get(line) is look:
                del self._looks[line]

    async def expected(self, job: Job, card: ModelCard | None) -> int:
        """How many jobs of its lane would start before a job that is put now, in all partitions together. `card`: of
        its model. Raises Unavailable."""
        patience_ms = cost_of(job, card).patience_ms
        lanes = {each: partition_key(each, "lane", job.model, job.priority) for each in self._client.partitions}
        calls: list[Call] = [("waiting", each, (lane, job.tenant, 0, patience_ms)) for each, lane in lanes.items()]
        reads = await self._client.calls(calls)
        return sum(_place(read, read[0], lane).in_lane for read, lane in zip(reads, lanes.values(), strict=True))

    def _look(self, partition: int, line: tuple[str, str]) -> LineHead:
        now = time.monotonic()
        self._looks = {name: look for name, look in self._looks.items() if look.began > now - CACHE_MAX_AGE_S}
        look = self._looks[line] = LineHead(now, asyncio.create_task(self._read(partition, *line)))
        look.read.add_done_callback(lambda read: self._forget(line, look, read))
        return look

    def _forget(self, line: tuple[str, str], look: LineHead, read: asyncio.Task[Sequence[Any]]) -> None:
        """Drop a failed read from the cache, and retrieve its error: perhaps no caller waits for it any more."""
        if (read.cancelled() or read.exception()) and self._looks.get(line) is look:
            del self._looks[line]

    async def _read(self, partition: int, lane: str, tenant: str) -> Sequence[Any]:
        read: Sequence[Any] = await self._client.call("waiting", partition, lane, tenant, MAX_COUNTED, "")
        return read
