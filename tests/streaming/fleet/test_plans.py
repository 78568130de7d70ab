"""Who leads, what is published under which epoch, what pools may do, and what people decide over their heads."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import msgspec
import pytest
from flow import a_job, until
from redis import Redis
from worker_report import a_worker

from streaming.fleet.plans import (
    LEADER,
    Action,
    Lead,
    Override,
    Overrides,
    Plan,
    Plans,
    claim_lead,
    stall_of,
)
from streaming.fleet.process import Cordoned, Process, Prospect
from streaming.fleet.processes import Fleet, present
from streaming.fleet.settings import ModelSettings
from streaming.ids import new_life
from streaming.jobs.codec import Cordon
from streaming.jobs.lease import Lease
from streaming.jobs.queue import Queue
from streaming.jobs.reaper import Reaper
from streaming.keys import channel, fleet_key, partition_key
from streaming.redis.client import RedisClient
from streaming.store.identity import enter_store, live_processes

MODEL = "m"
LONG_MS = 60_000


def a_plan(lead: Lead, want: int = 1) -> Plan:
    return Plan(model=MODEL, want=want, reason="because", epoch=lead.epoch)


def an_action(kind: str = "up", **more: object) -> Action:
    return Action(model=MODEL, kind=kind, reason="because", by="s", **more)  # type: ignore[arg-type]


LAST_WORD = b"that was all"


class Ears:
    """Counts what is messages on a channel, and that it is listened to."""

    def __init__(self, wire: RedisClient, kind: str, name: str) -> None:
        self.heard = 0
        self._wire, self._channel = wire, channel(kind, name)
        self._task = asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        async with self._wire.subscribe(self._channel) as subscription:
            self.heard = 1
            while await subscription.message() != LAST_WORD:
                self.heard += 1

    async def until(self, heard: int) -> None:
        await until(lambda: self.heard >= heard, 20)

    async def all(self) -> int:
        """How many there were: messages keep their order, and behind all of them comes a last word of our own."""
        await self._wire.redis.publish(self._channel, LAST_WORD)
        async with asyncio.timeout(20):
            await self._task
        return self.heard

    def close(self) -> None:
        self._task.cancel()


# --- the lead --------------------------------------------------------------------------------------------------------


async def test_one_leads_and_keeps_leading(wire: RedisClient) -> None:
    """The second is messages who leads; renewing changes no epoch; leaving lets the next in, under a greater one."""
    assert (await wire.ask(LEADER)).holder == ""
    first = await wire.ask(claim_lead("a", LONG_MS))
    assert first.holder == "a"
    assert await wire.ask(claim_lead("b", LONG_MS)) == first == await wire.ask(claim_lead("a", LONG_MS))
    await wire.ask(claim_lead("b", 0))
    assert await wire.ask(LEADER) == first, "only the leader can leave"
    await wire.ask(claim_lead("a", 0))
    assert (await wire.ask(LEADER)).holder == ""
    second = await wire.ask(claim_lead("b", LONG_MS))
    assert second.holder == "b" and second.epoch > first.epoch


async def test_a_lapsed_lead_is_another_epoch_even_for_the_same_holder(wire: RedisClient) -> None:
    """Whoever was silent for too long begins anew: what it decided before is stale."""
    first = await wire.ask(claim_lead("a", 1))
    await asyncio.sleep(0.02)
    assert (await wire.ask(claim_lead("a", LONG_MS))).epoch > first.epoch


async def test_epochs_grow_over_a_loss_of_data(wire: RedisClient, redis_url: str) -> None:
    """A store that forgot everything must not make an old epoch current again."""
    plans = Plans(wire)
    first = await wire.ask(claim_lead("a", LONG_MS))
    with Redis.from_url(redis_url) as client:
        client.flushall()
    while await wire.now_ms() < 1000 * (first.epoch + 1):  # epochs are at least the seconds of Redis time
        await asyncio.sleep(0.01)
    second = await wire.ask(claim_lead("b", LONG_MS))
    assert second.epoch > first.epoch
    assert not await plans.publish(first, [a_plan(first)])


# --- plans -----------------------------------------------------------------------------------------------------------


async def test_a_plan_is_taken_from_the_leader_only(wire: RedisClient) -> None:
    """Another holder, an older epoch, a lead given up: each is refused whole, and pools hear nothing."""
    plans = Plans(wire)
    old = await wire.ask(claim_lead("a", LONG_MS))
    await wire.ask(claim_lead("a", 0))
    lead = await wire.ask(claim_lead("b", LONG_MS))
    ears = Ears(wire, "pools", "plan")
    await ears.until(1)
    for stale in (old, Lead("b", old.epoch), Lead("a", lead.epoch)):
        assert not await plans.publish(stale, [a_plan(stale, 9)], [an_action()], {MODEL: 1.0})
    assert (await plans.read(), await plans.actions(10), await plans.cold_starts()) == ({}, [], {})
    plan = Plan(
        model=MODEL, want=2, reason="40 waiting", epoch=lead.epoch, at_ms=7, cordon=(Cordoned("lease", "slow"),),
        lanes={"batch": Prospect(None), "interactive": Prospect(1.5, 0.1)}, wake_s=3.0, cold_start_s=4.0,
    )  # fmt: skip
    assert await plans.publish(lead, [plan], [an_action(want=2, was=1)], {MODEL: 4.25})
    assert await plans.read() == {MODEL: plan}
    assert await plans.cold_starts() == {MODEL: 4.25}
    (noted,) = await plans.actions(10)
    assert (noted.action, noted.epoch) == (an_action(want=2, was=1), lead.epoch)
    assert abs(noted.at_ms - await wire.now_ms()) < LONG_MS
    await ears.until(2)
    assert await plans.publish(lead, [plan])
    assert await plans.publish(lead, [plan], [an_action()])
    assert await ears.all() == 3, "a plan that says the same wakes nobody"


async def test_a_pool_acts_only_under_the_current_epoch(wire: RedisClient) -> None:
    """From the moment another leads, what an older plan asked for is refused; so it is while nobody has led yet."""
    plans = Plans(wire)
    assert not await plans.act(0, an_action("start"))
    old = await wire.ask(claim_lead("a", LONG_MS))
    assert await plans.act(old.epoch, an_action("start", worker="worker-1"))
    await wire.ask(claim_lead("a", 0))
    assert await plans.act(old.epoch, an_action("start")), "while nobody leads, the last plan stands"
    lead = await wire.ask(claim_lead("b", LONG_MS))
    assert not await plans.act(old.epoch, an_action("drain"))
    assert await plans.act(lead.epoch, an_action("drain"))
    found = [(noted.action.kind, noted.epoch) for noted in await plans.actions(10)]
    assert found == [("drain", lead.epoch), ("start", old.epoch), ("start", old.epoch)]
    assert len(await plans.actions(1)) == 1


async def test_a_cordoned_worker_is_messages(wire: RedisClient) -> None:
    """The message reaches it by its lease, with the reason, every time the plan is published."""
    lead, plans = await wire.ask(claim_lead("a", LONG_MS)), Plans(wire)
    lease = Lease(wire, MODEL)
    controls = lease.controls()
    await anext(controls)  # it listens
    hearing = asyncio.ensure_future(anext(controls))
    plan = Plan(model=MODEL, want=1, reason="r", epoch=lead.epoch, cordon=(Cordoned(lease.id, "its steps take long"),))
    async with asyncio.timeout(20):
        assert await plans.publish(lead, [plan])
        assert await hearing == Cordon("its steps take long")
    await controls.aclose()  # type: ignore[attr-defined]


# --- waking ----------------------------------------------------------------------------------------------------------


async def test_a_put_nobody_is_there_for_wakes_the_scheduler(wire: RedisClient) -> None:
    """The first job of an empty lane does, and only while no live worker reads it; one that is handed back does too."""
    queue, lease = Queue(wire), Lease(wire, MODEL)
    ears = Ears(wire, "scheduler", "wake")
    await ears.until(1)
    await queue.put(a_job(queue))
    await ears.until(2)
    await queue.put(a_job(queue))
    await lease.register()
    _, second = (await lease.claim(0, 2)).jobs
    await queue.put(a_job(queue))  # somebody reads the lane
    await lease.release(second.job.id, second.run_number)  # type: ignore[union-attr]
    await ears.until(3)
    assert len((await lease.claim(0, 8)).jobs) == 2  # and is noted as idle
    await queue.put(a_job(queue))
    assert await ears.all() == 3


async def test_a_job_for_later_wakes_the_scheduler_when_its_time_comes(wire: RedisClient) -> None:
    queue, ears = Queue(wire), Ears(wire, "scheduler", "wake")
    await ears.until(1)
    job = a_job(queue, delay_ms=3_600_000)
    await queue.put(job)
    await wire.redis.publish(channel("scheduler", "wake"), "a mark")
    await ears.until(2)
    await wire.redis.zadd(partition_key(0, "scheduled"), {job.id: 1}, xx=True)
    await Reaper(wire).sweep()
    assert await ears.all() == 3


# --- people ----------------------------------------------------------------------------------------------------------


async def are_over(overrides: Overrides) -> bool:
    return not await overrides.of([MODEL, "other"])


async def test_overrides_hold_until_ended_or_over(wire: RedisClient) -> None:
    """By Redis time; each wakes the scheduler and stands among the actions with whoever made it."""
    overrides, plans = Overrides(wire), Plans(wire)
    ears = Ears(wire, "scheduler", "wake")
    await ears.until(1)
    fixed = await overrides.put(MODEL, 3, "ops")
    paused = await overrides.put("other", None, "ops", LONG_MS)
    assert await overrides.of([MODEL, "other", "third"]) == {MODEL: fixed, "other": paused}
    assert not fixed.paused and fixed.until_ms is None
    assert paused.paused and paused.until_ms == paused.at_ms + LONG_MS
    assert await overrides.end(MODEL, "eve") and not await overrides.end(MODEL, "eve")
    await overrides.put("other", 1, "ops", 1)
    await ears.until(5)
    assert await until(partial(are_over, overrides), 20)
    found = [(n.action.kind, n.action.by, n.action.want) for n in reversed(await plans.actions(9))]
    assert found == [("set", "ops", 3), ("pause", "ops", None), ("resume", "eve", None), ("set", "ops", 1)]
    ears.close()


# --- Stalls: the states in which no worker may ever run a model's jobs, and those that only take a while ---

ELASTIC = ModelSettings(engine="sim", min_workers=0, max_workers=2)
ZERO = Override(want=0, by="ops")
PAUSED = Override(by="ops")
NOBODY = Lead("", 1)


def worker(state: str, model: str = "m") -> Process:
    return a_worker("w", state, model=model, lease="x")


def plan(**more: Any) -> Plan:
    return Plan(**{"model": "m", "want": 0, "reason": "", **more})


@pytest.mark.parametrize(
    ("known", "stalled"),
    [
        ({}, False),
        ({"lead": NOBODY}, True),
        ({"lead": NOBODY, "workers": [worker("ready")]}, False),
        ({"lead": NOBODY, "workers": [worker("starting")]}, False),
        ({"lead": NOBODY, "workers": [worker("ready", "another")]}, True),
        ({"lead": NOBODY, "workers": [worker("draining")]}, True),
        ({"workers": [worker("drained")]}, False),
        ({"lead": NOBODY, "workers": [worker("ready")], "plan": plan(cordon=(Cordoned("x", "slow"),))}, True),
        ({"override": ZERO}, True),
        ({"override": ZERO, "workers": [worker("ready")]}, False),
        ({"override": ZERO, "settings": ModelSettings(engine="sim")}, False),
        ({"override": PAUSED, "plan": plan()}, True),
        ({"override": PAUSED, "plan": plan(want=1)}, False),
        ({"override": Override(want=2, by="ops")}, False),
        ({"plan": plan(want=1, pool="dry-run")}, True),
        ({"settings": ModelSettings(engine="sim", min_workers=0, max_workers=0)}, True),
    ],
)
def test_what_stalls_a_model(known: dict[str, Any], stalled: bool) -> None:
    about = {"settings": ELASTIC, "workers": [], "plan": plan(), "override": None, "lead": Lead("s", 1)} | known
    found = stall_of("m", **about)
    assert (found is not None) == stalled
    assert found is None or (found.cause and found.fix)


# --- A process seen in the fleet, from its first word to its last ---


class Telling:
    """Describes a worker, another state each time it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self) -> Process:
        self.asked += 1
        return a_worker("w1", f"state-{self.asked}")


