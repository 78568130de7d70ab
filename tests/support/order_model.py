"""The order of the queue as a model of one partition: every choice is `next_job`'s, every number is kept in Python."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from bench.order.rule import (
    LaneQueue,
    Pick,
    RequeuedJob,
    WaitingJob,
    charge,
    credits_after,
    is_owed,
    next_job,
    virtual_time,
)
from streaming.jobs.waiting import Cost
from streaming.keys import partition_key
from streaming.order import MAX_DROPPED, PATIENCE_MS, Priority, units


def units_of(cost: Cost) -> int:
    """What the order charges for a job that is claimed."""
    return units(cost.prompt, cost.output)


@dataclass
class ModelLane:
    """One lane, with what the store keeps of its tenants."""

    waiting: dict[str, WaitingJob] = field(default_factory=dict)
    requeued: dict[str, tuple[tuple[int, ...], RequeuedJob]] = field(default_factory=dict)
    """By id: its place, and the job."""
    counters: dict[str, int] = field(default_factory=dict)
    served: dict[str, int] = field(default_factory=dict)
    last: int | None = None
    """Counter of the tenant whose job left last, as the store kept it when no other job waited."""
    credit: int = 0

    @property
    def time(self) -> int:
        return virtual_time(self.last or 0, self.counters)

    def queue(self, crowding: Collection[str] = ()) -> LaneQueue:
        requeued = [job for _, job in sorted(self.requeued.values(), key=lambda each: each[0])]
        return LaneQueue(tuple(self.waiting.values()), requeued, dict(self.counters), self.credit, crowding)


@dataclass
class ModelJob:
    """A job from its put to its end."""

    tenant: str
    lane: Priority
    cost: Cost
    weight: float
    put_ms: int


class OrderModel:
    """What the store must hold, and what each claim must give."""

    def __init__(self) -> None:
        self.lanes = {priority: ModelLane() for priority in Priority}
        self.jobs: dict[str, ModelJob] = {}
        self.picks: list[Pick] = []

    def join(self, job_id: str, tenant: str, priority: Priority, cost: Cost, weight: float, entry: str) -> None:
        """A job waits in its lane, at this entry."""
        ms, number = map(int, entry.split("-"))
        self.jobs[job_id] = ModelJob(tenant, priority, cost, weight, ms)
        self._wait(WaitingJob(job_id, tenant, (ms, number), ms, cost.patience_ms, units_of(cost)))

    def put_back(self, job_id: str, entry: str) -> None:
        """A claimed job waits in its lane again, at this entry. Its age and its patience count from its put; without
        a limit of its own it goes behind all others of its tenant."""
        job, (ms, number) = self.jobs[job_id], map(int, entry.split("-"))
        start = job.put_ms + job.cost.patience_ms
        if job.cost.patience_ms == PATIENCE_MS[job.lane]:
            others = [each for each in self.lanes[job.lane].waiting.values() if each.tenant == job.tenant]
            start = max([start, *(each.urgency[0] + 1 for each in others)])
        self._wait(WaitingJob(job_id, job.tenant, (ms, number), job.put_ms, start - job.put_ms, units_of(job.cost)))

    def _wait(self, job: WaitingJob) -> None:
        lane, tenant = self.lanes[self.jobs[job.id].lane], job.tenant
        if tenant not in lane.counters:
            if not lane.counters:
                lane.credit = 0
            lane.counters[tenant] = max(lane.served.pop(tenant, 0), lane.time)
        lane.waiting[job.id] = job

    def leave(self, job_id: str) -> None:
        """A waiting job has ended without a claim."""
        lane = self.lanes[self.jobs[job_id].lane]
        lane.requeued.pop(job_id, None)
        if (job := lane.waiting.pop(job_id, None)) is not None and self._is_last(lane, job.tenant):
            counter = lane.counters[job.tenant]
            self._retire(lane, job.tenant, counter, counter)

    def requeue(self, job_id: str, place: tuple[int, ...]) -> None:
        """A claimed job waits to be tried again, at this place."""
        job = self.jobs[job_id]
        self.lanes[job.lane].requeued[job_id] = (place, RequeuedJob(job_id, units_of(job.cost)))

    def finish(self, job_id: str, generated: int, prompt: int = 0) -> None:
        """The job has ended after a worker had begun it: its output is charged, and what its prompt was longer than
        estimated. `prompt`: its tokens, 0 if not known."""
        job = self.jobs[job_id]
        lane, tenant = self.lanes[job.lane], job.tenant
        known = charge(units(prompt or job.cost.prompt, generated), job.weight)
        change = known - charge(units(job.cost.prompt, 0), job.weight)
        if change <= 0:
            return
        if tenant in lane.counters:
            lane.counters[tenant] += change
        elif lane.last is not None or lane.counters or lane.served:
            lane.served[tenant] = max(lane.served.get(tenant, 0), lane.time) + change

    def claim(
        self,
        now_ms: int,
        want: int,
        spare: int | None,
        expired: Callable[[str], bool] = lambda _: False,
        shared: int | None = None,
        crowding: Collection[str] = (),
    ) -> tuple[list[str], list[str]]:
        """The jobs that a worker gets, in order, and those that end on the way because their time is over: the claim
        stops behind the last of MAX_DROPPED. Tenants `crowding` get none behind the first `shared` jobs."""
        taken: list[str] = []
        ended: list[str] = []
        lowest = list(Priority)[-1]
        while len(taken) < want and len(ended) < MAX_DROPPED:
            batch = sum(self.jobs[job_id].lane is lowest for job_id in taken)
            closed = {lowest} if spare is not None and batch >= spare else set[Priority]()
            passed_over = crowding if shared is not None and len(taken) >= shared else ()
            self._drop_expired(now_ms, closed, expired, ended, passed_over)
            snapshot = {name: lane.queue(passed_over) for name, lane in self.lanes.items() if name not in closed}
            pick = next_job(snapshot, now_ms)
            if pick is None or len(ended) >= MAX_DROPPED:
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
            for name, credit in credits_after(snapshot, pick, now_ms).items():
                self.lanes[name].credit = credit
            taken.append(job_id)
            self.picks.append(pick)
        return taken, ended

    def _drop_expired(
        self,
        now_ms: int,
        closed: set[Priority],
        expired: Callable[[str], bool],
        ended: list[str],
        crowding: Collection[str],
    ) -> None:
        """The claim looks at the next job of the highest lane, and of each lower one that has credit; of each lane
        without requeued jobs if tenants are passed over."""
        first = True
        for name, lane in self.lanes.items():
            while name not in closed and (queue := lane.queue(crowding)) and len(ended) < MAX_DROPPED:
                looked = not queue.requeued if first or crowding else False
                looked = looked or (not first and (lane.credit > 0 or not queue.waiting))
                job = queue.fairest if queue.candidates else None
                if looked and job is not None and expired(job.id):
                    self.leave(job.id)
                    ended.append(job.id)
                    continue
                if not first and is_owed(queue):
                    return
                first = False
                break
            if name not in closed and lane.waiting:
                first = False  # also if all of its jobs are passed over

    def _take(self, lane: ModelLane, job: WaitingJob) -> None:
        del lane.waiting[job.id]
        known, before = self.jobs[job.id], lane.counters[job.tenant]
        counter = before + charge(units(known.cost.prompt, 0), known.weight)
        if self._is_last(lane, job.tenant):
            self._retire(lane, job.tenant, counter, before)
        else:
            lane.counters[job.tenant] = counter

    @staticmethod
    def _is_last(lane: ModelLane, tenant: str) -> bool:
        return all(job.tenant != tenant for job in lane.waiting.values())

    @staticmethod
    def _retire(lane: ModelLane, tenant: str, counter: int, time: int) -> None:
        """`time`: the virtual time, if no other tenant has waiting jobs."""
        del lane.counters[tenant]
        lane.served[tenant] = counter
        if not lane.counters:
            lane.last = time

    async def check(self, redis: Any, model: str) -> None:
        """The store's index is exactly this."""
        pipeline = redis.pipeline(transaction=False)
        tenants = sorted({job.tenant for job in self.jobs.values()})
        for name in Priority:
            for kind in ("tenants", "served", "arrivals"):
                pipeline.zrange(partition_key(0, kind, model, name), 0, -1, withscores=True)
            for tenant in tenants:
                pipeline.zcard(partition_key(0, "line", str(len(model)), model, name, tenant))
        pipeline.hgetall(partition_key(0, "credit", model))
        *answers, credit = await pipeline.execute()
        step = 3 + len(tenants)
        for at, (name, lane) in enumerate(self.lanes.items()):
            counters, served, arrivals, *lines = answers[step * at : step * (at + 1)]
            assert numbers(counters) == lane.counters, name
            assert lane.counters or numbers(served).get("", 0) == lane.time, name
            assert ahead(lane, numbers(served)) == ahead(lane, lane.served), name
            assert len(arrivals) == len(lane.waiting), name
            owners = [job.tenant for job in lane.waiting.values()]
            assert lines == [owners.count(tenant) for tenant in tenants], name
            assert int(credit.get(name.encode(), 0)) == lane.credit, (name, credit, lane.credit)


def ahead(lane: ModelLane, served: Mapping[str, int]) -> dict[str, int]:
    """The counters of tenants without waiting jobs that count: those that the virtual time has not passed."""
    absent = {tenant: counter for tenant, counter in served.items() if tenant and tenant not in lane.counters}
    return {tenant: counter for tenant, counter in absent.items() if counter > lane.time}


def numbers(pairs: Any) -> dict[str, int]:
    return {name.decode(): int(float(number)) for name, number in pairs}
