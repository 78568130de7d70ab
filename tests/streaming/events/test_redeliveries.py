"""Broker messages that came again: each is counted by itself."""

from __future__ import annotations

from streaming.events import Redeliveries
from streaming.redis.client import RedisClient


async def test_each_message_of_each_queue_is_counted_by_itself(wire: RedisClient) -> None:
    """Wherever the border between the names lies, and whatever characters they have."""
    redeliveries = Redeliveries(wire)
    messages = [("a\0b", "c"), ("a", "b\0c"), ("q", "\ud800"), ("q", "\udfff"), ("q", "?"), ("q", "m")]
    assert [await redeliveries.begin(*each) for each in messages] == [1] * len(messages)
    assert await redeliveries.begin("q", "m") == 2
    await redeliveries.settle("q", "m")
    assert await redeliveries.begin("q", "m") == 1
