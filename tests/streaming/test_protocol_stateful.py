"""The scripts on a real server against a plain model of them: whatever is done in whatever order, both must agree.

Hypothesis draws the steps; what fails is shrunk to the shortest run. PENSTOCK_EXAMPLES sets how many runs are tried.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import pytest
from flow import append, delta, deltas_of, kept, sections_of
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from order_model import OrderModel
from store_machine import StoreMachine, run_machine

from streaming.errors import Fenced, KeyReused
from streaming.jobs.codec import Delta, Frame, Opening, Run, Terminal, decode_reply
from streaming.jobs.job import Job, JobState, Text
from streaming.jobs.lease import SILENT, Claim, Finish, HeldJob, Lease
from streaming.jobs.queue import Queue
from streaming.jobs.reader import JobReader
from streaming.jobs.reaper import Reaper
from streaming.jobs.records import JobRecord
from streaming.jobs.relay import Relay
from streaming.jobs.waiting import cost_of, reserved_bytes
from streaming.keys import channel, partition_key, prefix
from streaming.order import Priority
from streaming.redis.client import Call, RedisClient
from streaming.redis.settings import RedisSettings

pytestmark = pytest.mark.slow

MODEL = "m"
HOUR_MS = 3_600_000
"""Nothing lapses by itself: the rules alone decide whose time is over."""
OWN, OTHER = channel("api", "own"), channel("api", "other")
"""Where a job's own reader listens, and one that joins later."""
PRIORITIES = st.sampled_from([Priority.STANDARD, Priority.STANDARD, Priority.BATCH])


@dataclass(eq=False)
class Worker:
    """A lease, and what its process believes."""

    name: str
    lease: Lease
    fenced: bool = False
    held: dict[str, Claim] = field(default_factory=dict)
    unheard: dict[str, Claim] = field(default_factory=dict)
    """Claimed, but the answer was lost."""
    claims: dict[str, Claim] = field(default_factory=dict)
    """Every claim it heard of, the last of each job."""
    suspects: bool = False
    last: list[Call] = field(default_factory=list)
    """Its last writes, which it may repeat."""

    def __repr__(self) -> str:
        return self.name


@dataclass(eq=False)
class Expected:
    """What must be true of one job."""

    job: Job
    key: str
    digest: str
    state: JobState = JobState.QUEUED
    rows: list[Delta] = field(default_factory=list)
    authors: list[Run] = field(default_factory=list)
    """Of the rows, one each."""
    holder: Worker | None = None
    lane: str = ""
    queue: str = ""
    """Where it waits if it was put back."""
    entry: tuple[int, ...] = ()
    """Its place there."""
    alone: bool = False
    losses: int = 0
    cancelled: str = ""
    """Who cancelled it first, while it ran: owner or reader."""
    pinned: bool = False
    """A request with its key that did not wait was told its id."""
    abandoned: bool = False
    """Cancelled because no client waited for it any more."""
    begun: bool = False
    overdue: bool = False
    followed: int | None = None
    """The rows there were when the other reader came."""
    resumed: bool = False
    """A reader came back through another API process while it had not ended."""
    recorded: bool = False
    """A worker wrote the end, with every row."""
    reason: str = ""
    """The code of an end that no worker wrote."""

    def __repr__(self) -> str:
        return self.job.id[-4:]

    @property
    def readable(self) -> list[Delta]:
        """The rows as they are read: from the log, or as the record of an ended job keeps them."""
        return list(kept(self.rows)) if self.state.final else self.rows


