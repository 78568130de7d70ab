"""A process seen in the fleet, from its first word to its last."""

from __future__ import annotations

import asyncio
import logging

import msgspec
import pytest

from streaming.errors import Unavailable
from streaming.fleet.process import Process
from streaming.fleet.processes import Fleet, present
from streaming.ids import new_life
from streaming.keys import fleet_key
from streaming.redis.client import RedisClient
from streaming.store.identity import live_processes


class Telling:
    """Describes a worker, another state each time it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self) -> Process:
        self.asked += 1
        return Process(role="worker", id="w1", life="l1", pid=1, host="h", state=f"state-{self.asked}", since=0.0)

    async def until(self, asked: int) -> None:
        async with asyncio.timeout(20):
            while self.asked < asked:
                await asyncio.sleep(0)


async def states(fleet: Fleet) -> list[str]:
    return [process.state for process in await fleet.processes()]


async def test_it_is_seen_at_once_when_something_changed_and_gone_at_the_end(wire: RedisClient) -> None:
    fleet, telling = Fleet(wire), Telling()
    async with present(fleet, telling) as changed:
        async with asyncio.timeout(20):
            while await states(fleet) != ["state-2"]:  # the first is asked for its name alone
                await asyncio.sleep(0)
            changed.set()
            while await states(fleet) != ["state-3"]:
                await asyncio.sleep(0)
    assert await states(fleet) == []


@pytest.mark.parametrize("turns", range(6))
async def test_it_ends_although_it_was_told_something_just_before(wire: RedisClient, turns: int) -> None:
    """However many turns of the event loop lie between: the cancellation may come as the wait for news ends."""
    telling = Telling()
    async with asyncio.timeout(20):
        async with present(Fleet(wire), telling) as changed:
            await telling.until(2)
            await asyncio.sleep(0.05)  # usually it waits for news then; where it does not, this shows nothing
            changed.set()
            for _ in range(turns):
                await asyncio.sleep(0)


async def test_machines_may_use_the_same_name(wire: RedisClient) -> None:
    """Both are seen and both count, one leaves alone, and one that is started anew does not pass for the old one."""
    fleet = Fleet(wire)
    here, there = (
        Process(role="worker", id="worker-1", life=new_life(), pid=1, host=host, state="ready", since=0.0, slots=4)
        for host in ("a", "b")
    )
    async with present(fleet, lambda: here):
        async with present(fleet, lambda: there):
            await until(fleet, [here, there])
        assert await fleet.processes() == [here]
        again = msgspec.structs.replace(here, life=new_life(), since=1.0)
        async with present(fleet, lambda: again):
            await until(fleet, [here, again])
        assert await fleet.processes() == [here]


async def test_who_was_seen_lately_counts_as_there(wire: RedisClient) -> None:
    """Whoever wants to delete the store asks, of whatever version the processes are."""
    here = Process(role="worker", id="w1", life=new_life(), pid=1, host="h", state="ready", since=0.0)
    assert await live_processes(wire) == []
    await Fleet(wire).report(here)
    assert await live_processes(wire) == [f"worker:{here.life}"]


async def until(fleet: Fleet, expected: list[Process]) -> None:
    async with asyncio.timeout(20):
        while await fleet.processes() != expected:
            await asyncio.sleep(0.01)


async def test_names_of_processes_that_ended_long_ago_are_removed(wire: RedisClient) -> None:
    """Every report removes the entries whose processes ended an hour ago, so that their set does not grow for ever."""
    fleet, now_s = Fleet(wire), await wire.now_ms() / 1000
    here = Process(role="worker", id="w1", life=new_life(), pid=1, host="h", state="ready", since=0.0)
    await wire.redis.zadd(fleet_key("procs"), {"worker:old": now_s - 7200, "worker:recent": now_s - 600})
    await fleet.report(here)
    assert set(await wire.redis.zrange(fleet_key("procs"), 0, -1)) == {b"worker:recent", f"worker:{here.life}".encode()}


class Away(Fleet):
    """A fleet whose store does not answer so many reports, then one, then so many again."""

    def __init__(self, *silences: int) -> None:
        self._answers = [answers for silence in silences for answers in (*[False] * silence, True)]
        self.over = asyncio.Event()

    async def report(self, process: Process) -> None:
        answers = self._answers.pop(0) if self._answers else True
        if not self._answers:
            self.over.set()
        if not answers:
            raise Unavailable("Redis does not answer")

    async def leave(self, process: Process) -> None:
        pass


async def test_each_time_the_store_is_away_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """Not with every report that fails: whoever reads the log of a long failure finds what matters in it."""
    fleet = Away(3, 2)
    with caplog.at_level(logging.WARNING, "streaming.fleet.processes"):
        async with asyncio.timeout(20), present(fleet, Telling()) as changed:
            while not fleet.over.is_set():
                changed.set()
                await asyncio.sleep(0)
    assert len(caplog.records) == 2
