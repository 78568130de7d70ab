"""One record, frame or message that cannot be read: only its own job fails, and everything else goes on."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from flow import a_job, a_lease, append, claim_one, delta, deltas_of, lapse, numbers_read, put_job, until

from penstock.engine import Capabilities, ModelCard
from streaming.batches.store import UNREADABLE, Batch, Batches, BatchState, Files, StoredFile
from streaming.errors import MalformedJob, Superseded, UnknownFile
from streaming.events import Event, Outbox, Webhooks
from streaming.fleet.plans import Action, Overrides, Plan, Plans, claim_lead
from streaming.fleet.process import Process
from streaming.fleet.processes import Fleet
from streaming.ids import idempotency_digest, message_id
from streaming.jobs.codec import Run, Section, Terminal, Wake, encode
from streaming.jobs.dead_letters import DeadLetters
from streaming.jobs.job import JobState
from streaming.jobs.lease import Claim, Finish, Lease, UnreadableClaim
from streaming.jobs.queue import Queue
from streaming.jobs.reader import JobReader, Summaries
from streaming.jobs.relay import Relay
from streaming.jobs.waiting import Backlog, backlog_of
from streaming.keys import channel, fleet_key, partition_key
from streaming.order import Priority
from streaming.redis.client import RedisClient

pytestmark = pytest.mark.slow

FAULTS = {
    "state": b"\xffno state",
    "created": b"yesterday",
    "attempt": b"one",
    "runs": b"somebody;",
    "lane": b"\xfe",
    "queue_deadline": b"soon",
    "deadline": b"soon",
    "keep": b"for ever",
}
"""What stands in a field of a job's record where it should not."""
NO_HASH = "(no hash)"


async def spoil(wire: RedisClient, job_id: str, fault: str) -> None:
    """Put something into a job's record that cannot be read."""
    key = partition_key(0, "job", job_id)
    if fault == NO_HASH:
        await wire.redis.delete(key)
        await wire.redis.lpush(key, b"x")
    else:
        await wire.redis.hset(key, fault, FAULTS[fault])


async def reasons(wire: RedisClient) -> dict[str, str]:
    """Why each job that is a dead letter is one."""
    return {letter.job: letter.reason for letter in await DeadLetters(wire).recent(100)}


async def finish(lease: Lease, claim: Claim, count: int) -> None:
    rows, sections = tuple(delta(claim, 1 + n) for n in range(count)), (Section(1, Run(lease.id, claim.run_number)),)
    end = Terminal(claim.job.id, JobState.COMPLETED, count, ("stop",), rows=rows, sections=sections)
    await lease.calls([lease.finish_call(Finish(end, claim.run_number, False))])


@pytest.mark.parametrize("fault", ["state", "created", "attempt", "runs", "lane", NO_HASH])
async def test_a_record_that_cannot_be_read_fails_its_job_alone(wire: RedisClient, relay: Relay, fault: str) -> None:
    """Of two running jobs one record is spoiled. Its reader gets an error; the other reads what only the log holds."""
    queue, lease = Queue(wire), await a_lease(wire)
    jobs = [a_job(queue, reply_to=relay.address) for _ in range(2)]
    buffers = [relay.open(job.id) for job in jobs]
    for job in jobs:
        await queue.put(job)
    claims = {claim.job.id: claim for claim in (await lease.claim(0, 2)).jobs if isinstance(claim, Claim)}
    bad, good = jobs
    await spoil(wire, bad.id, fault)
    claim = claims[good.id]
    for seq in (1, 2, 3):  # logged, and published to nobody
        await lease.calls([append(lease, {"-": [delta(claim, seq)]}, *([claim] if seq == 1 else []))])
    await until(lambda: buffers[1].seq == 3)
    assert await numbers_read(buffers[0]) == [] and "unreadable" in (await reasons(wire))[bad.id]
    terminal = buffers[0].terminal
    assert terminal is not None and terminal.failure is not None
    assert (terminal.state, terminal.failure.code) == (JobState.FAILED, "malformed_job")
    await finish(lease, claims[good.id], 3)
    assert await numbers_read(buffers[1]) == [1, 2, 3]
    await lease.calls([lease.finish_call(Finish(Terminal(bad.id, JobState.COMPLETED, 0), 1, True))])  # it had ended
    records = await JobReader(wire).records([bad.id, good.id])
    assert [record and record.state for record in records] == [JobState.FAILED, JobState.COMPLETED]
    assert set(await reasons(wire)) == {bad.id} and len(await DeadLetters(wire).recent(100)) == 1


