"""Room in the store: new jobs are refused before what was accepted can no longer be finished."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from flow import MODEL, a_job, append, claim_one, delta, deltas_of, put_job, until
from house import redis_process
from redis import Redis
from worker_report import a_worker

from penstock.engine import Capabilities, Logprob, ModelCard, Sampling
from streaming.errors import KeyReused, LaneFull, NeverFits, NoCapacity, QuotaExceeded, StoreFull, Unavailable
from streaming.fleet.processes import Fleet
from streaming.ids import new_conversation_id, new_job_id, partition_of
from streaming.jobs.codec import Delta, Run, Section, Terminal
from streaming.jobs.conversations import ConversationItem, Conversations
from streaming.jobs.job import Job, JobState
from streaming.jobs.lease import SILENT, Claim, Finish, Lease
from streaming.jobs.queue import Queue
from streaming.jobs.reader import JobReader, Summaries
from streaming.jobs.reaper import Reaper
from streaming.jobs.settings import QuotaSettings
from streaming.jobs.waiting import reserved_bytes
from streaming.keys import partition_key
from streaming.order import Priority
from streaming.redis.client import RedisClient, ServerMemory
from streaming.redis.settings import RedisSettings
from streaming.store.monitor import ADMISSION_SHARE, Headroom, full_reason, next_look_s

pytestmark = pytest.mark.slow

MIB = 1 << 20


@pytest.mark.parametrize(("memories", "full"), [
    ([], False), ([ServerMemory(10**12, 0)], False), ([ServerMemory(79 * MIB, 100 * MIB)], False),
    ([ServerMemory(80 * MIB, 100 * MIB)], True),
    ([ServerMemory(9 * MIB, 100 * MIB, {0: 30 * MIB, 1: 40 * MIB})], False),
    ([ServerMemory(10 * MIB, 100 * MIB, {0: 30 * MIB, 1: 40 * MIB})], True),
    ([ServerMemory(1, 100 * MIB), ServerMemory(99 * MIB, 100 * MIB), ServerMemory(10**12, 0)], True),
])  # fmt: skip
def test_the_fullest_server_decides(memories: list[ServerMemory], full: bool) -> None:
    """By what is in use and what accepted jobs may still write together; one without a limit is never full."""
    assert bool(full_reason(memories)) is full


@pytest.mark.parametrize(("memories", "seconds"), [
    ([], 2.0), ([ServerMemory(10**12, 0)], 2.0), ([ServerMemory(0, 100 * MIB)], 0.8),
    ([ServerMemory(0, 100 * MIB, {0: 40 * MIB})], 0.4),
    ([ServerMemory(0, 1000 * MIB), ServerMemory(75 * MIB, 100 * MIB)], 0.2),
])  # fmt: skip
def test_the_next_look_comes_before_a_flood_can_have_filled_a_server(
    memories: list[ServerMemory], seconds: float
) -> None:
    assert next_look_s(memories) == pytest.approx(seconds)


async def test_admission_stops_and_goes_on_by_itself(small: tuple[RedisClient, Redis]) -> None:
    """At four fifths of a real server's memory new jobs are to be refused, before it is full; and no longer with room
    again. What still runs at its limit is in `test_what_drains_a_full_store_runs`."""
    wire, client = small
    client.config_set("maxmemory", "24mb")
    headroom = Headroom(wire)
    looking = asyncio.create_task(headroom.keep_looking())
    await headroom.look()
    assert not headroom.full
    for number in range(100):
        client.set(f"filler:{number}", b"x" * MIB)
        await headroom.look()
        if headroom.full:
            break
    (memory,) = await wire.memory()
    assert memory.used / memory.allowed >= ADMISSION_SHARE and memory.used < memory.allowed
    assert "MiB" in headroom.reason
    client.config_set("maxmemory", 4 * memory.allowed)
    await until(lambda: not headroom.full)
    looking.cancel()
    await asyncio.wait([looking])


@pytest.mark.parametrize("refusal", [("maxmemory", 1), ("min-replicas-to-write", 1)])
async def test_what_only_reads_works_while_the_store_takes_no_writes(
    small: tuple[RedisClient, Redis], refusal: tuple[str, int]
) -> None:
    """Lists of jobs, and what a batch asks before it fetches answers, which frees memory."""
    wire, client = small
    queue = Queue(wire)
    job = await put_job(queue)
    client.config_set(*refusal)
    with pytest.raises(Unavailable):
        await put_job(queue)
    assert [each.job.id for each in (await Summaries(wire).recent([job.tenant], None, 10)).jobs] == [job.id]
    assert await queue.ended([job.id, queue.new_id("t")]) != [] and await queue.known([job.id]) == [job.id]
    assert (await JobReader(wire).record(job.id)).state is JobState.QUEUED


CARD = ModelCard(
    name=MODEL, engine="sim", context=1000, max_output=900, capabilities=Capabilities(), created=1, default_output=100
)


@pytest.mark.parametrize("alternatives", [None, 0, 5])
async def test_a_token_weighs_no_more_than_is_reserved_for_it(wire: RedisClient, alternatives: int | None) -> None:
    """Measured: a job that is alone in its worker's steps, 1,000 tokens in the log and in the record."""
    lease, job = Lease(wire, MODEL), await put_job(Queue(wire), reply_to="penstock:api:0123456789ab")
    await lease.register()
    claim = await claim_one(lease)
    top = tuple((" other", -2.5 - number) for number in range(alternatives or 0))
    logprobs = () if alternatives is None else (Logprob(" tokens", -0.5, top),)
    rows = [Delta(claim.run_number, seq, " tokens", (100_000 + seq,), 0, 1, "", logprobs) for seq in range(1, 1001)]
    before = await weight(wire, "log", lease.id) + await weight(wire, "job", job.id)
    for row in rows:
        await lease.calls([append(lease, {job.reply_to: [row]}, *([claim] if row.seq == 1 else []))])
    sections = (Section(1, Run(lease.id, claim.run_number)),)
    end = Terminal(job.id, JobState.COMPLETED, len(rows), ("length",), sections=sections, rows=tuple(rows))
    await lease.calls([lease.finish_call(Finish(end, claim.run_number, False))])
    grown = await weight(wire, "log", lease.id) + await weight(wire, "job", job.id) - before
    sampling = Sampling(max_tokens=len(rows), logprobs=alternatives)
    reserved = reserved_bytes(msgspec.structs.replace(job, sampling=sampling))
    assert reserved / 2 < grown <= reserved


