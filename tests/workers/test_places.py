"""Places in an engine: which of them waiting choices may take, and which are kept for the jobs that are claimed next.

The engine here ends a text when the test says so, so nothing depends on time.
"""

from __future__ import annotations

import pytest
from many_choices import job_of, nothing_left, put_many
from sim_worker import Running, Start, Workshop, put_job, until

from penstock.engine import Piece, Request, Sampling, Stats
from streaming.jobs.codec import Terminal
from streaming.jobs.job import Job
from streaming.jobs.queue import Queue
from streaming.order import Priority
from streaming.redis.client import RedisClient
from workers.attempt import Attempt
from workers.choices import PARTIAL_PER_SLOT
from workers.engines.sim.engine import SimEngine
from workers.engines.sim.settings import SimSettings
from workers.record import Recorder
from workers.settings import WorkerSettings

pytestmark = pytest.mark.slow

SLOTS = SimSettings(slots=4)
NEVER_MS = 600_000
"""The worker looks for work only when it is told, or has room."""


class Manual(SimEngine):
    """Runs what it is given, in order, as far as there are slots; a text ends when `end` says so."""

    def __init__(self, model: str, settings: SimSettings) -> None:
        super().__init__(model, settings)
        self.given: list[str] = []
        """The job of each text, in order."""
        self.live: list[str] = []

    async def start(self, on_step, on_phase):  # type: ignore[no-untyped-def]
        self.tell = on_step
        return await super().start(on_step, on_phase)

    def submit(self, request: Request) -> None:
        self.given.append(job_of(request.id))
        self.live.append(request.id)

    def stats(self) -> Stats:
        running = min(len(self.live), SLOTS.slots)
        return Stats(slots=SLOTS.slots, running=running, waiting=len(self.live) - running)

    def cancel(self, request_id: str) -> None:
        if request_id in self.live:
            self.live.remove(request_id)
            self.tell([Piece(request_id, finish="cancelled")])

    def end(self, *jobs: Job) -> None:
        """In one step the oldest text of each of these jobs, or of all that run."""
        ended = []
        for ids in [{job.id} for job in jobs] or [set(self.given)]:
            ended.append(next(each for each in self.live if job_of(each) in ids))
            self.live.remove(ended[-1])
        self.tell([Piece(each, "text", (), 1, "length", 1) for each in ended])


def _is_over(running: Running) -> bool:
    """Whether the worker has no job left; ends the oldest text of its engine."""
    if running.engine.live:
        running.engine.end()
    return not running.worker.running


class Bench:
    """A worker of four slots and who brings it jobs. Those of sixteen choices are there before it is."""

    def __init__(self, wire: RedisClient, start: Start) -> None:
        self.queue, self._start = Queue(wire), start

    async def begin(self, large: int, prefetch: int = 1, priority: Priority = Priority.STANDARD) -> list[Job]:
        """Start the worker; it claims so many jobs of sixteen choices together and fills its slots."""
        jobs = [await put_many(self.queue, 16, 8, priority=priority) for _ in range(large)]
        settings = WorkerSettings(prefetch=prefetch, poll_ms=NEVER_MS, drain_s=0, reserved_slots=0)
        self.running = await self._start(SLOTS, settings, engine=Manual)
        self.engine = self.running.engine
        await until(lambda: len(self.engine.live) == min(2 * large, SLOTS.slots))
        return jobs

    async def chat(self, priority: Priority = Priority.INTERACTIVE) -> Job:
        """A job of one choice."""
        return await put_job(self.queue, priority=priority, sampling=Sampling(max_tokens=4))

    async def given(self, job: Job) -> None:
        """Until the engine has it."""
        await until(lambda: job.id in self.engine.given)

    async def looked(self) -> None:
        """Until the worker has looked for work and found that it has no room."""
        await until(lambda: self.running.worker._starter.is_full)

    async def ended(self, jobs: list[Job]) -> None:
        """All end, with every choice."""
        await until(lambda: _is_over(self.running))
        assert [self.engine.given.count(job.id) for job in jobs] == [job.choices for job in jobs]
        nothing_left(self.running)


@pytest.fixture
def bench(wire: RedisClient, start: Start) -> Bench:
    return Bench(wire, start)


async def test_waiting_choices_leave_the_place_beyond_the_slots(bench: Bench) -> None:
    """However many large jobs there are, a job of a higher lane is claimed at once and has the next slot."""
    jobs = await bench.begin(3)
    chat = await bench.chat()
    await bench.given(chat)
    assert len(bench.engine.live) == 5, "before any text has ended"
    await bench.ended([*jobs, chat])


async def test_jobs_of_the_same_lane_and_choices_have_a_place_each_in_turn(bench: Bench) -> None:
    """Neither holds up the other: a stream of jobs, and choices that waited before them."""
    jobs = await bench.begin(3)
    others = [await bench.chat(Priority.STANDARD) for _ in range(4)]
    for other in others:
        await bench.given(other)
        await bench.looked()
        before = len(bench.engine.given)
        bench.engine.end()
        assert len(bench.engine.given) == before + 1 and bench.engine.given[-1] in {job.id for job in jobs}
        bench.engine.end()  # this place is the next one's of the others
        assert len(bench.engine.given) == before + 1
    await bench.ended([*jobs, *others])