@pytest.mark.parametrize("fault", ["state", "created", "attempt", "runs", "lane"])
async def test_a_job_that_cannot_be_read_has_an_end_in_time(wire: RedisClient, fault: str) -> None:
    """Who waits for a job's end by its time is told it, and until when it is kept: the same at every look and list."""
    job = await put_job(Queue(wire))
    await spoil(wire, job.id, fault)
    before = await wire.now_ms()
    looks = [await JobReader(wire).record(job.id) for _ in range(2)]
    (listed,) = (await Summaries(wire).recent([job.tenant], None, 10)).jobs
    for found in (*looks, listed):
        assert found.state is JobState.FAILED and before <= found.done_ms <= await wire.now_ms()
        assert (found.done_ms, found.keep_s) == (looks[0].done_ms, wire.settings.retention_s)
    assert listed.created_ms > 0


async def test_a_malformed_job_leaves_nothing_behind(wire: RedisClient) -> None:
    """What it may still have written is not owed any more, its idempotency key is free, and the log of a lost worker
    that ran it goes. It fails as its record is read, or as it is claimed."""
    queue, lost = Queue(wire), await a_lease(wire)
    read, claimed = (a_job(queue) for _ in range(2))
    for name, job in (("read", read), ("claimed", claimed)):
        await queue.put(job, idempotency_key=name, digest="d")
    claims = [claim for claim in (await lost.claim(0, 2)).jobs if isinstance(claim, Claim)]
    await lost.calls([append(lost, {"-": [delta(claim, 1) for claim in claims]}, *claims)])
    assert (await lapse(wire, lost)).requeued == 2
    assert await wire.redis.scard(partition_key(0, "heirs", lost.id)) == 2  # type: ignore[misc]
    await spoil(wire, read.id, "created")
    await JobReader(wire).record(read.id)
    await spoil(wire, claimed.id, "attempt")
    await (await a_lease(wire)).claim(0, 1)
    assert set(await reasons(wire)) == {read.id, claimed.id}
    assert sum(int(each) for each in await wire.redis.hvals(partition_key(0, "owed"))) == 0  # type: ignore[misc]
    assert not await wire.redis.exists(partition_key(0, "heirs", lost.id))
    assert 0 < await wire.redis.ttl(partition_key(0, "log", lost.id)) <= 60
    assert await wire.redis.keys(partition_key(0, "idem", "*")) == []


async def test_a_job_whose_place_has_lost_its_half_is_not_left_waiting(wire: RedisClient) -> None:
    """The half that is there names all entries of that millisecond, the job's own among them: it is no place."""
    job = await put_job(Queue(wire))
    ms, _, _ = (await JobReader(wire).record(job.id)).entry.partition("-")
    await wire.redis.hset(partition_key(0, "job", job.id), "entry", ms)  # type: ignore[misc]
    assert (await (await a_lease(wire)).claim(0, 5)).jobs == []
    assert (await JobReader(wire).record(job.id)).state is JobState.FAILED and set(await reasons(wire)) == {job.id}


@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize("fault", ["state", "created", "attempt", NO_HASH])
async def test_a_key_that_leads_to_what_cannot_be_read_is_free(wire: RedisClient, fault: str, ended: bool) -> None:
    """A retry is computed anew, whether its first job waited or had ended; the key then leads to the new one."""
    queue = Queue(wire)
    first, second, third = (a_job(queue) for _ in range(3))
    await queue.put(first, idempotency_key="k", digest="d")
    if ended:
        await queue.cancel(first.id)
    await spoil(wire, first.id, fault)
    again = await queue.put(second, idempotency_key="k", digest="d")
    assert (again.id, again.joined) == (second.id, False)
    assert (await queue.put(third, idempotency_key="k", digest="d")).id == second.id
    if not ended:
        assert "unreadable" in (await reasons(wire))[first.id]


async def test_a_key_that_holds_something_else_is_free(wire: RedisClient) -> None:
    """Another type, or no job's id."""
    queue = Queue(wire)
    key = partition_key(0, "idem", idempotency_digest("t", "k"))
    await wire.redis.lpush(key, b"x")  # type: ignore[misc]
    first = await queue.put(a_job(queue), idempotency_key="k", digest="d")
    assert not first.joined and (await queue.put(a_job(queue), idempotency_key="k", digest="d")).id == first.id
    await wire.redis.set(key, b"\xffx")
    assert not (await queue.put(a_job(queue), idempotency_key="k", digest="d")).joined


