"""Webhook messages on the wire: how long they are listed, and how much of an answer is kept."""

from __future__ import annotations

from streaming.events import Event, Redeliveries, Webhooks
from streaming.ids import message_id
from streaming.keys import partition_key
from streaming.redis.client import RedisClient


async def dispatched(wire: RedisClient) -> str:
    """The id of a message for the endpoint `e`."""
    entry = await wire.redis.xadd(partition_key(0, "outbox", "webhooks"), {"id": "job_1"})
    event = Event("job_1", "t", "job.completed", await wire.now_ms(), 0, entry.decode())
    await Webhooks(wire).dispatch(event, ["e"])
    return message_id(0, event.id, "e")


async def test_messages_are_listed_for_twice_the_retention(wire: RedisClient) -> None:
    await dispatched(wire)
    kept_ms, twice_ms = await wire.redis.pttl(partition_key(0, "hooks")), 2000 * wire.settings.retention_s
    assert twice_ms // 2 < kept_ms <= twice_ms


async def test_a_long_problem_is_cut(wire: RedisClient) -> None:
    """An endpoint may answer with whole pages, and each attempt notes what it said."""
    webhooks, message = Webhooks(wire), await dispatched(wire)
    (errand,) = await webhooks.outgoing("e", 1, 60_000)
    assert await webhooks.settle(errand, "pending", 500, 100 * "0123456789", 60_000)
    assert (await webhooks.get(message)).problem == 50 * "0123456789"


async def test_messages_of_long_ago_leave_the_list(wire: RedisClient) -> None:
    """With the next one, though the list itself lives on."""
    hooks = partition_key(0, "hooks")
    await wire.redis.zadd(hooks, {"old": 1})
    message = await dispatched(wire)
    assert await wire.redis.zrange(hooks, 0, -1) == [message.encode()]


# --- Broker messages that came again: each is counted by itself ---


async def test_each_message_of_each_queue_is_counted_by_itself(wire: RedisClient) -> None:
    """Wherever the border between the names lies, and whatever characters they have."""
    redeliveries = Redeliveries(wire)
    messages = [("a\0b", "c"), ("a", "b\0c"), ("q", "\ud800"), ("q", "\udfff"), ("q", "?"), ("q", "m")]
    assert [await redeliveries.begin(*each) for each in messages] == [1] * len(messages)
    assert await redeliveries.begin("q", "m") == 2
    await redeliveries.settle("q", "m")
    assert await redeliveries.begin("q", "m") == 1
