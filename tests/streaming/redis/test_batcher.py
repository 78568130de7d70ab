"""Calls of many tasks in one round trip: each gets its own answer, and only its own error."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from flow import a_job
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError

from streaming.errors import LaneFull, Unavailable
from streaming.jobs.queue import Queue
from streaming.keys import partition_key
from streaming.redis.client import EAGER_CALLS, MAX_BATCHED_CALLS, Call, RedisClient, Then


class Counted(RedisClient):
    """Counts the calls of each round trip, and can be made to wait or to fail."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.trips: list[int] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.down = False

    async def outcomes(self, calls: Sequence[Call]) -> list[Any]:
        self.trips.append(len(calls))
        await self.gate.wait()
        if self.down:
            raise Unavailable("Redis does not answer")
        return await super().outcomes(calls)


@pytest.fixture
async def wire(opened: Callable[..., Counted], redis_url: str) -> Counted:
    return opened(redis_url, Counted, lane_limit=3)


async def test_what_waits_while_one_is_under_way_goes_together(wire: Counted) -> None:
    queue = Queue(wire)
    wire.gate.clear()
    puts = [asyncio.create_task(queue.put(a_job(queue, model=f"m{number}"))) for number in range(MAX_BATCHED_CALLS + 3)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    late = asyncio.create_task(queue.put(a_job(queue, model="late")))
    wire.gate.set()
    accepted = await asyncio.gather(*puts, late)
    assert len({each.id for each in accepted}) == MAX_BATCHED_CALLS + 4
    assert wire.trips == [MAX_BATCHED_CALLS, 4]


async def test_many_are_sent_before_the_others_of_their_turn_have_come(wire: Counted) -> None:
    """Over a connection that is open; what cannot be sent at once, or has to be sent again, goes the usual way."""
    begun: list[int] = []
    send_nowait = wire.send_nowait

    def counted(calls: Sequence[Call], then: Then) -> bool:
        begun.append(len(calls))
        return send_nowait(calls, then)

    wire.send_nowait = counted  # type: ignore[method-assign]
    queue = Queue(wire)
    await queue.put(a_job(queue, model="first"))  # opens the connection
    wire.trips.clear()
    wire.gate.clear()
    puts = [asyncio.create_task(queue.put(a_job(queue, model=f"m{number}"))) for number in range(2 * EAGER_CALLS + 3)]
    done, _ = await asyncio.wait(puts, timeout=20, return_when=asyncio.FIRST_COMPLETED)
    assert begun == [EAGER_CALLS, EAGER_CALLS] and done, "they are answered although the rest is held up"
    wire.gate.set()
    await asyncio.gather(*puts)
    assert wire.trips == [3]
    await wire.redis.function_flush()
    again = await asyncio.gather(*(queue.put(a_job(queue, model=f"n{number}")) for number in range(EAGER_CALLS)))
    assert len({each.id for each in again}) == EAGER_CALLS and wire.trips == [3, EAGER_CALLS]


async def test_a_connection_lost_under_many_is_told_to_each_and_none_is_sent_again(
    wire: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was sent, and may have run: whoever asked is to know, not to wait for another try. The queue itself tries once
    more, here all of them in the same turn of the loop."""
    monkeypatch.setattr("streaming.jobs.queue.PUT_RETRY_DELAY_S", 0.0)
    queue = Queue(wire)
    await queue.put(a_job(queue, model="first"))
    wire.trips.clear()
    lost = asyncio.get_running_loop().create_future()
    lost.set_exception(RedisConnectionError("lost"))
    wire._topology.send_scripts = lambda _: lost  # type: ignore[method-assign]
    puts = (queue.put(a_job(queue, model=f"m{number}")) for number in range(EAGER_CALLS))
    assert {type(each) for each in await asyncio.gather(*puts, return_exceptions=True)} == {Unavailable}
    assert wire.trips == []


async def test_each_is_refused_for_itself(wire: Counted) -> None:
    """One lane is full, the others are not."""
    queue = Queue(wire)
    models = ["full"] * 5 + ["other"] * 2
    outcomes = await asyncio.gather(*(queue.put(a_job(queue, model=each)) for each in models), return_exceptions=True)
    assert [isinstance(outcome, LaneFull) for outcome in outcomes] == [False] * 3 + [True] * 2 + [False] * 2


async def test_one_that_breaks_in_the_script_breaks_no_other(wire: Counted) -> None:
    """The lane of one model is not a stream."""
    queue = Queue(wire)
    await wire.redis.set(partition_key(0, "lane", "broken", "standard"), "no stream")
    models = ["fine", "broken", "fine"]
    outcomes = await asyncio.gather(*(queue.put(a_job(queue, model=each)) for each in models), return_exceptions=True)
    assert isinstance(outcomes[1], ResponseError) and "WRONGTYPE" in str(outcomes[1])
    assert not isinstance(outcomes[0], Exception) and not isinstance(outcomes[2], Exception)


@pytest.mark.parametrize("count", [1, EAGER_CALLS])
async def test_a_right_that_lacks_is_told_to_each(opened: Callable[..., Counted], redis_url: str, count: int) -> None:
    """However they were sent: as a store that cannot be used, so that a job which may be there is withdrawn."""
    admin = opened(redis_url, RedisClient)
    await admin.redis.execute_command("ACL", "SETUSER", "weak", "on", ">pw", "~*", "&*", "+@all", "-hset")
    try:
        weak = opened(redis_url.replace("redis://", "redis://weak:pw@"), Counted, lane_limit=100)
        queue = Queue(weak)
        outcomes = await asyncio.gather(*(queue.put(a_job(queue)) for _ in range(count)), return_exceptions=True)
        assert all(isinstance(each, Unavailable) and "store acl" in str(each) for each in outcomes), outcomes
    finally:
        await admin.redis.execute_command("ACL", "DELUSER", "weak")


async def test_a_store_that_is_down_is_told_to_all_and_asked_again_by_the_next(wire: Counted) -> None:
    queue = Queue(wire)
    wire.down = True
    puts = (queue.put(a_job(queue, model="m")) for _ in range(3))
    outcomes = await asyncio.gather(*puts, return_exceptions=True)
    assert all(isinstance(outcome, Unavailable) for outcome in outcomes)
    wire.down = False
    assert (await queue.put(a_job(queue, model="m"))).place.before == 0


async def test_a_caller_that_leaves_takes_nobody_with_it(wire: Counted) -> None:
    queue = Queue(wire)
    wire.gate.clear()
    leaving, staying = (asyncio.create_task(queue.put(a_job(queue, model="m"))) for _ in range(2))
    await asyncio.sleep(0)
    leaving.cancel()
    wire.gate.set()
    assert (await staying).created_ms > 0
