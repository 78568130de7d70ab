"""Conversations on a real server: when a turn may begin, that its items are added once, how long they are kept."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import pytest
from flow import until
from hand import Hand, lapse

from penstock.engine import ChatTurn
from streaming.errors import ConversationChanged, DecodeError, KeyReused, QuotaExceeded, UnknownConversation
from streaming.ids import new_conversation_id, partition_of
from streaming.jobs.conversations import OVERHEAD_BYTES, Conversation, ConversationItem, Conversations
from streaming.jobs.dead_letters import DeadLetters
from streaming.jobs.job import Chat, Job, JobState, ResponseForm
from streaming.jobs.queue import Queue
from streaming.jobs.quotas import Quotas
from streaming.jobs.reader import JobReader
from streaming.jobs.reaper import Reaper
from streaming.jobs.settings import QuotaSettings
from streaming.keys import partition_key
from streaming.order import Priority
from streaming.redis.client import RedisClient

pytestmark = pytest.mark.slow

RETENTION_S = 3600
TENANT = "t"


@pytest.fixture
async def wire(opened: Callable[..., RedisClient], redis_url: str) -> RedisClient:
    return opened(redis_url, lease_ms=1_000, retention_s=RETENTION_S, max_attempts=1, timeout_s=30)


def item(name: str, text: str = "x") -> ConversationItem:
    return ConversationItem(name, msgspec.Raw(msgspec.json.encode({"id": name, "text": text})))


async def begun(wire: RedisClient, *names: str) -> Conversation:
    conversations = Conversations(wire)
    return await conversations.create(new_conversation_id(0), TENANT, {}, [item(name) for name in names])


def turn_of(conversation: Conversation, queue: Queue, **changes: object) -> Job:
    fields: dict[str, object] = {
        "id": queue.new_id(TENANT, "", conversation.id),
        "model": "sim",
        "tenant": TENANT,
        "priority": Priority.STANDARD,
        "prompt": Chat((ChatTurn("user", "hello"),)),
        "response": ResponseForm(conversation=conversation.id, own_turns=1),
    }
    return Job(**{**fields, **changes})  # type: ignore[arg-type]


async def begin(wire: RedisClient, conversation: Conversation, **changes: object) -> Job:
    queue = Queue(wire)
    job = turn_of(conversation, queue, **changes)
    await queue.put(job, version=conversation.version)
    return job


async def read(wire: RedisClient, conversation: Conversation) -> Conversation:
    return await Conversations(wire).read(conversation.id, TENANT)


async def ttl_s(wire: RedisClient, conversation: Conversation) -> int:
    return int(await wire.redis.ttl(partition_key(0, "conversation", conversation.id)))


async def test_a_turn_begins_only_if_the_conversation_is_as_it_was_read(wire: RedisClient) -> None:
    """A put that is refused leaves neither a job nor a turn."""
    conversations, made = Conversations(wire), await begun(wire, "a")
    await conversations.add(made, [item("b")])
    with pytest.raises(ConversationChanged):
        await begin(wire, made)
    present = await read(wire, made)
    assert [each.id for each in present.items] == ["a", "b"] and not present.turn
    job = await begin(wire, present)
    assert (await read(wire, made)).turn == job.id
    with pytest.raises(ConversationChanged):
        await begin(wire, present)
    with pytest.raises(ConversationChanged):
        await begin(wire, await read(wire, made))
    await conversations.delete(made.id, TENANT)
    with pytest.raises(ConversationChanged):
        await begin(wire, present)
    assert await wire.redis.zcard(partition_key(0, "jobs", TENANT)) == 1


async def test_a_put_that_is_sent_again_begins_no_second_turn(wire: RedisClient) -> None:
    queue, made = Queue(wire), await begun(wire)
    job = turn_of(made, queue)
    assert await queue.put(job, version=0) and await queue.put(job, version=0)
    assert (await read(wire, made)).turn == job.id


async def test_an_idempotency_key_counts_within_its_conversation(wire: RedisClient) -> None:
    queue, made = Queue(wire), await begun(wire)
    first = await queue.put(turn_of(made, queue), idempotency_key="k", digest="d", version=0)
    again = await queue.put(turn_of(made, queue), idempotency_key="k", digest="d", version=0)
    assert again.joined and again.id == first.id
    with pytest.raises(KeyReused):
        await queue.put(turn_of(made, queue), idempotency_key="k", digest="other", version=0)
    other = await begun(wire)
    elsewhere = await queue.put(turn_of(other, queue), idempotency_key="k", digest="another", version=0)
    assert not elsewhere.joined and (await read(wire, other)).turn == elsewhere.id
    assert queue.new_id(TENANT, "k", made.id)[:6] == queue.new_id(TENANT, "l", made.id)[:6]
    assert partition_of(first.id) == 0


async def test_of_many_who_end_a_turn_one_adds_its_items(wire: RedisClient) -> None:
    conversations, made = Conversations(wire), await begun(wire, "a")
    await begin(wire, made)
    present = await read(wire, made)
    outcomes = await asyncio.gather(
        *(conversations.end_turn(present, [item("b"), item("c")]) for _ in range(20)), return_exceptions=True
    )
    assert sum(outcome is None for outcome in outcomes) == 1
    assert all(outcome is None or isinstance(outcome, ConversationChanged) for outcome in outcomes)
    after = await read(wire, made)
    assert [each.id for each in after.items] == ["a", "b", "c"] and not after.turn
    with pytest.raises(ConversationChanged):
        await conversations.add(present, [item("d")])


async def test_items_keep_their_order_and_their_places(wire: RedisClient) -> None:
    conversations, made = Conversations(wire), await begun(wire, *"abc")
    await conversations.remove(made, made.items[2])
    await conversations.add(await read(wire, made), [item(name) for name in "defghijklmn"])
    after = await read(wire, made)
    assert "".join([each.id for each in after.items]) == "abdefghijklmn"
    assert [each.number for each in after.items] == [1, 2, *range(4, 15)]


@pytest.mark.parametrize("end", ["completed", "cancelled", "expired", "lost", "malformed", "unreadable"])
async def test_the_end_of_its_job_sets_how_long_a_conversation_is_kept(wire: RedisClient, end: str) -> None:
    """Whoever ends the job: its worker, or a script."""
    made, queue = await begun(wire, "a"), Queue(wire)
    job = await begin(wire, made, **({"max_queue_ms": 1} if end == "expired" else {}))
    key = partition_key(0, "job", job.id)
    assert await ttl_s(wire, made) > RETENTION_S
    match end:
        case "completed":
            hand = await Hand.claiming(wire)
            await hand.write("ab")
            await hand.finish()
        case "cancelled":
            await queue.cancel(job.id)
        case "expired":
            pass  # the sweeps below
        case "lost":
            await lapse(wire, (await Hand.claiming(wire)).lease)
        case "malformed":
            hand = await Hand.claiming(wire)
            await wire.redis.hset(key, "runs", "?")
            await hand.finish()
        case _:
            await wire.redis.hset(key, "state", "?")
            await JobReader(wire).record(job.id)

    async def is_over() -> bool:
        await Reaper(wire).sweep()
        return await ttl_s(wire, made) <= RETENTION_S

    await until(is_over)
    assert await ttl_s(wire, made) > RETENTION_S - 60
    assert abs(await wire.redis.ttl(key) - await ttl_s(wire, made)) <= 1, "its job is kept for as long"
    assert (await read(wire, made)).turn == job.id


async def test_a_conversation_counts_as_requests_of_its_tenant(wire: RedisClient) -> None:
    """Its bytes are those of its items and its metadata, until it is deleted."""
    conversations, quotas = Conversations(wire), Quotas(wire)

    async def counted() -> int:
        return (await quotas.usage(TENANT)).job_bytes

    made = await begun(wire, "a", "b")
    assert await counted() == OVERHEAD_BYTES + 2 * len(msgspec.json.encode(item("a")))
    await conversations.set_metadata(made, {"a": "b" * 100})
    assert await counted() > OVERHEAD_BYTES + 2 * len(msgspec.json.encode(item("a"))) + 100
    await conversations.set_metadata(made, {})
    await conversations.remove(made, made.items[0])
    assert await counted() == OVERHEAD_BYTES + len(msgspec.json.encode(item("a")))
    job = await begin(wire, await read(wire, made))
    size = await counted()
    await Queue(wire).cancel(job.id)
    assert await counted() == size
    await conversations.end_turn(await read(wire, made), [])
    await conversations.delete(made.id, TENANT)
    assert await counted() == size - OVERHEAD_BYTES - len(msgspec.json.encode(item("a")))


async def test_a_quota_refuses_new_items_but_not_those_of_a_turn(wire: RedisClient) -> None:
    conversations, quota = Conversations(wire), QuotaSettings(job_bytes=1_000)
    made = await conversations.create(new_conversation_id(0), TENANT, {}, [item("a", "x" * 400)], quota)
    with pytest.raises(QuotaExceeded) as refused:
        await conversations.add(made, [item("b", "x" * 400)], quota)
    assert (refused.value.name, refused.value.limit) == ("job_bytes", 1_000)
    with pytest.raises(QuotaExceeded):
        await conversations.create(new_conversation_id(0), TENANT, {}, [item("c", "x" * 400)], quota)
    with pytest.raises(QuotaExceeded):
        await conversations.set_metadata(made, {"a": "x" * 500}, quota)
    await begin(wire, made)
    await conversations.end_turn(await read(wire, made), [item("d", "x" * 400)])
    assert [each.id for each in (await read(wire, made)).items] == ["a", "d"]


async def test_a_conversation_of_another_tenant_is_unknown(wire: RedisClient) -> None:
    conversations, made = Conversations(wire), await begun(wire, "a")
    other = msgspec.structs.replace(made, tenant="u")
    for call in (
        lambda: conversations.read(made.id, "u"),
        lambda: conversations.delete(made.id, "u"),
        lambda: conversations.add(other, [item("b")]),
        lambda: conversations.set_metadata(other, {"a": "b"}),
        lambda: conversations.read("conv_" + "0" * 32, TENANT),
        lambda: conversations.read("x", TENANT),
    ):
        with pytest.raises(UnknownConversation):
            await call()  # type: ignore[no-untyped-call]
    with pytest.raises(ConversationChanged):
        await begin(wire, made, tenant="u")
    assert [each.id for each in (await read(wire, made)).items] == ["a"]


async def test_a_malformed_conversation_is_no_other_jobs_trouble(wire: RedisClient) -> None:
    """Puts and ends of jobs in the same call go through, and so does the end of its own job."""
    queue, made, other = Queue(wire), await begun(wire), await begun(wire)
    job = await begin(wire, made)
    key = partition_key(0, "conversation", made.id)
    await wire.redis.delete(key)
    await wire.redis.set(key, "?")
    with pytest.raises(UnknownConversation):
        await read(wire, made)
    outcomes = await asyncio.gather(begin(wire, made), begin(wire, other), return_exceptions=True)
    assert isinstance(outcomes[0], ConversationChanged) and isinstance(outcomes[1], Job)
    await queue.cancel(job.id)
    assert (await JobReader(wire).record(job.id)).state is JobState.CANCELLED


CORRUPT = {
    "a time that is none": {"created": "?"}, "a time without end": {"created": "1e400"}, "no number": {"version": "x"},
    "a number below 0": {"version": "-1"}, "metadata that are none": {"metadata": b"\xc1"},
    "metadata of another kind": {"metadata": b"\x93\x01\x02\x03"}, "a turn that is no job": {"turn": "?"},
    "a turn that is no text": {"turn": b"\xff"}, "a turn of another partition": {"turn": "job_ff" + "0" * 30},
    "no next number": {"next": "?"}, "a next number that is taken": {"next": "0"}, "half an item": {"i1": b"["},
    "an item of another kind": {"i1": b"{}"}, "a place without end": {"i" + "9" * 5000: b"[]"},
}  # fmt: skip


@pytest.mark.parametrize("what", CORRUPT)
async def test_a_conversation_with_a_corrupt_field_is_unreadable(wire: RedisClient, what: str) -> None:
    """Each way, so that nobody takes it for another error; and it can be deleted."""
    made = await begun(wire)
    await Conversations(wire).add(made, [item("a")])
    await wire.redis.hset(partition_key(0, "conversation", made.id), mapping=CORRUPT[what])
    with pytest.raises(DecodeError):
        await read(wire, made)
    await Conversations(wire).delete(made.id, TENANT)


async def test_a_replayed_turn_is_none(wire: RedisClient) -> None:
    """The conversation has gone on without the job that was given up: the new one does not belong to it."""
    made = await begun(wire)
    await begin(wire, made)
    await lapse(wire, (await Hand.claiming(wire)).lease)
    letters = DeadLetters(wire)
    (letter,) = await letters.recent(5)
    again = await letters.replay(letter.id)
    record = await JobReader(wire).record(again.id)
    assert record.job.response is not None and record.job.response.conversation == ""
    assert (await read(wire, made)).turn != again.id


async def test_many_deletions_take_bounded_room(wire: RedisClient) -> None:
    """A cursor may name one of the last thousand; other tenants' deletions take none of them away."""
    conversations = Conversations(wire)
    made = await begun(wire, *(f"i{number}" for number in range(1_200)))
    other = await conversations.create(new_conversation_id(0), "other", {}, [item("i0")])
    await conversations.remove(other, other.items[0])
    for number in range(1, 1_201):
        await conversations.remove(made, made.items[number - 1])
        made = msgspec.structs.replace(made, version=made.version + 1)
    assert [await conversations.deleted_place(made, f"i{number}") for number in (1_199, 200, 199, 1)] == [
        1_200, 201, None, None
    ]  # fmt: skip
    assert await conversations.deleted_place(other, "i0") == 1
    assert await conversations.deleted_place(other, "i500") is None
    assert len(await wire.redis.keys("*:places:*")) == 2
    places = partition_key(0, "places", TENANT)
    assert await wire.redis.memory_usage(places) < 150_000
    assert 86_000 < await wire.redis.ttl(places) <= 86_400