class QueueMachine(StoreMachine):
    """Every rule does one thing to the store and says what must have come of it."""

    def __init__(self) -> None:
        super().__init__()
        self.jobs: dict[str, Expected] = {}
        self.keys: dict[tuple[str, str], Expected] = {}
        self.workers: list[Worker] = []
        self.touched: set[str] = set()
        self.order = OrderModel()
        self.dead = 0

    @initialize(attempts=st.integers(2, 3), workers=st.integers(1, 3), jobs=st.lists(PRIORITIES, max_size=4))
    def open(self, attempts: int, workers: int, jobs: list[Priority]) -> None:
        """Some workers and some jobs are there already."""
        self.wire = RedisClient.open(RedisSettings(url=self.url, lease_ms=HOUR_MS, max_attempts=attempts, timeout_s=30))
        self.queue, self.reader, self.reaper = Queue(self.wire), JobReader(self.wire), Reaper(self.wire)
        self.attempts = attempts
        self.pubsub = self.wire.redis.pubsub()
        self.run(self._listen())
        for _ in range(workers):
            self.start()
        for priority in jobs:
            self.put("t", priority, "", "x", {}, True)

    async def _listen(self) -> None:
        await self.pubsub.subscribe(OWN, OTHER)
        for _ in range(2):
            assert await self.pubsub.get_message(timeout=10) is not None

    # --- who may act -------------------------------------------------------------------------------------------------

    def live(self) -> list[Worker]:
        return [worker for worker in self.workers if not worker.fenced]

    def zombies(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.fenced]

    def able(self) -> list[Worker]:
        """May claim: one that is to run suspects first finishes what it has."""
        return [worker for worker in self.live() if not (worker.suspects and worker.held)]

    def busy(self) -> list[Worker]:
        return [worker for worker in self.live() if worker.held]

    def writers(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.last]

    def limited(self) -> list[Expected]:
        """Jobs whose time may run out: until their claim, or until their end."""
        return [
            job
            for job in self.jobs.values()
            if not job.state.final
            and not job.overdue
            and (job.job.deadline_ms or (job.job.max_queue_ms and not job.begun))
        ]

    def _some_job(self, data: st.DataObject) -> Expected:
        """One that has not ended, or the one that was put last."""
        jobs = list(self.jobs.values())
        return data.draw(st.sampled_from([job for job in jobs if not job.state.final] + jobs[-1:]))

    # --- clients -----------------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.jobs) < 8)
    @rule(
        tenant=st.sampled_from(["t", "u"]),
        priority=PRIORITIES,
        key=st.sampled_from(["", "a", "b"]),
        digest=st.sampled_from(["x", "y"]),
        limit=st.sampled_from([{}, {}, {"deadline_ms": HOUR_MS}, {"max_queue_ms": HOUR_MS}]),
        stream=st.booleans(),
    )
    def put(self, tenant: str, priority: Priority, key: str, digest: str, limit: dict[str, int], stream: bool) -> None:
        """A new job, unless its idempotency key leads to one that is there (I5)."""
        job = Job(
            # Counted, not random, so that a run can be repeated.
            id=f"job_00{len(self.jobs) + 1:030x}",
            model=MODEL,
            tenant=tenant,
            priority=priority,
            prompt=Text((digest,)),
            reply_to=OWN if stream else "",
            stream=stream,
            deadline_ms=limit.get("deadline_ms"),
            max_queue_ms=limit.get("max_queue_ms"),
        )
        known = self.keys.get((tenant, key)) if key else None
        if known is not None and known.digest != digest:
            with pytest.raises(KeyReused):
                self.run(self.queue.put(job, idempotency_key=key, digest=digest))
            return
        accepted = self.run(self.queue.put(job, idempotency_key=key, digest=digest))
        assert accepted.joined == (known is not None)
        if known is not None:
            assert accepted.id == known.job.id and accepted.state is known.state
            known.pinned |= not stream
            return
        expected = self.jobs[job.id] = Expected(job, key, digest, pinned=bool(key) and not stream)
        if key:
            self.keys[tenant, key] = expected
        self._queued(expected, "lane")

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def put_again(self, data: st.DataObject) -> None:
        """The answer was lost: the same put changes nothing."""
        job = self._some_job(data)
        accepted = self.run(self.queue.put(job.job, idempotency_key=job.key, digest=job.digest))
        assert accepted.id == job.job.id and not accepted.joined
        self.touched.add(job.job.id)

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        """A waiting job has ended when the answer comes, a running one will, an ended one stays."""
        job = self._some_job(data)
        assert self.run(self.queue.cancel(job.job.id)) is job.state
        if job.state is JobState.QUEUED:
            self._ended(job, JobState.CANCELLED, "job_cancelled")
        elif job.state is JobState.RUNNING:
            job.cancelled = job.cancelled or "owner"

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        """The client is gone: the job ends and its key is free, unless others wait for it or know its id."""
        job = self._some_job(data)
        kept = job.state.final or job.pinned or job.resumed or job.followed is not None
        gone = channel("api", "gone") if kept else OWN
        assert self.run(self.queue.abandon(job.job.id, gone)) is not kept
        if kept:
            return
        job.abandoned = True
        if self.keys.get((job.job.tenant, job.key)) is job:
            del self.keys[job.job.tenant, job.key]
        if job.state is JobState.QUEUED:
            self._ended(job, JobState.CANCELLED, "job_cancelled")
        else:
            job.cancelled = job.cancelled or "reader"

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def follow(self, data: st.DataObject) -> None:
        """One more reader, from now on; asking twice is asking once."""
        job = self._some_job(data)
        assert self.run(self.queue.add_address(job.job.id, OTHER)) is job.state
        if not job.state.final and job.followed is None:
            job.followed = len(job.rows)

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        """A reader that comes back with its cursor gets what follows it, each row once, and the end if there is one."""
        begun = [job for job in self.jobs.values() if job.rows and not job.recorded]
        job = data.draw(st.sampled_from(begun)) if begun else self._some_job(data)
        after = len(job.rows) - data.draw(st.integers(0, len(job.rows)))
        assert self.run(deltas_of(self.reader, self._record(job), after)) == job.readable[after:]
        job.resumed |= not job.state.final
        rows, terminal = self.run(self._resumed(job, after))
        assert rows == job.readable[after:]
        assert (terminal.state if terminal else None) == (job.state if job.state.final else None)

    async def _resumed(self, job: Expected, after: int) -> tuple[list[Delta], Terminal | None]:
        relay, job_id = Relay(self.wire), job.job.id
        runs = [logged.run for logged in (await self.reader.record(job_id)).runs]
        seen = runs[: runs.index(job.authors[after - 1]) + 1] if after else []
        buffer = relay.open(job_id, after, runs=seen)
        await relay.subscribe(buffer)
        return await buffer.take(0)

    # --- workers -----------------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.live()) < 3)
    @rule()
    def start(self) -> None:
        """One more worker."""
        worker = Worker(f"w{len(self.workers)}", Lease(self.wire, MODEL))
        self.run(worker.lease.register())
        self.workers.append(worker)

    @precondition(lambda self: self.able())
    @rule(data=st.data(), want=st.integers(1, 3), heard=st.sampled_from([True, True, True, False]))
    def claim(self, data: st.DataObject, want: int, heard: bool) -> None:
        """The first jobs of the highest lanes, and no suspect but alone; the answer may be lost."""
        self._claim(data.draw(st.sampled_from(self.able())), want, heard=heard)

    def _claim(self, worker: Worker, want: int, *, heard: bool = True) -> None:
        alone = worker.suspects
        answer = self.run(worker.lease.claim(0, want, alone=alone))
        if alone or answer.suspects:
            taken = self._take_suspect() if alone and answer.suspects else []
        else:
            taken = self._take_in_order(want)
        claims = [claim for claim in answer.jobs if isinstance(claim, Claim)]
        assert [claim.job for claim in claims] == [job.job for job in taken]
        for job, claim in zip(taken, claims, strict=True):
            job.state, job.holder, job.alone, job.begun = JobState.RUNNING, worker, alone, True
            (worker.held if heard else worker.unheard)[job.job.id] = claim
            worker.claims[job.job.id] = claim
        if heard:
            worker.suspects = answer.suspects

    def _take_in_order(self, want: int) -> list[Expected]:
        now_ms = self.run(self.wire.now_ms())
        taken, ended = self.order.claim(now_ms, want, None, lambda job_id: self.jobs[job_id].overdue)
        for job_id in ended:
            self._ended(self.jobs[job_id], JobState.EXPIRED, "deadline_exceeded_in_queue")
        self.touched.update(taken)
        return [self.jobs[job_id] for job_id in taken]

    def _take_suspect(self) -> list[Expected]:
        """By priority, the oldest entry first; those whose time is over end on the way."""
        waiting = [job for job in self.jobs.values() if job.state is JobState.QUEUED and job.queue == "suspects"]
        for job in sorted(waiting, key=lambda job: (job.job.priority.rank, job.entry)):
            if not job.overdue:
                self.touched.add(job.job.id)
                return [job]
            self._ended(job, JobState.EXPIRED, "deadline_exceeded_in_queue")
        return []

    @precondition(lambda self: self.busy())
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """One engine step: a row for some of the jobs a worker holds, in one frame."""
        worker = data.draw(st.sampled_from(self.busy()))
        held = list(worker.held)
        chosen = data.draw(st.lists(st.sampled_from(held), min_size=1, max_size=len(held), unique=True))
        self._append(worker, [self.jobs[job_id] for job_id in chosen])

    def _append(self, worker: Worker, jobs: list[Expected]) -> None:
        rows: dict[str, list[Delta]] = defaultdict(list)
        openings = [self._opening(worker, job) for job in jobs]
        for job in jobs:
            row = self._row(worker, job)
            for address in self._addresses(job):
                rows[address].append(row)
            job.rows.append(row)
            job.authors.append(Run(worker.lease.id, row.run_number))
            self.touched.add(job.job.id)
        worker.last = [append(worker.lease, rows, *openings)]
        self.run(worker.lease.calls(worker.last))

    @staticmethod
    def _opening(worker: Worker, job: Expected) -> tuple[int, Opening]:
        number = worker.held[job.job.id].run_number
        run = Run(worker.lease.id, number)
        before = [each for each in job.authors if each != run]
        return number, Opening(job.job.id, len(before) + 1, before[-1] if before else None)

    @staticmethod
    def _row(worker: Worker, job: Expected) -> Delta:
        seq = len(job.rows) + 1
        claim = worker.held.get(job.job.id)
        return delta(claim.run_number if claim else 0, seq, f"{worker.name} {seq} ")

    @staticmethod
    def _addresses(job: Expected) -> list[str]:
        addresses = [OWN] * job.job.stream + [OTHER] * (job.followed is not None)
        return addresses or [SILENT]

    @precondition(lambda self: self.busy())
    @rule(data=st.data(), state=st.sampled_from([JobState.COMPLETED, JobState.COMPLETED, JobState.FAILED]))
    def finish(self, data: st.DataObject, state: JobState) -> None:
        """The end of a job, once, with all that was shown; a cancel may come too late."""
        worker = data.draw(st.sampled_from(self.busy()))
        job = self.jobs[data.draw(st.sampled_from(list(worker.held)))]
        if job.cancelled and data.draw(st.booleans()):
            state = JobState.CANCELLED
        self._finish(worker, job, state)

    def _finish(self, worker: Worker, job: Expected, state: JobState) -> None:
        claim = worker.held.pop(job.job.id)
        worker.last = [worker.lease.finish_call(self._end(job, claim.run_number, state))]
        self.run(worker.lease.calls(worker.last))
        job.recorded = True
        self.order.finish(job.job.id, 0)
        self._ended(job, state)

    @staticmethod
    def _end(job: Expected, number: int, state: JobState) -> Finish:
        sections, rows = sections_of(job.authors), tuple(job.rows)
        return Finish(Terminal(job.job.id, state, len(rows), ("stop",), sections=sections, rows=rows), number, False)

    @precondition(lambda self: self.writers())
    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        """The answer was lost: the same writes change nothing, and a fenced worker's are refused."""
        worker = data.draw(st.sampled_from(self.writers()))
        if worker.fenced:
            with pytest.raises(Fenced):
                self.run(worker.lease.calls(worker.last))
        else:
            self.run(worker.lease.calls(worker.last))
        self.touched |= self.jobs.keys()

    @precondition(lambda self: any(worker.claims for worker in self.live()))
    @rule(data=st.data(), end=st.sampled_from([JobState.COMPLETED, JobState.FAILED, None, None]))
    def write_too_late(self, data: st.DataObject, end: JobState | None) -> None:
        """A job that this worker ended or handed back, or that it holds under another run, is neither ended nor handed
        back by it."""
        worker = data.draw(st.sampled_from([worker for worker in self.live() if worker.claims]))
        job_id, claim = data.draw(st.sampled_from(list(worker.claims.items())))
        job = self.jobs[job_id]
        if end is None:
            self.run(worker.lease.release(job_id, claim.run_number - (job.holder is worker)))
        else:
            number = claim.run_number + (job.holder is worker)
            self.run(worker.lease.calls([worker.lease.finish_call(self._end(job, number, end))]))
        self.touched.add(job_id)

    @precondition(lambda self: len(self.live()) > 1 and any(job.holder for job in self.jobs.values()))
    @rule(data=st.data())
    def finish_what_another_holds(self, data: st.DataObject) -> None:
        """The number of the run is not enough."""
        job = data.draw(st.sampled_from([job for job in self.jobs.values() if job.holder]))
        worker = data.draw(st.sampled_from([worker for worker in self.live() if worker is not job.holder]))
        assert job.holder is not None
        end = self._end(job, job.holder.claims[job.job.id].run_number, JobState.COMPLETED)
        self.run(worker.lease.calls([worker.lease.finish_call(end)]))
        self.touched.add(job.job.id)

    @precondition(lambda self: self.busy())
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """A worker that drains hands a job back."""
        worker = data.draw(st.sampled_from(self.busy()))
        self._release(worker, self.jobs[data.draw(st.sampled_from(list(worker.held)))])

    def _release(self, worker: Worker, job: Expected) -> None:
        claim = worker.held.pop(job.job.id, None) or worker.unheard.pop(job.job.id)
        self.run(worker.lease.release(job.job.id, claim.run_number))
        if job.cancelled:
            self._ended(job, JobState.CANCELLED, "job_cancelled")
        else:
            self._queued(job, *(["retry", "suspects"] if job.alone else ["retry"]))

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def beat(self, data: st.DataObject) -> None:
        """A worker hears what the store counts as its own, and hands back what it does not know."""
        worker = data.draw(st.sampled_from(self.live()))
        claims = worker.held | worker.unheard
        mine = {
            job_id: HeldJob(claim.run_number, bool(job.cancelled), job.cancelled)
            for job_id, claim in claims.items()
            for job in (self.jobs[job_id],)
        }
        assert self.run(worker.lease.beat(0)) == mine
        assert mine.keys() == {job_id for job_id, job in self.jobs.items() if job.holder is worker}
        for job_id in list(worker.unheard):
            self._release(worker, self.jobs[job_id])

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """A worker goes when it holds nothing, and not before."""
        worker = data.draw(st.sampled_from(self.live()))
        held = len(worker.held) + len(worker.unheard)
        assert self.run(worker.lease.leave()) == held
        if not held:
            self.workers.remove(worker)

    @precondition(lambda self: self.zombies() and self.jobs)
    @rule(data=st.data())
    def zombie_writes(self, data: st.DataObject) -> None:
        """Whatever a fenced worker tries, of the jobs it held or of others, it is refused."""
        worker = data.draw(st.sampled_from(self.zombies()))
        job = self.jobs[data.draw(st.sampled_from(list(worker.held or self.jobs)))]
        number = worker.held[job.job.id].run_number if worker.held else 1
        rows = {address: [self._row(worker, job)] for address in (OWN, OTHER)}
        opening = (number, Opening(job.job.id))
        lease = worker.lease
        tries = {
            "append": lambda: lease.calls([append(lease, rows, opening)]),
            "finish": lambda: lease.calls([lease.finish_call(self._end(job, number, JobState.COMPLETED))]),
            "release": lambda: lease.release(job.job.id, number),
            "claim": lambda: lease.claim(0, 3),
            "beat": lambda: lease.beat(0),
        }
        with pytest.raises(Fenced):
            self.run(tries[data.draw(st.sampled_from(sorted(tries)))]())
        self.touched.add(job.job.id)

    # --- time --------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def lapse(self, data: st.DataObject) -> None:
        """A lease runs out, whether its worker is alive or not."""
        self._lapse(data.draw(st.sampled_from(self.live())))

    def _lapse(self, worker: Worker) -> None:
        self.run(self._score("leases", worker.lease.id))
        worker.fenced = True
        lost = [job for job in self.jobs.values() if job.holder is worker]
        back = [job for job in lost if self._lost(job)]
        given_up = [job for job in lost if job.state is JobState.FAILED]
        self.dead += len(given_up)
        self._sweep((1, len(back), len(given_up)), back)
        for job in lost:
            if job.state.final and job.rows:
                self._record(job)  # the sweep has ended it: only now are the tokens of its logs stored and charged

    def _lost(self, job: Expected) -> bool:
        """Whether a job whose worker was lost is tried again."""
        job.losses += 1
        if job.cancelled:
            self._ended(job, JobState.CANCELLED, "job_cancelled")
        elif job.alone or job.losses >= self.attempts:
            self._ended(job, JobState.FAILED, "poison" if job.alone else "attempts_exhausted")
        return not job.state.final

    @rule()
    def sweep(self) -> None:
        """Nothing has lapsed, but waiting jobs may be overdue."""
        self._sweep((0, 0, 0), [])

    def _sweep(self, lapsed_requeued_given_up: tuple[int, int, int], back: list[Expected]) -> None:
        overdue = [job for job in self.jobs.values() if job.overdue and job.state is JobState.QUEUED]
        swept = self.run(self.reaper.sweep())
        assert (swept.lapsed_workers, swept.requeued, len(swept.given_up)) == lapsed_requeued_given_up
        for job in back:
            if not (job.overdue and self._record(job).state is JobState.EXPIRED):
                self._queued(job, "suspects" if job.losses == self.attempts - 1 else "retry")
        # Of a job that was begun and lost the time may be noticed at its next claim only.
        expired = [job for job in overdue if not job.begun or self._record(job).state is JobState.EXPIRED]
        expired += [job for job in back if job.state is not JobState.QUEUED]
        assert swept.expired == len(expired)
        for job in expired:
            self._ended(job, JobState.EXPIRED, "deadline_exceeded_in_queue")

    @precondition(lambda self: self.limited())
    @rule(data=st.data())
    def time_passes(self, data: st.DataObject) -> None:
        """A job's deadline is behind it now."""
        job = data.draw(st.sampled_from(self.limited()))
        name = "deadline" if job.job.deadline_ms else "queue_deadline"
        job.overdue = True
        self.run(self._overdue(job.job.id, name))

    async def _overdue(self, job_id: str, name: str) -> None:
        redis: Any = self.wire.redis
        await redis.hset(partition_key(0, "job", job_id), name, 1)
        await self._score("timers", job_id)

    async def _score(self, name: str, member: str) -> None:
        """The time of a member of a sorted set is long past."""
        await self.wire.redis.zadd(partition_key(0, name), {member: 1}, xx=True)

    # --- what the model learns ---------------------------------------------------------------------------------------

    def _record(self, job: Expected) -> JobRecord:
        return self.run(self.reader.record(job.job.id))

    def _queued(self, job: Expected, *kinds: str) -> None:
        """Only the store knows the number of the new entry; in whose lane it is, is known before."""
        record = self._record(job)
        assert record.state is JobState.QUEUED and (record.queue or "lane") in kinds
        job.state, job.holder, job.alone = JobState.QUEUED, None, False
        job.queue, job.lane, job.entry = record.queue, record.lane, tuple(map(int, record.entry.split("-")))
        if job.queue:
            key = partition_key(0, job.queue, MODEL, job.job.priority)
            members = self.run(self.wire.redis.zrange(key, 0, -1, withscores=True))
            (since,) = [score for member, score in members if member.endswith(job.job.id.encode())]
            job.entry = (int(since), *job.entry)
        if not job.queue:
            asked = job.job
            self.order.join(asked.id, asked.tenant, asked.priority, cost_of(asked), 1, record.entry)
        elif job.queue == "retry":
            self.order.requeue(job.job.id, job.entry)
        self.touched.add(job.job.id)

    def _ended(self, job: Expected, state: JobState, reason: str = "") -> None:
        assert not job.state.final, "a final state never changes"
        self.order.leave(job.job.id)
        if job.rows and not job.recorded:
            self._record(job)  # stores the tokens that are only in logs, so they are charged; `_lapse` does it later
            self.order.finish(job.job.id, sum(row.n for row in job.rows))
        job.state, job.holder, job.reason = state, None, reason
        self.touched.add(job.job.id)

    # --- what must hold ----------------------------------------------------------------------------------------------

    @invariant()
    def records_agree(self) -> None:
        """Every job is where it must be (I1, I2), and its rows are 1..n without gap or repetition (I3, I4)."""
        records = self.run(self.reader.records(list(self.jobs)))
        for job, record in zip(self.jobs.values(), records, strict=True):
            assert record is not None
            assert (record.job, record.state) == (job.job, job.state)
            assert job.holder is None or record.worker == job.holder.lease.id
            if job.job.id in self.touched:
                failure = record.terminal and record.terminal.failure
                assert (failure.code if failure else "") == job.reason
                assert self.run(deltas_of(self.reader, record)) == job.readable
                assert [row.seq for row in job.rows] == list(range(1, len(job.rows) + 1))
        self.touched = set()

    @invariant()
    def entries_agree(self) -> None:
        """A job that has not ended has one lane entry, any other none; claims and dead letters are as many as they
        must be, and just what unfinished jobs may still write is reserved."""
        self.run(self._count_entries())

    async def _count_entries(self) -> None:
        pipeline: Any = self.wire.redis.pipeline(transaction=False)
        for lane in {job.lane for job in self.jobs.values()}:
            pipeline.xrange(lane)
        pipeline.xlen(partition_key(0, "dead"))
        pipeline.hvals(partition_key(0, "owed"))
        *lanes, dead, owed = await pipeline.execute()
        await self.order.check(self.wire.redis, MODEL)
        entries = [field[b"job"].decode() for lane in lanes for _, field in lane]
        assert sorted(entries) == sorted(job_id for job_id, job in self.jobs.items() if not job.state.final)
        assert dead == self.dead
        unfinished = [job.job for job in self.jobs.values() if not job.state.final]
        assert sum(map(int, owed)) == sum(map(reserved_bytes, unfinished))

    # --- the end -----------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        try:
            self.touched |= self.jobs.keys()
            self._drain()
            self.records_agree()
            self.entries_agree()
            self.run(self._nothing_leaks())
            self.run(self._readers_heard_it_all())
        finally:
            self.run(self.pubsub.aclose())  # type: ignore[no-untyped-call]
            self.run(self.wire.close())
            self.runner.close()

    def _drain(self) -> None:
        """Every worker is lost, and a fresh one ends what is left."""
        for worker in self.live():
            self._lapse(worker)
        # Whoever was to run suspects and is no more: its time is over.
        self.run(self.wire.redis.delete(partition_key(0, "alone", MODEL)))  # type: ignore[arg-type]
        self.start()
        fresh = self.workers[-1]
        for _ in range(4 * len(self.jobs) + 4):
            self._claim(fresh, 3)
            for job_id in list(fresh.held):
                self._append(fresh, [self.jobs[job_id]])
                self._finish(fresh, self.jobs[job_id], JobState.COMPLETED)
        assert all(job.state.final for job in self.jobs.values())
        assert self.run(fresh.lease.leave()) == 0

    async def _nothing_leaks(self) -> None:
        """After the last job no claim, lease or timer is left, and all but the catalogue expires (I7)."""
        redis: Any = self.wire.redis
        await self.reaper.sweep()
        lasting = {"dead", "tick", "swept"} | {f"jobs:{tenant}" for tenant in ("t", "u")}
        for key in [key.decode() for key in await redis.keys("*")]:
            name = key.removeprefix(prefix(0))
            if name.startswith("lane:"):
                assert await redis.xlen(key) == 0
            else:
                assert name in lasting or await redis.ttl(key) > 0, f"{name} stays for ever"

    async def _readers_heard_it_all(self) -> None:
        """A connection that never broke brought each row once and in order, and each end once."""
        rows: dict[tuple[str, str], list[Delta]] = defaultdict(list)
        ends: dict[tuple[str, str], int] = defaultdict(int)
        for address, message in await self._heard():
            if isinstance(message, Frame):
                for row in message.rows:
                    rows[address, message.openings[row.run_number].job].append(row)
            else:
                ends[address, message.job] += 1
        for job_id, job in self.jobs.items():
            assert rows[OWN, job_id] == (job.rows if job.job.stream else [])
            assert ends[OWN, job_id] == (job.job.stream and not job.abandoned)
            assert rows[OTHER, job_id] == ([] if job.followed is None else job.rows[job.followed :])
            assert ends[OTHER, job_id] == (job.followed is not None)

    async def _heard(self) -> list[tuple[str, Any]]:
        last = [(address, b"last") for address in (OWN, OTHER)]
        for address, data in last:
            await self.wire.redis.publish(address, data)
        heard: list[tuple[str, Any]] = []
        while last:
            message = await self.pubsub.get_message(timeout=10)
            assert message is not None
            item = (message["channel"].decode(), message["data"])
            if item in last:
                last.remove(item)
            else:
                heard.append((item[0], decode_reply(item[1])))
        return heard


@pytest.mark.hypothesis  # `make properties` chooses its tests by this
def test_the_scripts_do_what_the_model_says(redis_url: str, caplog: pytest.LogCaptureFixture) -> None:
    """Random lives of jobs and workers, each checked after every step and drained at its end."""
    caplog.set_level(logging.ERROR)
    run_machine(QueueMachine, redis_url, steps=50)