@pytest.mark.parametrize("data", [b"\xc1", b"", encode(Wake()), b"\x92\xa1f\x01"])
async def test_a_frame_that_cannot_be_read_is_left_out(wire: RedisClient, relay: Relay, data: bytes) -> None:
    """In the middle of a log that several readers fill their gaps from."""
    lease, job = await a_lease(wire), await put_job(Queue(wire), reply_to=relay.address)
    buffer, claim = relay.open(job.id), await claim_one(lease)
    log = partition_key(0, "log", lease.id)
    await lease.calls([append(lease, {"-": [delta(claim, 1)]}, claim)])
    await wire.redis.xadd(log, {"-": data}, id="1-1")
    await wire.redis.publish(relay.address, data)
    await lease.calls([append(lease, {"-": [delta(claim, 2)]})])
    await until(lambda: buffer.seq == 2)
    await finish(lease, claim, 2)
    assert await numbers_read(buffer) == [1, 2]
    assert buffer.terminal is not None and buffer.terminal.state is JobState.COMPLETED
    assert [row.seq for row in await deltas_of(JobReader(wire), await JobReader(wire).record(job.id))] == [1, 2]


async def test_a_log_that_is_no_stream_deafens_nobody_else(wire: RedisClient, relay: Relay) -> None:
    """The key of one worker's log holds something else; the readers of another worker's go on."""
    leases, buffers = [await a_lease(wire) for _ in range(2)], []
    for lease in leases:
        buffers.append(relay.open((await put_job(Queue(wire), reply_to=relay.address)).id))
        claim = await claim_one(lease)
        await lease.calls([append(lease, {"-": [delta(claim, 1)]}, claim)])
    await wire.redis.set(partition_key(0, "log", leases[0].id), b"x")
    await until(lambda: buffers[1].seq == 1)


async def test_a_message_that_cannot_be_read_ends_no_subscription(wire: RedisClient) -> None:
    """Nothing sent to a worker behind it is lost, and neither is what comes at once after it."""
    lease = await a_lease(wire)
    controls = lease.controls()
    assert await anext(controls) == Wake()  # it listens
    heard = asyncio.ensure_future(anext(controls))
    name = channel("worker", lease.id)
    await until(lambda: wire.redis.publish(name, b"\xc1"))
    async with asyncio.timeout(20):
        for data in (b"", msgspec.msgpack.encode(["c2", "later"]), msgspec.msgpack.encode(["q", 1]), encode(Wake())):
            await wire.redis.publish(name, data)
        assert await heard == Wake()


# --- newer versions --------------------------------------------------------------------------------------------------


async def test_the_readers_of_a_newer_worker_are_told_so(wire: RedisClient, relay: Relay) -> None:
    """A frame of a version that this process does not know: its job goes on, the reader here ends with an error."""
    queue, newer, ours = Queue(wire), await a_lease(wire), await a_lease(wire)
    job, other = (a_job(queue, reply_to=relay.address) for _ in range(2))
    buffers = [relay.open(each.id) for each in (job, other)]
    for lease, each in ((newer, job), (ours, other)):
        await queue.put(each)
        claim = await claim_one(lease)
        assert claim.job.id == each.id
    frame = msgspec.msgpack.encode(["f2", newer.id, 1, {"rows": []}])
    await wire.redis.xadd(partition_key(0, "log", newer.id), {relay.address: frame}, id="1-0")
    await wire.redis.publish(relay.address, frame)
    await ours.calls([append(ours, {"-": [delta(claim, 1)]}, claim)])
    await numbers_read(buffers[0])
    assert buffers[0].terminal is not None and (failure := buffers[0].terminal.failure) is not None
    assert (failure.code, failure.status) == ("newer_version", 503)
    await until(lambda: buffers[1].seq == 1)
    assert (await JobReader(wire).record(job.id)).state is JobState.RUNNING and await reasons(wire) == {}


async def test_a_result_of_a_newer_version_is_not_lost(wire: RedisClient) -> None:
    """The job has completed, and whoever cannot read its record says so; nothing is changed."""
    lease, job = await a_lease(wire), await put_job(Queue(wire))
    await lease.claim(0, 1)
    record = msgspec.msgpack.encode(["t2", job.id, "completed", {"seq": 1}])
    await wire.call("finish", 0, lease.id, job.id, 1, "completed", record, b"\x90", record, "")
    found = await JobReader(wire).record(job.id)
    assert found.state is JobState.COMPLETED and found.newer and await reasons(wire) == {}
    assert await wire.redis.hget(partition_key(0, "job", job.id), "record") == record


# --- entries of the fleet, lists, batches, webhooks ------------------------------------------------------------------

