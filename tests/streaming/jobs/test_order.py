"""The order of the queue on a real server: shares of tenants, their gap by partitions, costs, repairs, what is left."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from flow import MODEL, a_lease, delta

from penstock.engine import Sampling
from streaming.ids import new_job_id
from streaming.jobs.codec import Frame, Opening, Terminal, Usage, encode_delta, packed
from streaming.jobs.job import Job, Text
from streaming.jobs.lease import Claim, Finish, Lease, UnreadableClaim
from streaming.jobs.queue import Queue
from streaming.jobs.reader import JobReader
from streaming.jobs.waiting import cost_of
from streaming.keys import channel, partition_key
from streaming.order import MAX_DROPPED, OUTPUT_UNITS, Priority, units
from streaming.redis.client import RedisClient

pytestmark = pytest.mark.slow

STANDARD = Priority.STANDARD


def job_of(tenant: str, *, tokens: int = 10, prompt: int = 0, partition: int = 0, **settings: Any) -> Job:
    return Job(
        id=new_job_id(partition),
        model=MODEL,
        tenant=tenant,
        priority=settings.pop("priority", STANDARD),
        prompt=Text(("x" * 4 * prompt,)),
        sampling=Sampling(max_tokens=tokens),
        **settings,
    )


async def put(queue: Queue, *jobs: Job) -> list[str]:
    await queue.put_parts(jobs)
    return [job.id for job in jobs]


async def claimed(lease: Lease, want: int, partition: int = 0) -> list[Claim]:
    return [claim for claim in (await lease.claim(partition, want)).jobs if isinstance(claim, Claim)]


async def finish(lease: Lease, claim: Claim, generated: int, prompt: int = 0) -> None:
    end = Terminal(claim.job.id, "completed", 0, ("stop",), usage=Usage(prompt, generated))  # type: ignore[arg-type]
    await lease.calls([lease.finish_call(Finish(end, claim.run_number, True, prompt=prompt))])


def tenants_of(claims: Sequence[Claim]) -> list[str]:
    return [claim.job.tenant for claim in claims]


async def index_keys(wire: RedisClient) -> list[str]:
    kinds = ("tenants", "line", "arrivals")
    keys = [key.decode() for key in await wire.redis.keys("*")]
    return [key for key in keys if key.split(":")[2] in kinds]


async def test_a_kept_place_is_not_for_a_lower_lane(wire: RedisClient) -> None:
    """While chats of a tenant wait that holds more than its share, a batch of another tenant does not overtake them;
    a chat of another tenant does."""
    queue, lease = Queue(wire), await a_lease(wire)
    await put(queue, *[job_of("chats", priority=Priority.INTERACTIVE) for _ in range(3)])
    await put(queue, *[job_of("lines", priority=Priority.BATCH) for _ in range(3)])
    assert (await lease.claim(0, 2, shared=0, crowding=["chats"])).jobs == []
    (light,) = await put(queue, job_of("light", priority=Priority.INTERACTIVE))
    (claim,) = (await lease.claim(0, 2, shared=0, crowding=["chats"])).jobs
    assert isinstance(claim, Claim) and claim.job.id == light
    assert tenants_of(await claimed(lease, 5)) == ["chats"] * 3 + ["lines"] * 2


async def test_a_tenant_cannot_save_up_turns(wire: RedisClient) -> None:
    """After an absence it starts where the others are, and what it was refunded of before counts no more."""
    queue, lease = Queue(wire), await a_lease(wire)
    await put(queue, job_of("idle", tokens=1000), *[job_of("busy") for _ in range(60)])
    claims = await claimed(lease, 30)
    (long,) = [claim for claim in claims if claim.job.tenant == "idle"]
    await put(queue, *[job_of("idle") for _ in range(20)])
    for tenant in ("busy", "idle"):
        await put(queue, *[job_of(tenant) for _ in range(20)])
    await finish(lease, long, 0)
    got = Counter(tenants_of(await claimed(lease, 20)))
    assert abs(got["idle"] - got["busy"]) <= 2


async def test_a_prompt_costs_what_the_engine_counted(wire: RedisClient) -> None:
    """Texts have more or fewer tokens than their characters suggest: tenants get the same tokens all the same. A
    prompt that was estimated too long is given back only by charging less for the answer: no counter falls."""
    queue, lease = Queue(wire), await a_lease(wire)
    await put(queue, *[job_of(tenant, prompt=100) for _ in range(100) for tenant in ("dense", "plain", "sparse")])
    counted, tokens, turns = {"dense": 400, "plain": 100, "sparse": 50}, Counter[str](), Counter[str]()
    for _ in range(120):
        (claim,) = await claimed(lease, 1)
        tenant = claim.job.tenant
        tokens[tenant] += counted[tenant]
        turns[tenant] += 1
        await finish(lease, claim, 0, counted[tenant])
    assert abs(tokens["dense"] - tokens["plain"]) <= 2 * counted["dense"]
    assert abs(turns["sparse"] - turns["plain"]) <= 1, "without an answer there is nothing to give back"


async def test_a_claim_ends_a_bounded_number_of_jobs_that_expired(wire: RedisClient) -> None:
    """Then it answers, and wakes its worker to go on; no lower lane goes first meanwhile. The next claims get the job
    behind the expired ones."""
    queue, lease = Queue(wire), await a_lease(wire)
    count = 2 * MAX_DROPPED + 88
    expired = await put(queue, *[job_of("t", deadline_ms=3_600_000) for _ in range(count)])
    (last,) = await put(queue, job_of("t"))
    (lower,) = await put(queue, job_of("t", priority=Priority.BATCH))
    pipeline: Any = wire.redis.pipeline(transaction=False)
    for job_id in expired:
        pipeline.hset(partition_key(0, "job", job_id), "deadline", 1)
    await pipeline.execute()
    arrivals, left = partition_key(0, "arrivals", MODEL, STANDARD), list[int]()
    async with wire.redis.pubsub() as woken:
        await woken.subscribe(channel("worker", lease.id))
        for _ in range(2):
            assert await claimed(lease, 2) == []
            left.append(await wire.redis.zcard(arrivals))
            while (message := await woken.get_message(timeout=10)) and message["type"] != "message":
                pass
            assert message is not None
    assert left == [count + 1 - MAX_DROPPED, count + 1 - 2 * MAX_DROPPED]
    assert [claim.job.id for claim in await claimed(lease, 2)] == [last, lower]


@pytest.mark.parametrize("weights", [{"steady": 1.0, "flood": 1.0}, {"steady": 0.25, "flood": 4.0}], ids=str)
@pytest.mark.parametrize("partitions", [1, 4])
async def test_the_gap_of_two_tenants_is_bounded(
    opened: Callable[..., RedisClient], redis_url: str, partitions: int, weights: dict[str, float]
) -> None:
    """In any span of time in which both wait, the units that they got, divided by their weights, differ by at most
    `(L + M) * (1 / w_p + 1 / w_q)`, in each partition: counters are kept there. L: the longest prompt; M: what the ends
    of the jobs add that run at the same time. For when a tenant is claimed, its counter is the least; from then on its
    prompt and these ends alone can bring it above the other one, whose counter never falls."""
    wire = opened(redis_url, partitions=partitions, timeout_s=30)
    queue, lease, chance = Queue(wire, weights=weights), await a_lease(wire), random.Random(7)
    most, slots = 60, 4
    for tenant, count in (("steady", 60), ("flood", 240)):
        for number in range(count):
            tokens, prompt = chance.randint(1, most), chance.randint(0, most)
            await put(queue, job_of(tenant, tokens=tokens, prompt=prompt, partition=number % partitions))
    got = {partition: Counter[str]() for partition in wire.partitions}
    aheads = {partition: [0.0] for partition in wire.partitions}
    running = list[tuple[int, Claim]]()

    def note(place: int, tenant: str, work: int) -> None:
        got[place][tenant] += work
        aheads[place].append(ahead(got[place]))

    def ahead(counts: Counter[str]) -> float:
        return counts["steady"] / weights["steady"] - counts["flood"] / weights["flood"]

    for round_ in range(110):
        partition = round_ % partitions
        for claim in await claimed(lease, 1, partition):
            running.append((partition, claim))
            note(partition, claim.job.tenant, units(cost_of(claim.job).prompt, 0))
        if len(running) < slots:
            continue
        place, claim = running.pop(chance.randrange(len(running)))
        tokens, prompt = chance.randint(1, claim.job.sampling.max_tokens or 1), cost_of(claim.job).prompt
        await finish(lease, claim, tokens)
        note(place, claim.job.tenant, units(prompt, tokens) - units(prompt, 0))
    bound = (most + slots * OUTPUT_UNITS * most) * sum(1 / weight for weight in weights.values())
    worst = max(max(each) - min(each) for each in aheads.values())
    gap = abs(ahead(sum(got.values(), Counter[str]())))
    print(f"{partitions} partitions, {weights}: worst gap of one {worst:.0f}, of all {gap:.0f}, bound {bound:.0f} each")
    assert worst <= bound and gap <= bound * partitions


async def commands(wire: RedisClient) -> Counter[str]:
    """Calls of every command on the server so far."""
    stats = await wire.redis.info("commandstats")
    return Counter({name: int(each["calls"]) for name, each in stats.items()})


async def test_a_claim_costs_the_same_with_very_many_tenants(
    opened: Callable[..., RedisClient], redis_url: str
) -> None:
    """And with very many jobs: as many commands as with few, each logarithmic. The server's times are printed; a
    claim that read all tenants or all jobs would take many times as long."""
    wire = opened(redis_url, timeout_s=60, lane_limit=100_000)
    calls, times = list[Counter[str]](), list[float]()
    for tenants, jobs in ((1, 200), (1, 4_000), (4_000, 4_000)):
        queue, lease = Queue(wire), await a_lease(wire)
        for first in range(0, jobs, 1000):
            numbers = range(first, min(jobs, first + 1000))
            await put(queue, *[job_of(f"t{number % tenants}") for number in numbers])
        await claimed(lease, 1)
        before, each = await commands(wire), list[float]()
        for _ in range(40):
            start = await wire.redis.info("commandstats")
            await claimed(lease, 1)
            end = await wire.redis.info("commandstats")
            each.append(end["cmdstat_fcall"]["usec"] - start["cmdstat_fcall"]["usec"])
        calls.append(await commands(wire) - before)
        times.append(sorted(each)[len(each) // 4])
        await wire.redis.flushall()
    print("a claim of one job: {} us of 200 of one tenant, {} us of 4,000, {} us of 4,000 tenants".format(*times))
    few, one, many = (sum(count for name, count in each.items() if "cmdstat_z" in name) for each in calls)
    assert max(one, many) <= 1.2 * few
    assert max(times) <= 4 * min(times)


async def test_entries_that_lead_to_no_job_are_dropped(wire: RedisClient) -> None:
    """Of a record that is gone, and of a tenant whose name cannot be read any more."""
    queue, lease = Queue(wire), await a_lease(wire)
    gone, renamed, whole = await put(queue, job_of("a"), job_of("b"), job_of("c"))
    redis: Any = wire.redis
    await redis.delete(partition_key(0, "job", gone))
    await redis.hset(partition_key(0, "job", renamed), "tenant", "zz;9,x")
    await queue.cancel(renamed)
    assert [claim.job.id for claim in await claimed(lease, 5)] == [whole]
    assert await index_keys(wire) == []
    assert await redis.xlen(partition_key(0, "lane", MODEL, STANDARD)) == 1


async def test_what_a_newer_version_must_read_lets_others_pass(wire: RedisClient) -> None:
    """It goes to the end of its tenant's line and stays charged, so that a worker gets on with the next jobs."""
    queue, lease = Queue(wire), await a_lease(wire)
    newer, *others = await put(queue, job_of("a"), job_of("a"), job_of("b"))
    redis: Any = wire.redis
    body = msgspec.msgpack.decode(await redis.hget(partition_key(0, "job", newer), "body"))
    await redis.hset(partition_key(0, "job", newer), "body", msgspec.msgpack.encode(body | {"v": 127}))
    (claim,) = (await lease.claim(0, 1)).jobs
    assert isinstance(claim, UnreadableClaim) and claim.newer
    await lease.decline([claim])
    assert [each.job.id for _ in range(2) for each in await claimed(lease, 1)] == [others[1], others[0]]


