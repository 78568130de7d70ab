"""Who leads, what is published under which epoch, what pools may do, and what people decide over their heads."""

from __future__ import annotations

import asyncio

import pytest
from flow import a_job, a_lease, lapse
from redis import Redis

from streaming.errors import Unavailable
from streaming.fleet.plans import Action, Lead, Leadership, Overrides, Plan, Plans, Prospect, claim_lead
from streaming.fleet.process import Cordoned
from streaming.jobs.codec import Cordon
from streaming.jobs.lease import Lease
from streaming.jobs.queue import Queue
from streaming.keys import channel
from streaming.redis.client import RedisClient
from streaming.redis.news import messages
from streaming.redis.settings import RedisSettings

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
        async with asyncio.timeout(20):
            while self.heard < heard:
                await asyncio.sleep(0.005)

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
    leadership = Leadership(wire)
    assert (await leadership.current()).holder == ""
    first = await wire.ask(claim_lead("a", LONG_MS))
    assert first.holder == "a"
    assert await wire.ask(claim_lead("b", LONG_MS)) == first == await wire.ask(claim_lead("a", LONG_MS))
    await leadership.leave("b")
    assert await leadership.current() == first, "only the leader can leave"
    await leadership.leave("a")
    assert (await leadership.current()).holder == ""
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
    leadership, plans = Leadership(wire), Plans(wire)
    old = await wire.ask(claim_lead("a", LONG_MS))
    await leadership.leave("a")
    lead = await wire.ask(claim_lead("b", LONG_MS))
    ears = Ears(wire, "pools", "plan")
    await ears.until(1)
    for stale in (old, Lead("b", old.epoch), Lead("a", lead.epoch)):
        assert not await plans.publish(stale, [a_plan(stale, 9)], [an_action()], {MODEL: 1.0})
    assert (await plans.read(), await plans.actions(10), await plans.cold_starts()) == ({}, [], {})
    plan = Plan(
        model=MODEL,
        want=2,
        reason="40 waiting",
        epoch=lead.epoch,
        at_ms=7,
        cordon=(Cordoned("lease", "slow"),),
        lanes={"batch": Prospect(None), "interactive": Prospect(1.5, 0.1)},
        wake_s=3.0,
        cold_start_s=4.0,
    )
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
    leadership, plans = Leadership(wire), Plans(wire)
    assert not await plans.act(0, an_action("start"))
    old = await wire.ask(claim_lead("a", LONG_MS))
    assert await plans.act(old.epoch, an_action("start", worker="worker-1"))
    await leadership.leave("a")
    assert await plans.act(old.epoch, an_action("start")), "while nobody leads, the last plan stands"
    lead = await wire.ask(claim_lead("b", LONG_MS))
    assert not await plans.act(old.epoch, an_action("drain"))
    assert await plans.act(lead.epoch, an_action("drain"))
    assert [(noted.action.kind, noted.epoch) for noted in await plans.actions(10)] == [
        ("drain", lead.epoch),
        ("start", old.epoch),
        ("start", old.epoch),
    ]
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
    await lease.release(second.job.id, second.number)  # type: ignore[union-attr]
    await ears.until(3)
    assert len((await lease.claim(0, 8)).jobs) == 2  # and is noted as idle
    await queue.put(a_job(queue))
    assert await ears.all() == 3


async def test_jobs_that_were_put_back_are_no_sign_of_a_worker(wire: RedisClient) -> None:
    """Their worker was lost, and nobody else is there: the next put wakes the scheduler as the first one did."""
    queue, lost = Queue(wire), await a_lease(wire)
    await queue.put(a_job(queue))
    assert len((await lost.claim(0, 1)).jobs) == 1
    await lapse(wire, lost)
    ears = Ears(wire, "scheduler", "wake")
    await ears.until(1)
    await queue.put(a_job(queue))
    await ears.until(2)
    ears.close()


async def test_a_wire_that_was_cut_is_listened_to_again(redis_url: str) -> None:
    """Whoever listens gets an error, and at the next try a first sign at once: something may have been missed."""
    wire = RedisClient.open(RedisSettings(url=redis_url))
    heard = messages(wire, "pools", "plan")
    await anext(heard)
    await wire.redis.publish(channel("pools", "plan"), b"")
    await anext(heard)
    with Redis.from_url(redis_url) as client:
        client.client_kill_filter(_type="pubsub")
    with pytest.raises(Unavailable, match="was lost"):
        await anext(heard)
    await anext(messages(wire, "pools", "plan"))
    await wire.close()


# --- people ----------------------------------------------------------------------------------------------------------


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
    async with asyncio.timeout(20):
        while await overrides.of([MODEL, "other"]):
            await asyncio.sleep(0.005)
    assert [(n.action.kind, n.action.by, n.action.want) for n in reversed(await plans.actions(9))] == [
        ("set", "ops", 3),
        ("pause", "ops", None),
        ("resume", "eve", None),
        ("set", "ops", 1),
    ]
    ears.close()