BAD = [b"\xff", b"", b"{}", b"[1]", b'{"model": 3}']


@pytest.mark.parametrize("bad", BAD)
async def test_an_entry_of_the_fleet_that_cannot_be_read_is_left_out(wire: RedisClient, bad: bytes) -> None:
    """Processes, cards, plans, cold starts and actions: the others are there."""
    fleet, plans = Fleet(wire), Plans(wire)
    process = Process(role="worker", id="w", life="w", pid=1, host="h", state="ready", since=0.0)
    await fleet.report(process)
    await wire.redis.zadd(fleet_key("procs"), {b"worker:\xff": 2e9, b"worker:bad": 2e9})
    await wire.redis.set(fleet_key("proc", "worker:bad"), bad)
    card = ModelCard(name="m", engine="sim", context=1, max_output=1, capabilities=Capabilities(), created=1)
    await fleet.publish_card(card)
    await wire.redis.hset(fleet_key("card"), "bad", bad)
    lead = await wire.ask(claim_lead("s", 1000))
    action = Action(model="m", kind="up", reason="r", by="s")
    assert await plans.publish(lead, [Plan(model="m", want=1, reason="r")], [action], {"m": 2.0})
    for name in ("plan", "cold"):
        await wire.redis.hset(fleet_key(name), mapping={"bad": bad, b"\xff": bad})
    await wire.redis.xadd(fleet_key("actions"), {"model": "m", "epoch": "1", "action": bad})
    await wire.redis.xadd(fleet_key("actions"), {"something": "else"})
    assert await fleet.processes() == [process] and await fleet.cards() == {"m": card}
    assert list(await plans.read()) == ["m"] and await plans.cold_starts() == {"m": 2.0}
    assert [noted.action for noted in await plans.actions(10)] == [action]


async def test_an_override_that_cannot_be_read_is_a_pause(wire: RedisClient) -> None:
    """Somebody has decided something: the scheduler is not to decide otherwise."""
    await wire.redis.set(fleet_key("override", "m"), b"\xff")
    await Overrides(wire).put("other", 2, "me")
    found = await Overrides(wire).of(["m", "other", "none"])
    assert found["m"].paused and found["other"].want == 2 and len(found) == 2


async def test_lanes_and_deadlines_are_counted_without_what_cannot_be_read(wire: RedisClient) -> None:
    """What the scheduler looks at once a second."""
    jobs = [await put_job(Queue(wire), deadline_ms=60_000) for _ in range(4)]
    for job, fault in zip(jobs, ("lane", "created", NO_HASH), strict=False):
        await spoil(wire, job.id, fault)
    await wire.redis.zadd(partition_key(0, "timers"), {b"\xff": 1})
    await wire.redis.set(partition_key(0, "retry", "m", "standard"), b"no stream")
    backlog = Backlog(wire)
    assert len((await wire.ask(backlog_of(["m"], wire.partitions))).due) == 1
    assert [lane.waiting for lane in await backlog.lanes(["m"])] == [0, 4, 0]
    await wire.redis.set(fleet_key("leader_epoch"), b"x")
    assert (await wire.ask(claim_lead("s", 1000))).holder == "s"


async def test_a_file_that_cannot_be_read_is_shown_as_that(wire: RedisClient) -> None:
    """In the list it stands in its place; alone it is not there; when its time is over it is tidied up."""
    files = Files(wire)
    now = await wire.now_ms()
    ids = [files.new_id("t") for _ in range(3)]
    for file_id in ids:
        file = StoredFile(id=file_id, tenant="t", name="n", size=1, purpose="batch", created_ms=now, expires_ms=now + 1)
        await files.put(file)
    await wire.redis.set(partition_key(0, "file", ids[1]), b"\xc1")
    listed = {file.id: file.name for file in await files.recent("t", None, 10)}
    assert listed == {ids[0]: "n", ids[1]: UNREADABLE, ids[2]: "n"}
    with pytest.raises(UnknownFile):
        await files.get(ids[1], "t")
    async with asyncio.timeout(20):
        while len(expired := await files.expired(10)) < 3:
            await asyncio.sleep(0.01)
    assert {tenant for _, tenant in expired} == {"t"}
    for file_id, tenant in expired:
        await files.forget(file_id, tenant)
    assert await files.recent("t", None, 10) == [] and await files.expired(10) == []