async def weight(wire: RedisClient, name: str, which: str) -> int:
    return await wire.redis.memory_usage(partition_key(0, name, which), samples=0) or 0


async def owed_now(wire: RedisClient, partition: int = 0) -> int:
    redis: Any = wire.redis
    return sum(map(int, await redis.hvals(partition_key(partition, "owed"))))


@pytest.fixture
async def small(tmp_path: Path) -> AsyncIterator[tuple[RedisClient, Redis]]:
    """The wire to a server with a memory limit, and a client of it."""
    with redis_process(tmp_path, None, "--maxmemory-policy", "noeviction") as url, Redis.from_url(url) as client:
        wire = RedisClient.open(RedisSettings(url=url, lease_ms=600, partitions=2))
        yield wire, client
        await wire.close()


async def test_what_is_accepted_leaves_room_for_its_output(small: tuple[RedisClient, Redis]) -> None:
    """Jobs are accepted only as long as all their outputs fit beside what is in use: by one process that looked once,
    by many processes, in two partitions that share a server. What has ended gives its reservation back."""
    wire, client = small
    client.config_set("maxmemory", "64mb")
    doors = [Headroom(wire) for _ in range(4)]
    for door in doors:
        await door.look()
    queues = [Queue(wire, door) for door in doors]
    job = a_job(queues[0], sampling=Sampling(max_tokens=10_000))
    room = 0.8 * (64 << 20) - int(client.info("memory")["used_memory"])
    accepted = await flooded(queues[:1], job)
    assert 0.9 * room / reserved_bytes(job) - 1 <= len(accepted) <= room / reserved_bytes(job)
    with pytest.raises(StoreFull):
        await queues[0].put(again(queues[0], job))
    others = await flooded(queues[1:], job)
    assert len(accepted) + len(others) <= 2 * room / reserved_bytes(job), (
        "a partition holds its limit for all processes"
    )
    assert await owed_now(wire, 0) + await owed_now(wire, 1) == (len(accepted) + len(others)) * reserved_bytes(job)
    await doors[0].look()
    assert doors[0].full and "may still write" in doors[0].reason
    await queues[0].stop(accepted + others, waiting_only=True)
    assert await owed_now(wire, 0) == await owed_now(wire, 1) == 0
    await doors[0].look()
    assert not doors[0].full
    await queues[0].put(again(queues[0], job))