async def test_more_large_jobs_than_places_do_not_close_the_worker(bench: Bench) -> None:
    """Some of them have no choice running for a while, each goes on in its turn, and a chat is claimed at once."""
    jobs = await bench.begin(4)
    for _ in range(4):
        jobs.append(await put_many(bench.queue, 16, 8, priority=Priority.STANDARD))
        await bench.given(jobs[-1])
        bench.engine.end()  # a place for a choice that waits
        assert len(bench.engine.live) == 5
        bench.engine.end()  # and one for the next job
    chat = await bench.chat()
    await bench.given(chat)
    seen = len(bench.engine.given)
    for _ in range(12):
        bench.engine.end()
    assert set(bench.engine.given[seen:]) == {job.id for job in jobs}, "each has had a place"
    await bench.ended([*jobs, chat])


async def test_without_a_place_beyond_the_slots_a_claim_goes_first(bench: Bench) -> None:
    """The place of a choice that ends is the claimer's, if it had none the last time; what it leaves is for choices."""
    jobs = await bench.begin(3, prefetch=0)
    chat = await bench.chat()
    await bench.looked()
    bench.engine.end()
    await bench.given(chat)
    assert bench.engine.given[4] == chat.id and len(bench.engine.live) == 4
    await bench.looked()
    bench.engine.end(jobs[0])  # nobody waits in the queue
    await until(lambda: len(bench.engine.live) == 4)
    assert bench.engine.given[5] in {job.id for job in jobs}
    await bench.ended([*jobs, chat])


async def test_a_worker_does_not_hold_any_number_of_them(bench: Bench) -> None:
    """Beyond so many jobs with choices that wait, others are left to other workers."""
    await bench.begin(0)
    most = PARTIAL_PER_SLOT * SLOTS.slots
    jobs = [await put_many(bench.queue, 6, 8, priority=Priority.STANDARD) for _ in range(most + 5)]
    held: list[int] = []

    async def is_over() -> bool:
        held.append(len(bench.running.worker._partial))
        if bench.engine.live:
            bench.engine.end()
        return not bench.running.worker.running and len(set(bench.engine.given)) == len(jobs)

    await until(is_over)
    assert max(held) <= most
    assert [bench.engine.given.count(job.id) for job in jobs] == [6] * len(jobs)


@pytest.mark.parametrize("prefetch", [0, 1])
async def test_a_tenant_with_its_share_leaves_a_slot_to_others(shop: Workshop, prefetch: int) -> None:
    """Its jobs and choices wait, and a job of another tenant begins before any text has ended."""
    settings = WorkerSettings(prefetch=prefetch, poll_ms=NEVER_MS, drain_s=0)
    running = await shop.start(SLOTS, settings, engine=Manual)
    engine = running.engine
    small = await shop.put(tenant="light")
    await until(lambda: len(engine.live) == 1)
    engine.end(small)
    flood = [await put_many(shop.queue, 8, 4, tenant="flood") for _ in range(2)]
    await until(lambda: len(engine.live) == 3)
    flood.append(await shop.put(tenant="flood"))
    later = await shop.put(tenant="light")
    await until(lambda: later.id in engine.given)
    assert len(engine.live) == 4 and flood[-1].id not in engine.given
    await until(lambda: _is_over(running) and flood[-1].id in engine.given)
    nothing_left(running)


async def test_many_jobs_that_are_claimed_together_leave_a_slot_to_others(shop: Workshop) -> None:
    """Also if their tenant has no text when they are claimed, but has used the worker as others have."""
    running = await shop.start(SLOTS, WorkerSettings(poll_ms=NEVER_MS, drain_s=0), engine=Manual)
    engine = running.engine
    small = [await shop.put(tenant=tenant) for tenant in ("light", "flood")]
    await until(lambda: len(engine.live) == 2)
    running.worker._claimer.hold(NEVER_MS)
    engine.end(*small)
    flood = [await shop.put(tenant="flood") for _ in range(8)]
    running.worker._claimer.hold(0)
    await until(lambda: len(engine.live) == 3)
    later = await shop.put(tenant="light")
    await until(lambda: later.id in engine.given)
    assert sum(each.id in engine.given for each in flood) == 3
    await until(lambda: _is_over(running) and set(engine.given) >= {each.id for each in flood})
    nothing_left(running)


async def test_an_engine_may_send_the_last_piece_within_a_cancel(
    bench: Bench, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that is cancelled ends once, and one that is preempted is put back."""
    ends, ended = list[str](), recorder.ended

    def noted(attempt: Attempt, end: Terminal) -> None:
        ends.append(end.job)
        ended(attempt, end)

    monkeypatch.setattr(recorder, "ended", noted)
    await bench.begin(0)
    chat, line = await bench.chat(), await bench.chat(Priority.BATCH)
    await bench.given(chat)
    await bench.given(line)
    await bench.queue.cancel(chat.id)
    await until(lambda: chat.id in ends)
    bench.running.worker._preemption.free(1)
    await until(lambda: bench.engine.given.count(line.id) == 2)
    bench.engine.end()
    await until(lambda: not bench.running.worker.running)
    assert ends == [chat.id, line.id]
