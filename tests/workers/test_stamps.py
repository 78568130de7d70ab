"""The stamps of an attempt, from the worker's clock and from the engine's."""

from __future__ import annotations

import time

from penstock.engine import EngineTimes
from streaming.redis.client import RedisClient
from streaming.redis.clock import Clock
from workers.stamps import AttemptStamps


async def test_a_job_without_a_first_token_has_no_last_one(wire: RedisClient) -> None:
    """It was refused or cancelled before; and no time is known before the clocks were compared."""
    clock, now = Clock(wire), time.monotonic()
    stamps = AttemptStamps()
    stamps.finish(None, now)
    assert stamps.generated(clock, 0).last == 0
    await clock.renew()
    empty = stamps.generated(clock, 0)
    assert (empty.first, empty.last) == (0, 0)
    stamps.begin(now)
    stamps.finish(None, now + 1)
    generated = stamps.generated(clock, 0)
    assert generated.last - generated.first == 1_000_000


def test_the_engines_own_times_come_first() -> None:
    """A job of several texts begins with the first to begin and ends with the last to end."""
    stamps = AttemptStamps()
    stamps.begin(5.0)
    stamps.finish(EngineTimes(3.0, 4.0, 8.0), 9.0)
    stamps.finish(EngineTimes(2.0, 4.5, 7.0), 9.5)
    assert (stamps.scheduled, stamps.first, stamps.last) == (2.0, 4.0, 8.0)