async def reach(fleet: Fleet, *expected: str | Process) -> None:
    """Wait until these processes, or processes in these states, are in the fleet and no others."""

    async def there() -> bool:
        found = await fleet.processes()
        return list(expected) in (found, [process.state for process in found])

    await until(there, 20)


async def test_it_is_seen_at_once_when_something_changed_and_gone_at_the_end(
    wire: RedisClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streaming.fleet.processes.HEARTBEAT_INTERVAL_S", 3600.0)
    fleet, telling = Fleet(wire), Telling()
    async with present(fleet, telling) as changed:
        await reach(fleet, "state-2")  # the first is asked for its name alone
        changed.set()
        await reach(fleet, "state-3")
    assert await fleet.processes() == []


async def test_nothing_is_written_before_the_store_was_entered(wire: RedisClient) -> None:
    """As where Redis did not answer at the start: others would take a new store for that of an earlier version."""
    fleet, entered = Fleet(wire), asyncio.Event()
    async with present(fleet, Telling(), entered) as changed:
        changed.set()
        for _ in range(5):
            await wire.ping()  # over the same connection: behind whatever was sent
        assert await wire.redis.keys("*") == []
        assert (await enter_store(wire)).deployment
        entered.set()
        await until(fleet.processes, 20)


@pytest.mark.parametrize("turns", range(6))
async def test_it_ends_although_it_was_told_something_just_before(wire: RedisClient, turns: int) -> None:
    """However many turns of the event loop lie between: the cancellation may come as the wait for news ends."""
    telling = Telling()
    async with asyncio.timeout(20):
        async with present(Fleet(wire), telling) as changed:
            await until(lambda: telling.asked >= 2, 20)
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
            await reach(fleet, here, there)
        assert await fleet.processes() == [here]
        again = msgspec.structs.replace(here, life=new_life(), since=1.0)
        async with present(fleet, lambda: again):
            await reach(fleet, here, again)
        assert await fleet.processes() == [here]


async def test_who_was_seen_lately_counts_as_there(wire: RedisClient) -> None:
    """Whoever wants to delete the store asks, of whatever version the processes are."""
    here = a_worker("w1")
    assert await live_processes(wire) == []
    await Fleet(wire).report(here)
    assert await live_processes(wire) == [f"worker:{here.life}"]


async def test_names_of_processes_that_ended_long_ago_are_removed(wire: RedisClient) -> None:
    """Every report removes the entries whose processes ended an hour ago, so that their set does not grow for ever."""
    fleet, now_s = Fleet(wire), await wire.now_ms() / 1000
    here = a_worker("w1")
    await wire.redis.zadd(fleet_key("procs"), {"worker:old": now_s - 7200, "worker:recent": now_s - 600})
    await fleet.report(here)
    assert set(await wire.redis.zrange(fleet_key("procs"), 0, -1)) == {b"worker:recent", f"worker:{here.life}".encode()}