@pytest.mark.parametrize("field", ["asked", "progress", "status", "created", "expires"])
async def test_a_batch_that_cannot_be_read_fails_and_is_shown(wire: RedisClient, field: str) -> None:
    """It is told of once, ends as failed, and neither the list nor the tidying up stumbles over it."""
    batches = Batches(wire)
    ids = []
    for _ in range(2):
        batch = Batch(
            id=batches.new_id("t"), tenant="t", ceiling=Priority.BATCH, endpoint="/v1/completions", input_file="f",
            window="none", output_keep_ms=1,
        )  # fmt: skip
        await batches.create(batch, "")
        ids.append(batch.id)
    bad, good = ids
    await wire.redis.hset(partition_key(0, "batch", bad), field, b"\xc1x")
    turns = {name: turn for name, turn, _ in await batches.due(10)}
    if field not in {"created", "expires"}:
        with pytest.raises(Superseded):
            await batches.hold(bad, turns[bad])
        assert await wire.redis.zscore(partition_key(0, "due"), bad) is None
    await batches.hold(good, turns[good])
    shown = {record.batch.id: record for record in await batches.recent("t", None, 10)}
    assert shown[bad].state is BatchState.FAILED and shown[bad].progress.faults[0].code == "malformed_batch"
    assert shown[good].state is BatchState.VALIDATING
    assert (await batches.states(ids))[good] is BatchState.VALIDATING
    await batches.forget_expired(10)


async def test_a_webhook_message_that_cannot_be_read_is_given_up(wire: RedisClient) -> None:
    """The others go out; it is not due again, and the list shows it as failed."""
    webhooks, events = Webhooks(wire), []
    for number in range(4):
        entry = await wire.redis.xadd(partition_key(0, "outbox", "webhooks"), {"id": f"s{number}"})
        event = Event(f"s{number}", "t", "job.completed", await wire.now_ms(), 0, entry.decode())
        events.append(message_id(0, event.id, "e"))
        await webhooks.dispatch(event, ["e"])
    for name, field in zip(events, ("subject", "before", "attempt"), strict=False):
        await wire.redis.hset(partition_key(0, "hook", name), field, b"\xffx")
    errands = await webhooks.outgoing("e", 10, 1)
    assert {errand.id for errand in errands} == {events[2], events[3]}
    for errand in errands:
        assert await webhooks.settle(errand, "delivered", 200, "")
    await asyncio.sleep(0.01)
    assert await webhooks.outgoing("e", 10, 1) == []
    assert {message.id: message.state for message in await webhooks.recent(10)} == dict(
        zip(events, ("failed", "failed", "delivered", "delivered"), strict=True)
    )


async def test_an_event_that_cannot_be_read_is_dropped(wire: RedisClient) -> None:
    """It is taken out of the outbox, and the one behind it is passed on."""
    box = partition_key(0, "outbox", "broker")
    for subject in (b"\xff", b"job_1"):
        await wire.redis.xadd(box, {"id": subject, "tenant": "t", "type": "job.started"})
    assert [event.subject for event in await Outbox(wire, "broker").collect("me", 10)] == ["job_1"]
    assert await wire.redis.xlen(box) == 1


async def test_a_dead_letter_without_a_body_is_not_replayed(wire: RedisClient) -> None:
    """A job with an empty prompt is nothing that anybody asked for."""
    lease, job = await a_lease(wire), await put_job(Queue(wire))
    await wire.redis.hset(partition_key(0, "job", job.id), "body", b"\xc1")
    (broken,) = (await lease.claim(0, 1)).jobs
    assert isinstance(broken, UnreadableClaim)
    end = Terminal(job.id, JobState.FAILED, 0)
    await lease.calls([lease.finish_call(Finish(end, 1, True, dead="unreadable"))])
    (letter,) = await DeadLetters(wire).recent(10)
    with pytest.raises(MalformedJob):
        await DeadLetters(wire).replay(letter.id)
    assert await DeadLetters(wire).recent(10) == [letter]


async def test_a_dead_letter_replayed_twice_is_one_job(wire: RedisClient) -> None:
    """By several at the same time; a process lost between the put and the end of its letter is the same case."""
    letters, job, lease = DeadLetters(wire), await put_job(Queue(wire)), await a_lease(wire)
    await lease.claim(0, 1)
    end = Terminal(job.id, JobState.FAILED, 0)
    await lease.calls([lease.finish_call(Finish(end, 1, True, dead="poison"))])
    (letter,) = await letters.recent(10)
    accepted = await asyncio.gather(*(letters.replay(letter.id) for _ in range(3)))
    assert len({each.id for each in accepted}) == 1 and await letters.recent(10) == []
    assert len((await lease.claim(0, 10)).jobs) == 1
