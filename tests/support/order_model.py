"""The order of the queue as a model of one partition: every choice is `next_job`'s, every number is kept in Python."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from streaming.jobs.work import Cost
from streaming.keys import partition_key
from streaming.order import (
    LaneQueue,
    Pick,
    RequeuedJob,
    WaitingJob,
    charge,
    corrected,
    credits_after,
    is_owed,
    lift,
    next_job,
    units,
)
from streaming.priority import Priority


@dataclass
class ModelLane:
    """One lane, with what the store keeps of its tenants."""

    waiting: dict[str, WaitingJob] = field(default_factory=dict)
    requeued: dict[str, tuple[tuple[int, ...], RequeuedJob]] = field(default_factory=dict)
    """By id: the number of its entry, and the job."""
    counters: dict[str, int] = field(default_factory=dict)
    lifts: dict[str, int] = field(default_factory=dict)
    served: dict[str, int] = field(default_factory=dict)
    time: int | None = None
    credit: int = 0

    def queue(self) -> LaneQueue:
        requeued = [job for _, job in sorted(self.requeued.values(), key=lambda each: each[0])]
        return LaneQueue(tuple(self.waiting.values()), requeued, dict(self.counters), self.credit)


@dataclass
class ModelJob:
    """A job from its put to its end."""

    tenant: str
    lane: Priority
    cost: Cost
    weight: float


class OrderModel:
    """What the store must hold, and what each claim must give."""

    def __init__(self) -> None:
        self.lanes = {priority: ModelLane() for priority in Priority}
        self.jobs: dict[str, ModelJob] = {}
        self.picks: list[Pick] = []

    def join(self, job_id: str, tenant: str, priority: Priority, cost: Cost, weight: float, entry: str) -> None:
        """A job waits in its lane, at this entry."""
        lane, (ms, number) = self.lanes[priority], map(int, entry.split("-"))
        self.jobs[job_id] = ModelJob(tenant, priority, cost, weight)
        if tenant not in lane.counters:
            if not lane.counters:
                lane.credit = 0
            lane.lifts[tenant] = lift(lane.time or 0, lane.counters)
            lane.counters[tenant] = max(lane.served.pop(tenant, 0), lane.lifts[tenant])
        lane.waiting[job_id] = WaitingJob(job_id, tenant, (ms, number), ms, cost.patience_ms, cost.units)

    def leave(self, job_id: str) -> None:
        """A waiting job has ended without a claim."""
        lane = self.lanes[self.jobs[job_id].lane]
        lane.requeued.pop(job_id, None)
        if (job := lane.waiting.pop(job_id, None)) is not None and self._is_last(lane, job.tenant):
            self._retire(lane, job.tenant, lane.counters[job.tenant])

    def requeue(self, job_id: str, entry: str) -> None:
        """A claimed job waits again, at this entry of its lane's retry stream."""
        job = self.jobs[job_id]
        lane, number = self.lanes[job.lane], tuple(map(int, entry.split("-")))
        lane.requeued[job_id] = (number, RequeuedJob(job_id, job.cost.units))

    def finish(self, job_id: str, generated: int) -> None:
        """A worker ends the job."""
        job = self.jobs[job_id]
        lane, tenant = self.lanes[job.lane], job.tenant
        change = charge(units(job.cost.prompt, generated), job.weight) - charge(units(job.cost.prompt, 0), job.weight)
        if change == 0:
            return
        if tenant in lane.counters:
            lane.counters[tenant] = corrected(lane.counters[tenant], change, lane.lifts[tenant])
        elif lane.time is not None:
            counter = lane.served.pop(tenant, lane.time) + change
            if counter > lane.time:
                lane.served[tenant] = counter

    def claim(
        self, now_ms: int, want: int, spare: int | None, expired: Callable[[str], bool] = lambda _: False
    ) -> tuple[list[str], list[str]]:
        """The jobs that a worker gets, in order, and those that end on the way because their time is over."""
        taken: list[str] = []
        ended: list[str] = []
        changed: set[Priority] = set()
        lowest = list(Priority)[-1]
        while len(taken) < want:
            batch = sum(self.jobs[job_id].lane is lowest for job_id in taken)
            closed = {lowest} if spare is not None and batch >= spare else set[Priority]()
            self._drop_expired(now_ms, closed, expired, ended)
            snapshot = {name: lane.queue() for name, lane in self.lanes.items() if name not in closed}
            pick = next_job(snapshot, now_ms)
            if pick is None:
                break
            job_id, lane = pick.job.id, self.lanes[pick.lane]
            if expired(job_id):
                self.leave(job_id)
                ended.append(job_id)
                continue
            if isinstance(pick.job, RequeuedJob):
                del lane.requeued[job_id]
            else:
                self._take(lane, pick.job)
                changed.add(pick.lane)
            for name, credit in credits_after(snapshot, pick, now_ms).items():
                self.lanes[name].credit = credit
            taken.append(job_id)
            self.picks.append(pick)
        for name in changed:
            lane = self.lanes[name]
            lane.served = {tenant: counter for tenant, counter in lane.served.items() if counter > (lane.time or 0)}
        return taken, ended

    def _drop_expired(
        self, now_ms: int, closed: set[Priority], expired: Callable[[str], bool], ended: list[str]
    ) -> None:
        """The claim looks at the next job of the highest lane, and of each lower one that has credit."""
        first = True
        for name, lane in self.lanes.items():
            while name not in closed and (queue := lane.queue()):
                looked = (lane.credit > 0 or not queue.waiting) if not first else not queue.requeued
                job = queue.fairest if queue.waiting else None
                if looked and job is not None and expired(job.id):
                    self.leave(job.id)
                    ended.append(job.id)
                    continue
                if not first and is_owed(queue):
                    return
                first = False
                break

    def _take(self, lane: ModelLane, job: WaitingJob) -> None:
        lane.time = max(lane.time or 0, min(lane.counters.values()))
        del lane.waiting[job.id]
        known = self.jobs[job.id]
        counter = lane.counters[job.tenant] + charge(units(known.cost.prompt, 0), known.weight)
        if self._is_last(lane, job.tenant):
            del lane.counters[job.tenant], lane.lifts[job.tenant]
            lane.served[job.tenant] = counter
        else:
            lane.counters[job.tenant] = counter

    @staticmethod
    def _is_last(lane: ModelLane, tenant: str) -> bool:
        return all(job.tenant != tenant for job in lane.waiting.values())

    @staticmethod
    def _retire(lane: ModelLane, tenant: str, counter: int) -> None:
        del lane.counters[tenant], lane.lifts[tenant]
        if lane.time is not None and counter > lane.time:
            lane.served[tenant] = counter

    async def check(self, redis: Any, model: str) -> None:
        """The store's index is exactly this."""
        pipeline = redis.pipeline(transaction=False)
        tenants = sorted({job.tenant for job in self.jobs.values()})
        for name in Priority:
            for kind in ("tenants", "served", "arrivals"):
                pipeline.zrange(partition_key(0, kind, model, name), 0, -1, withscores=True)
            pipeline.hgetall(partition_key(0, "lifts", model, name))
            for tenant in tenants:
                pipeline.zcard(partition_key(0, "line", str(len(model)), model, name, tenant))
        pipeline.hgetall(partition_key(0, "credit", model))
        *answers, credit = await pipeline.execute()
        step = 4 + len(tenants)
        for at, (name, lane) in enumerate(self.lanes.items()):
            counters, served, arrivals, lifts, *lines = answers[step * at : step * (at + 1)]
            time = {} if lane.time is None else {"": lane.time}
            assert numbers(counters) == lane.counters, name
            assert numbers(served) == lane.served | time, name
            assert numbers(lifts.items()) == lane.lifts, name
            assert len(arrivals) == len(lane.waiting), name
            owners = [job.tenant for job in lane.waiting.values()]
            assert lines == [owners.count(tenant) for tenant in tenants], name
            assert int(credit.get(name.encode(), 0)) == lane.credit, (name, credit, lane.credit)


def numbers(pairs: Any) -> dict[str, int]:
    return {name.decode(): int(float(number)) for name, number in pairs}