async def test_no_tenant_takes_more_than_its_share(small: tuple[RedisClient, Redis]) -> None:
    """What a tenant's unfinished jobs may write counts, however small their requests; another tenant's are accepted.
    Every way to end gives it back."""
    wire, client = small
    queue, _ = await door(wire, client)
    quota = QuotaSettings(store_share=0.5)
    job = a_job(queue, tenant="greedy", sampling=Sampling(max_tokens=10_000))
    with pytest.raises(NeverFits):
        await queue.put(msgspec.structs.replace(again(queue, job), sampling=Sampling(max_tokens=400_000)), quota=quota)
    accepted = []
    with pytest.raises(QuotaExceeded) as refused:
        while True:
            accepted.append((await queue.put(again(queue, job), quota=quota)).id)
    assert refused.value.name == "store_share"
    assert len(accepted) * reserved_bytes(job) <= 0.4 * (64 << 20)
    assert sum([await tenant_owed(wire, each) for each in (0, 1)]) == len(accepted) * reserved_bytes(job)
    for _ in range(4):
        await queue.put(msgspec.structs.replace(again(queue, job), tenant="modest"), quota=quota)

    lease = Lease(wire, MODEL)
    await lease.register()
    claim = await claim_one(lease)
    claimed, *waiting = claim.job.id, *(each for each in accepted if each != claim.job.id)
    assert claimed in accepted
    end = Terminal(claimed, JobState.COMPLETED, 0, ("length",))
    await lease.calls([lease.finish_call(Finish(end, claim.run_number, False))])
    malformed, *rest = waiting
    await wire.redis.hset(partition_key(partition_of(malformed) or 0, "job", malformed), "created", "?")
    await wire.call("fail_malformed", partition_of(malformed) or 0, malformed, "a test")
    await queue.stop(rest, waiting_only=True)
    assert await tenant_owed(wire, 0) == await tenant_owed(wire, 1) == 0
    await queue.put(again(queue, job), quota=quota)


