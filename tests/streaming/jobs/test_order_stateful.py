"""The claim script against the pure order of the queue: whatever is put, claimed, ended or requeued, and however old it
gets, each claim is `next_job`'s pick, and each counter in the store is the model's.

PENSTOCK_EXAMPLES sets how many runs are tried.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from order_model import OrderModel
from store_machine import StoreMachine, run_machine

from bench.order.rule import Turn, WaitingJob
from penstock.engine import Sampling
from streaming.ids import new_job_id
from streaming.jobs.codec import Terminal, Usage
from streaming.jobs.job import Job, JobState, Text
from streaming.jobs.lease import Claim, Finish, Lease, UnreadableClaim
from streaming.jobs.queue import Queue
from streaming.jobs.reader import JobReader
from streaming.jobs.reaper import Reaper
from streaming.jobs.waiting import cost_of
from streaming.keys import partition_key
from streaming.order import BOOST_MS, Priority
from streaming.redis.client import RedisClient
from streaming.redis.settings import RedisSettings

pytestmark = pytest.mark.slow

MODEL, HOUR_MS = "a:batch", 3_600_000
WEIGHTS = {"heavy": 4.0, "light": 1 / 6}
TENANTS = st.sampled_from(["a", "b", "heavy", "light"])
LANES = st.sampled_from(list(Priority))
LIMITS = st.sampled_from([{}, {}, {"deadline_ms": 90_000}, {"deadline_ms": 20_000}, {"max_queue_ms": 30_000}])
SEEN: Counter[str] = Counter()
"""How often the runs took each turn: else the test would not have tried it."""


class OrderMachine(StoreMachine):
    """Every rule does one thing to the store and to the model."""

    def __init__(self) -> None:
        super().__init__()
        self.wire = RedisClient.open(RedisSettings(url=self.url, lease_ms=HOUR_MS, max_attempts=100, timeout_s=30))
        self.queue, self.lease = Queue(self.wire, weights=WEIGHTS), Lease(self.wire, MODEL)
        self.model = OrderModel()
        self.held: dict[str, Claim] = {}
        self.overdue: set[str] = set()
        self.run(self.lease.register())

    def waiting(self) -> list[str]:
        return [job_id for lane in self.model.lanes.values() for job_id in lane.waiting]

    def requeued(self) -> list[str]:
        return [job_id for lane in self.model.lanes.values() for job_id in lane.requeued]

    @initialize(data=st.data(), lanes=st.lists(LANES, min_size=1, max_size=3), old=st.booleans())
    def begin(self, data: st.DataObject, lanes: list[Priority], old: bool) -> None:
        """Long jobs of the highest lane, short ones of lower lanes, which may be old."""
        for tenant in ("a", "heavy"):
            self.put(tenant, Priority.INTERACTIVE, 400, data.draw(st.sampled_from([100, 1000])), {}, 5, True)
        for lane in lanes:
            self.put(data.draw(TENANTS), lane, 4, 10, {}, 2, True)
        for lane in set(lanes) & BOOST_MS.keys() if old else ():
            self.time_passes(lane, "", False)

    @rule(
        tenant=TENANTS,
        lane=LANES,
        size=st.sampled_from([1, 4, 400]),
        most=st.sampled_from([1, 10, 1000]),
        limits=LIMITS,
        count=st.integers(1, 3),
        together=st.booleans(),
    )
    def put(
        self, tenant: str, lane: Priority, size: int, most: int, limits: dict[str, int], count: int, together: bool
    ) -> None:
        """Some jobs of a tenant, one after the other or as lines of a batch: in one call, so at the same time."""
        jobs = [
            Job(
                id=new_job_id(0),
                model=MODEL,
                tenant=tenant,
                priority=lane,
                prompt=Text(("x" * size * (number + 1),)),
                sampling=Sampling(max_tokens=most, n=1 + number),
                **limits,  # type: ignore[arg-type]
            )
            for number in range(count)
        ]
        if together:
            self.run(self.queue.put_parts(jobs))
        else:
            for job in jobs:
                self.run(self.queue.put(job))
        for job, entry in zip(jobs, self.run(self._entries([job.id for job in jobs])), strict=True):
            weight = WEIGHTS.get(job.tenant, 1.0)
            self.model.join(job.id, job.tenant, job.priority, cost_of(job), weight, entry)

    async def _place_to_retry(self, job_id: str) -> tuple[int, ...]:
        (entry,) = await self._entries([job_id])
        retry = partition_key(0, "retry", MODEL, self.model.jobs[job_id].lane)
        members = await self.wire.redis.zrange(retry, 0, -1, withscores=True)
        (since,) = [score for member, score in members if member.endswith(job_id.encode())]
        return (int(since), *map(int, entry.split("-")))

    async def _entries(self, job_ids: list[str]) -> list[str]:
        pipeline: Any = self.wire.redis.pipeline(transaction=False)
        for job_id in job_ids:
            pipeline.hget(partition_key(0, "job", job_id), "entry")
        return [entry.decode() for entry in await pipeline.execute()]

    @rule(
        want=st.integers(1, 6),
        spare=st.sampled_from([None, None, 0, 1, 2]),
        shared=st.sampled_from([0, 1, 2]),
        crowding=st.one_of(st.just(set[str]()), st.sets(TENANTS, max_size=3)),
    )
    def claim(self, want: int, spare: int | None, shared: int, crowding: set[str]) -> None:
        """What the worker gets, one after the other, is what the rule says."""
        now_ms = self.run(self.wire.now_ms())
        claim = self.lease.claim(0, want, lowest=spare, shared=shared, crowding=sorted(crowding))
        claimed = self.run(claim)
        expected, ended = self.model.claim(now_ms, want, spare, self.overdue.__contains__, shared, crowding)
        jobs = [claim for claim in claimed.jobs if isinstance(claim, Claim)]
        assert [claim.job.id for claim in jobs] == expected
        self.held |= {claim.job.id: claim for claim in jobs}
        for job_id in ended:
            self.overdue.discard(job_id)
            assert self.run(JobReader(self.wire).record(job_id)).state is JobState.EXPIRED
        SEEN.update(pick.turn for pick in self.model.picks)
        self.model.picks.clear()

    @precondition(lambda self: self.held)
    @rule(data=st.data(), share=st.sampled_from([0.0, 0.1, 1.0]), prompt=st.sampled_from([0, 1, 700]))
    def finish(self, data: st.DataObject, share: float, prompt: int) -> None:
        """A job has generated less than it might have, or all of it; its prompt was not of the estimated size."""
        job_id = data.draw(st.sampled_from(list(self.held)))
        claim = self.held.pop(job_id)
        generated = int(cost_of(claim.job).output * share)
        end = Terminal(job_id, JobState.COMPLETED, 0, ("stop",), usage=Usage(prompt, generated))
        self.run(self.lease.calls([self.lease.finish_call(Finish(end, claim.run_number, True, prompt=prompt))]))
        self.model.finish(job_id, generated, prompt)
        self.overdue.discard(job_id)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """A job waits to be tried again."""
        job_id = data.draw(st.sampled_from(list(self.held)))
        self.run(self.lease.release(job_id, self.held.pop(job_id).run_number))
        self.model.requeue(job_id, self.run(self._place_to_retry(job_id)))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def decline(self, data: st.DataObject) -> None:
        """A job that only a newer version can read goes back to its lane."""
        job_id = data.draw(st.sampled_from(list(self.held)))
        claim = self.held.pop(job_id)
        self.run(self.lease.decline([UnreadableClaim(job_id, claim.run_number, "", newer=True)]))
        self.model.put_back(job_id, self.run(self._entries([job_id]))[0])

    @precondition(lambda self: self.waiting() or self.requeued())
    @rule(data=st.data(), generated=st.sampled_from([0, 1, 500]))
    def cancel(self, data: st.DataObject, generated: int) -> None:
        """A waiting job ends. If a worker had begun it, what it has generated is charged once it is stored."""
        job_id = data.draw(st.sampled_from([*self.waiting(), *self.requeued()]))
        begun = job_id in self.requeued()
        self.run(self.queue.cancel(job_id))
        self.model.leave(job_id)
        self.overdue.discard(job_id)
        if begun:
            runs = self.run(self._runs(job_id))
            stored = ("cancelled", runs, "record", "rows", generated, 0, 0)
            assert self.run(self.wire.call("salvage", 0, job_id, *stored)) == 1
            self.model.finish(job_id, generated)
            assert self.run(self.wire.call("salvage", 0, job_id, *stored)) == 0

    async def _runs(self, job_id: str) -> str:
        redis: Any = self.wire.redis
        runs: bytes = await redis.hget(partition_key(0, "job", job_id), "runs")
        return runs.decode()

    @precondition(lambda self: self.waiting())
    @rule(data=st.data(), swept=st.booleans())
    def expire(self, data: st.DataObject, swept: bool) -> None:
        """A job's time is over: the reaper notices, or a claim does."""
        job_id = data.draw(st.sampled_from(self.waiting()))
        self.run(self._overdue(job_id))
        self.overdue.add(job_id)
        if swept:
            assert self.run(Reaper(self.wire).sweep()).expired == len(self.overdue)
            for each in sorted(self.overdue):  # as the timers stand
                self.model.leave(each)
            self.overdue.clear()

    async def _overdue(self, job_id: str) -> None:
        redis: Any = self.wire.redis
        await redis.hset(partition_key(0, "job", job_id), "deadline", 1)
        await redis.zadd(partition_key(0, "timers"), {job_id: 1})

    @precondition(lambda self: self.waiting())
    @rule(lane=st.sampled_from([Priority.STANDARD, Priority.BATCH]), tenant=TENANTS, some=st.booleans())
    def time_passes(self, lane: Priority, tenant: str, some: bool) -> None:
        """The jobs of a lane, or those of one tenant there, get so old that their lane counts as a higher one."""
        jobs = [job for job in self.model.lanes[lane].waiting.values() if not some or job.tenant == tenant]
        for job in jobs:
            older_ms = BOOST_MS[lane] + 60_000
            self.run(self._shift(lane, job, older_ms))
            older = job.arrived_ms - older_ms
            self.model.lanes[lane].waiting[job.id] = replace(job, arrived_ms=older)

    async def _shift(self, lane: Priority, job: WaitingJob, older_ms: int) -> None:
        redis: Any = self.wire.redis
        member = f"{job.number[0]:015}-{job.number[1]:010}"
        line = partition_key(0, "line", str(len(MODEL)), MODEL, lane, job.tenant)
        for key, name in ((partition_key(0, "arrivals", MODEL, lane), member), (line, f"{member}:{job.id}")):
            assert await redis.zscore(key, name) is not None
            await redis.zincrby(key, -older_ms, name)

    @invariant()
    def the_store_has_what_the_model_has(self) -> None:
        self.run(self.model.check(self.wire.redis, MODEL))

    def teardown(self) -> None:
        """When no job waits, nothing of the index is left but what expires."""
        try:
            for job_id in self.waiting():
                self.run(self.queue.cancel(job_id))
            self.run(self._nothing_is_left())
        finally:
            self.run(self.wire.close())
            self.runner.close()

    async def _nothing_is_left(self) -> None:
        redis: Any = self.wire.redis
        for kind in ("tenants", "line", "arrivals"):
            assert await redis.keys(partition_key(0, "job", "").removesuffix("job:") + f"{kind}:*") == []
        for kind in ("served", "credit"):
            for key in await redis.keys(f"*:{kind}:*"):
                assert await redis.ttl(key) > 0, key


@pytest.mark.hypothesis
def test_every_claim_is_what_the_order_says(redis_url: str) -> None:
    """Random lives of jobs of four tenants in three lanes; floor and age boost have their turns, too."""
    SEEN.clear()
    run_machine(OrderMachine, redis_url, steps=40)
    print(SEEN)
    assert all(SEEN[turn] > 5 for turn in Turn)