async def test_a_job_that_is_put_back_keeps_its_latest_start(wire: RedisClient) -> None:
    """Its limit counts from its acceptance, not from when it came back."""
    queue, lease = Queue(wire), await a_lease(wire)
    (back,) = await put(queue, job_of("a", max_queue_ms=30_000))
    (claim,) = await claimed(lease, 1)
    redis: Any = wire.redis
    await redis.hincrbyfloat(partition_key(0, "job", back), "created", -10_000)
    (later,) = await put(queue, job_of("a", max_queue_ms=25_000))
    await lease.decline([UnreadableClaim(back, claim.run_number, "", newer=True)])
    assert [each.job.id for each in await claimed(lease, 2)] == [back, later]


async def test_tokens_of_a_job_that_a_script_ends_are_charged(wire: RedisClient) -> None:
    """Once they are stored: a tenant whose job is cancelled while it waits again has had its tokens all the same."""
    queue, lease = Queue(wire), await a_lease(wire)
    await put(queue, job_of("quitter", tokens=500), *[job_of("other") for _ in range(30)])
    (claim,) = [each for each in await claimed(lease, 2) if each.job.tenant == "quitter"]
    opening = Opening(claim.job.id, 1)
    rows = b"".join(encode_delta(delta(claim, seq)) for seq in range(1, 9))
    frame = Frame(lease.id, 1, packed(8, rows), {claim.run_number: opening})
    await lease.release(claim.job.id, claim.run_number, [frame])
    await queue.cancel(claim.job.id)
    record = await JobReader(wire).record(claim.job.id)
    assert record.terminal is not None and record.terminal.usage.completion == 8
    await put(queue, *[job_of("quitter") for _ in range(30)])
    got = tenants_of(await claimed(lease, 16))
    assert got == ["other"] * 16, "8 tokens cost as much as 16 empty prompts"