async def test_conversations_count_against_their_tenants_share(small: tuple[RedisClient, Redis]) -> None:
    wire, client = small
    _, headroom = await door(wire, client)
    conversations, quota = Conversations(wire, headroom), QuotaSettings(store_share=0.05)
    text = msgspec.Raw(msgspec.json.encode("x" * (MIB // 2)))
    items = [ConversationItem("msg_1", text)]
    made = await conversations.create(new_conversation_id(0), "t", {}, items, quota)
    with pytest.raises(QuotaExceeded) as refused:
        for number in range(2, 9):
            await conversations.add(made, [ConversationItem(f"msg_{number}", text)], quota)
            made = await conversations.read(made.id, "t")
    assert refused.value.name == "store_share"
    with pytest.raises(QuotaExceeded):
        await conversations.create(new_conversation_id(0), "t", {}, items, quota)
    await conversations.create(new_conversation_id(0), "other", {}, items, quota)


async def test_jobs_lines_and_conversations_share_one_share(small: tuple[RedisClient, Redis]) -> None:
    """What the lines of a tenant's batches may write counts for its requests and conversations, too."""
    wire, client = small
    queue, headroom = await door(wire, client)
    quota, conversations = QuotaSettings(store_share=0.5), Conversations(wire, headroom)
    job = a_job(queue, tenant="t", sampling=Sampling(max_tokens=10_000))
    lines = [msgspec.structs.replace(job, id=new_job_id(0)) for _ in range(40)]
    answers = await queue.put_parts(lines, None, quota)
    refused = [each for each in answers if isinstance(each, QuotaExceeded)]
    assert 0 < len(refused) < len(lines) and {each.name for each in refused} == {"store_share"}
    kept = []
    with pytest.raises(QuotaExceeded):
        while True:
            kept.append(await queue.put(msgspec.structs.replace(job, id=new_job_id(0)), quota=quota))
    assert 0 < len(kept) < len(lines) - len(refused), "a tenant's lines leave it some room for its requests"
    text = msgspec.Raw(msgspec.json.encode("x" * MIB))
    with pytest.raises(QuotaExceeded):
        await conversations.create(new_conversation_id(0), "t", {}, [ConversationItem("msg_1", text)], quota)


async def tenant_owed(wire: RedisClient, partition: int) -> int:
    redis: Any = wire.redis
    return int(await redis.hget(partition_key(partition, "tenant_owed"), "greedy") or 0)


async def door(wire: RedisClient, client: Redis) -> tuple[Queue, Headroom]:
    """Of one process to a store of 64 MiB, at which it has looked once."""
    client.config_set("maxmemory", "64mb")
    headroom = Headroom(wire)
    await headroom.look()
    return Queue(wire, headroom), headroom


async def flooded(queues: list[Queue], job: Job) -> list[str]:
    """The same job put as often as it is taken, at every door."""
    accepted = []
    for queue in queues:
        for _ in range(1000):
            try:
                accepted.append((await queue.put(again(queue, job))).id)
            except StoreFull:
                break
    return accepted


def again(queue: Queue, job: Job) -> Job:
    return msgspec.structs.replace(job, id=queue.new_id("t"))


async def test_what_brings_nothing_into_the_store_takes_no_room(small: tuple[RedisClient, Redis]) -> None:
    """A put that finds the job of its key, another body under it, a full lane or no worker with room: between two looks
    it may come any number of times, and so may lines that find their lane full."""
    wire, client = small
    queue, headroom = await door(wire, client)
    job = a_job(queue, sampling=Sampling(max_tokens=10_000))
    first = await queue.put(keyed(queue, job), idempotency_key="k", digest="d")
    for _ in range(200):
        assert (await queue.put(keyed(queue, job), idempotency_key="k", digest="d")).id == first.id
    for _ in range(200):
        with pytest.raises(KeyReused):
            await queue.put(keyed(queue, job), idempotency_key="k", digest="another")
    for _ in range(200):
        with pytest.raises(NoCapacity):
            await queue.put(again(queue, job), must_run=True)
    narrow_wire = RedisClient.open(msgspec.structs.replace(wire.settings, lane_limit=1))
    narrow = Queue(narrow_wire, headroom)
    other = msgspec.structs.replace(job, priority=Priority.BATCH)
    for partition in (0, 1):
        await narrow.put(msgspec.structs.replace(other, id=new_job_id(partition)))
    for _ in range(40):
        answers = await narrow.put_parts([again(narrow, other) for _ in range(5)])
        assert all(isinstance(answer, LaneFull) for answer in answers)
        with pytest.raises(LaneFull):
            await narrow.put(again(narrow, other))
    await narrow_wire.close()
    await queue.put(again(queue, job))


def keyed(queue: Queue, job: Job) -> Job:
    return msgspec.structs.replace(job, id=queue.new_id("t", "k"))


async def test_a_full_store_answers_a_key_whose_job_it_has(small: tuple[RedisClient, Redis]) -> None:
    """Whoever comes back for an accepted job is led to it while nothing new is accepted, over maxmemory too; its id is
    kept for a request that does not wait, though the client that streams it leaves. Another body, and a key that leads
    nowhere, are refused."""
    wire, client = small
    queue, headroom = await door(wire, client)
    job = a_job(queue, sampling=Sampling(max_tokens=10_000))
    streamer = "penstock:api:streamer"
    streamed = msgspec.structs.replace(keyed(queue, job), stream=True, reply_to=streamer)
    first = await queue.put(streamed, idempotency_key="k", digest="d")
    await flooded([queue], job)
    client.set("filler", b"x" * MIB)

    async def come_back(refusal: StoreFull | None) -> None:
        found = await queue.put(keyed(queue, job), idempotency_key="k", digest="d", refusal=refusal)
        assert (found.id, found.joined, found.state, found.epoch) == (first.id, True, JobState.QUEUED, 1)
        with pytest.raises(KeyReused):
            await queue.put(keyed(queue, job), idempotency_key="k", digest="another", refusal=refusal)
        new = msgspec.structs.replace(job, id=queue.new_id("t", "unknown"))
        with pytest.raises(StoreFull):
            await queue.put(new, idempotency_key="unknown", digest="d", refusal=refusal)
        with pytest.raises(StoreFull):
            await queue.put(again(queue, job), refusal=refusal)

    await come_back(None)
    client.config_set("maxmemory", MIB)
    await headroom.look()
    await come_back(StoreFull(headroom.reason))
    assert not await queue.abandon(first.id, streamer), "others were told its id"
    assert (await JobReader(wire).record(first.id)).state is JobState.QUEUED


async def test_a_sum_that_outlived_its_jobs_is_forgotten(wire: RedisClient) -> None:
    """Where no job is left nothing is owed, whatever the store lost: the next sweep says so."""
    queue, redis = Queue(wire), wire.redis
    kept, lost = a_job(queue), a_job(queue, priority=Priority.BATCH)
    await queue.put(kept)
    await queue.put(lost)
    await redis.delete(partition_key(0, "job", lost.id), partition_key(0, "lane", MODEL, "batch"))
    assert await owed_now(wire) == reserved_bytes(kept) + reserved_bytes(lost)
    await Reaper(wire).sweep()
    assert await owed_now(wire) == reserved_bytes(kept)
    await queue.cancel(kept.id)
    await Reaper(wire).sweep()
    assert not await redis.exists(partition_key(0, "owed"))


async def test_what_drains_a_full_store_runs(small: tuple[RedisClient, Redis]) -> None:
    """Over maxmemory, when every plain write is refused: a worker takes its lease and says who it is, claims, logs,
    takes a reader on, hands back, ends and leaves; a lost one's jobs are taken over. Only new jobs are refused."""
    wire, client = small
    queue = Queue(wire)
    jobs = [msgspec.structs.replace(a_job(queue, id=f"job_00{n:030x}"), stream=True) for n in range(3)]
    for job in jobs:
        await queue.put(job)
    client.set("filler", b"x" * MIB)
    client.config_set("maxmemory", MIB)
    with pytest.raises(Unavailable, match="OOM"):
        await queue.put(a_job(queue, id="job_00" + "f" * 30))
    first, second = Lease(wire, MODEL), Lease(wire, MODEL)
    await Fleet(wire).publish_card(CARD)
    await Fleet(wire).report(a_worker("w"))
    await first.register()
    claims = [claim for claim in (await first.claim(0, 3)).jobs if isinstance(claim, Claim)]
    assert [claim.job for claim in claims] == jobs
    held = await first.beat(0)
    assert held.keys() == {job.id for job in jobs}
    await first.calls([append(first, {SILENT: [delta(claim, 1) for claim in claims]}, *claims)])
    assert await queue.add_address(jobs[0].id, "penstock:api:late") is JobState.RUNNING
    await queue.cancel(jobs[1].id)
    await first.calls(
        [first.finish_call(Finish(Terminal(jobs[0].id, JobState.COMPLETED, 1), claims[0].run_number, False))]
    )
    await first.release(jobs[1].id, claims[1].run_number)
    lapse = "#!lua flags=allow-oom\nreturn redis.call('ZADD', KEYS[1], 'XX', 1, ARGV[1])"
    client.eval(lapse, 1, partition_key(0, "leases"), first.id)
    await Reaper(wire).sweep()
    await second.register()
    (taken,) = (await second.claim(0, 3)).jobs
    assert isinstance(taken, Claim) and taken.job == jobs[2] and taken.attempt == 2
    rows = await deltas_of(JobReader(wire), await JobReader(wire).record(jobs[2].id))
    assert [row.seq for row in rows] == [1]
    await second.calls(
        [second.finish_call(Finish(Terminal(jobs[2].id, JobState.COMPLETED, 1), taken.run_number, False))]
    )
    assert await second.leave() == 0
    states = [record.state for record in await JobReader(wire).records([job.id for job in jobs]) if record]
    assert states == [JobState.COMPLETED, JobState.CANCELLED, JobState.COMPLETED]
    assert client.info("memory")["used_memory"] > client.info("memory")["maxmemory"]


@pytest.mark.parametrize("refusing", ["maxmemory 1", "min-replicas-to-write 1"])
async def test_a_store_that_refuses_writes_costs_no_job_an_attempt(
    small: tuple[RedisClient, Redis], refusing: str
) -> None:
    """For several leases, again and again: a worker that lives and tries keeps its jobs, and no loss is counted."""
    wire, client = small
    queue, lease, reaper = Queue(wire), Lease(wire, MODEL), Reaper(wire)
    job = await put_job(queue, id="job_00" + "0" * 30)
    await lease.register()
    await lease.claim(0, 1)

    done, refused = [0, 0, 0], [0, 0, 0]

    async def repeat(number: int, what: Callable[[], Awaitable[object]]) -> None:
        while True:
            try:
                await what()
                done[number] += 1
            except Unavailable:
                refused[number] += 1
            await asyncio.sleep(0.1)

    loops = (lambda: lease.beat(0), lambda: lease.beat(1), reaper.sweep)
    tasks = [asyncio.create_task(repeat(number, what)) for number, what in enumerate(loops)]
    name, value = refusing.split()
    for _ in range(2):
        before = list(done)
        await until(lambda b=before: all(now > then for now, then in zip(done, b, strict=True)))  # type: ignore[misc]
        client.config_set(name, value)
        await asyncio.sleep(1.5)
        client.config_set(name, 0)
    assert not any(task.done() for task in tasks), "the worker was fenced"
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert all(refused) if name == "min-replicas-to-write" else not any(refused)
    assert client.hmget(partition_key(0, "job", job.id), "state", "losses", "attempt") == [b"in_progress", None, b"1"]
