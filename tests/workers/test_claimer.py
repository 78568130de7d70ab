"""Claims on a real server: how many jobs a worker takes, when it holds back, and what it leaves to newer workers."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import msgspec
import pytest
from flow import a_lease, claim_one, lapse
from sim_worker import Running, Workshop, put_job, until

from penstock.engine import Capabilities, EngineDead, Stats
from streaming.fleet.plans import Plans, claim_lead
from streaming.jobs.codec import AddAddress, Cancel, encode
from streaming.jobs.dead_letters import DeadLetters
from streaming.jobs.job import JOB_VERSION, JobState
from streaming.jobs.lease import Claimed, Lease
from streaming.jobs.media import MediaStore
from streaming.jobs.queue import Queue
from streaming.jobs.reader import JobReader
from streaming.keys import partition_key
from streaming.redis.client import RedisClient
from workers.claimer import Claimer
from workers.engines.sim.settings import SimSettings
from workers.held_jobs import HeldJobs
from workers.settings import WorkerSettings

pytestmark = pytest.mark.slow


async def test_suspects_run_alone_and_the_innocent_complete(shop: Workshop) -> None:
    """Jobs that lost two workers are run one at a time; nothing runs beside them."""
    jobs = [await shop.put(f"suspect {number}", 20) for number in range(3)]
    for _ in range(2):
        lease = await a_lease(shop.wire)
        assert len((await lease.claim(0, 5)).jobs) == 3
        await lapse(shop.wire, lease)
    running = await shop.start()
    most, deadline = 0, time.monotonic() + 30
    while not all([(await shop.reader.record(job.id)).state.final for job in jobs]):
        assert not running.task.done() and time.monotonic() < deadline, running.task
        most = max(most, running.worker.running)
        await asyncio.sleep(0.002)
    for number, job in enumerate(jobs):
        record = await shop.completed(job, f"suspect {number}", 20)
        assert record.attempt == 3
    assert most == 1
    after = await shop.put("after", 5)
    assert (await shop.ended(after)).state is JobState.COMPLETED


async def hold(wire: RedisClient, running: Running, for_ms: int) -> None:
    """As the leader says it: again and again, for who does not listen yet hears nothing."""
    lead = await wire.ask(claim_lead("s", 60_000))

    async def heard() -> bool:
        assert await Plans(wire).publish(lead, [], holds={running.worker.lease.id: for_ms})
        await asyncio.sleep(0.05)
        return running.worker._claimer._is_held(0) == (for_ms > 0)

    await until(heard)


async def test_a_hold_that_is_not_said_again_is_over(shop: Workshop) -> None:
    """What runs goes on; with no scheduler left, a new job waits no longer than the hold was for."""
    running = await shop.start(SimSettings(step_ms=5, prefill_ms=1, slots=8))
    long = await shop.put("long", 200)
    await until(lambda: running.worker.running == 1)
    await hold(shop.wire, running, 400)
    job = await shop.put()
    for each in (long, job):
        record = await shop.ended(each)
        assert (record.state, record.attempt) == (JobState.COMPLETED, 1)


async def test_whoever_may_have_to_run_suspects_is_not_held_from_them(shop: Workshop) -> None:
    """One worker of a model runs them; were it held, nobody would. The same while it does not know whether it is that
    one, for its last claim was not answered."""
    running = await shop.start()
    await hold(shop.wire, running, 60_000)
    claimer = running.worker._claimer
    assert claimer._wanted(0) == (0, 0)
    for partitions in (claimer._suspects, claimer._unanswered):
        partitions.add(0)
        assert claimer._wanted(0)[0] > 0
        partitions.clear()


async def test_a_worker_that_is_about_to_end_claims_nothing(shop: Workshop) -> None:
    """Its health check has yet to find that its engine is of no use; each job that it took would count a loss."""
    claimer = (await shop.start()).worker._claimer
    assert claimer._wanted(0)[0] > 0
    claimer._starter.dead = EngineDead("a step was lost")
    assert claimer._wanted(0) == (0, 0)
    claimer._starter.dead = None


async def test_a_job_of_a_newer_version_waits_for_a_newer_worker(shop: Workshop) -> None:
    """It is put back unclaimed, without a dead letter, and what this worker can read behind it runs."""
    newer = [await shop.put(max_queue_ms=3_600_000) for _ in range(3)]
    for job in newer:
        fields = msgspec.msgpack.decode(encode(job))
        body = msgspec.msgpack.encode(fields | {"v": JOB_VERSION + 1, "prompt": {"kind": "new"}})
        await shop.wire.redis.hset(partition_key(0, "job", job.id), "body", body)
    running = await shop.start(SimSettings(step_ms=1, prefill_ms=1, slots=2))
    fine = [await shop.put() for _ in range(5)]
    for job in fine:
        assert (await shop.ended(job)).state is JobState.COMPLETED
    for job in newer:
        async with asyncio.timeout(20):  # it may be in a claim just now
            while (record := await shop.reader.record(job.id)).state is not JobState.QUEUED:
                await asyncio.sleep(0.01)
        assert (record.attempt, record.runs, record.started_ms) == (0, (), 0) and record.fault
        assert await shop.wire.redis.zscore(partition_key(0, "timers"), job.id) is not None
    assert await DeadLetters(shop.wire).recent(10) == [] and running.worker.running == 0
    await shop.queue.cancel(newer[0].id)
    running.stop.set()
    await asyncio.wait_for(running.task, 20)  # nothing of them is held


async def test_a_job_that_a_newer_worker_began_waits_for_one(shop: Workshop) -> None:
    """Its body can be read, the log of its first attempt cannot: it is not begun anew, and not failed."""
    lost = Lease(shop.wire, "m")
    job = await shop.put(max_tokens=5)
    await lost.register()
    await lost.claim(0, 1)
    frame = msgspec.msgpack.encode(["f2", lost.id, 1, {}])
    await shop.wire.redis.xadd(partition_key(0, "log", lost.id), {"-": frame}, id="1-0")
    await lost.release(job.id, 1)
    await shop.start()
    fine = await shop.put()
    assert (await shop.ended(fine)).state is JobState.COMPLETED
    async with asyncio.timeout(20):
        while (record := await shop.reader.record(job.id)).state is not JobState.QUEUED:
            await asyncio.sleep(0.01)
    assert record.attempt == 1 and [logged.run.worker for logged in record.runs] == [lost.id]


def hands_that_begin_nothing() -> Any:
    """Stands for the parts of a worker that its claimer has; notes what should begin."""
    hands = SimpleNamespace(
        begun=list[str](), begins=9, card=SimpleNamespace(capabilities=Capabilities(), adapters=()), room=lambda: 9,
        batch_room=lambda: None, shared_slots=lambda: (9, ()), chat_room=lambda: 0, freeable_slots=lambda: 0,
        make_room=lambda _: None, stats=lambda: Stats(slots=9), look=asyncio.Event(),
        engine_restart_reason=lambda _: "",
    )  # fmt: skip
    hands.refusal = AsyncMock(return_value=None)
    hands.begin = lambda claim, _, refusal=None: hands.begun.append(claim.job.id)
    hands.refuse = lambda broken: hands.begun.append(broken.id)
    return hands


def a_claimer(wire: RedisClient, lease: Lease) -> tuple[Claimer, Any]:
    hands = hands_that_begin_nothing()
    given = {"begin": hands.begin, "refuse": hands.refuse, "on_fenced": lambda _: None}
    parts = hands, HeldJobs(lease), hands
    return Claimer(lease, JobReader(wire), MediaStore(wire), WorkerSettings(), *parts, **given), hands


async def test_what_is_heard_of_a_job_is_kept_until_no_claim_can_bring_it(wire: RedisClient) -> None:
    """Two claims are under way: the end of one forgets no reader and no cancel of the job that the other brings."""
    lease, gates = Lease(wire, "m"), [asyncio.Event(), asyncio.Event()]

    async def claim(partition: int, *_: object, **__: object) -> Claimed:
        await gates[partition].wait()
        return Claimed([], suspects=False)

    lease.claim = claim  # type: ignore[method-assign]
    claimer, _ = a_claimer(wire, lease)
    claims = [asyncio.create_task(claimer._claim(partition, 1, 1)) for partition in (0, 1)]
    while not (claimer.may_bring(0) and claimer.may_bring(1)):
        await asyncio.sleep(0)
    said = [AddAddress("j", "reader"), Cancel("j", "owner")]
    for control in said:
        claimer.note(control)
    gates[0].set()
    await claims[0]
    assert claimer.early("j") == said
    gates[1].set()
    await claims[1]
    assert claimer.early("j") == ()


async def test_each_round_begins_with_another_partition(wire: RedisClient) -> None:
    """Where one has more than there is room for, the others are not left out."""
    lease, rounds = Lease(wire, "m"), list[list[int]]()

    async def claim(partition: int, *_: object, **__: object) -> Claimed:
        rounds[-1].append(partition)
        return Claimed([], suspects=False)

    def next_round() -> None:
        rounds.append([])
        if len(rounds) > 3:
            claimer.end()
        claimer._look.set()

    lease.claim = claim  # type: ignore[method-assign]
    claimer, hands = a_claimer(wire, lease)
    hands.on_claim_round = next_round
    rounds.append([])
    await claimer.run([0, 1, 2])
    assert rounds[:3] == [[0, 1, 2], [1, 2, 0], [2, 0, 1]]


@pytest.mark.parametrize("has_ended", [False, True])
async def test_a_job_that_ends_between_its_claim_and_its_reading_is_not_begun(
    wire: RedisClient, has_ended: bool
) -> None:
    """The worker was taken for dead and the job cancelled while the log of the first attempt was being read."""
    queue, first, second = Queue(wire), Lease(wire, "m"), Lease(wire, "m")
    job = await put_job(queue)
    for lease in (first, second):
        await lease.register()
    await first.claim(0, 1)
    await first.release(job.id, 1)
    claim = await claim_one(second)
    if has_ended:
        await queue.cancel(job.id)
        await lapse(wire, second)
        assert (await JobReader(wire).record(job.id)).state is JobState.CANCELLED
    claimer, hands = a_claimer(wire, second)
    assert await claimer._begin_continued([claim]) == []
    assert hands.begun == ([] if has_ended else [job.id])
