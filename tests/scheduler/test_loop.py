"""The scheduler's rounds on a real server: what it publishes, on whose word, and what a late leader may not do."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import pytest
from flow import put_job, until
from redis import Redis
from worker_report import a_worker

from scheduler.loop import Loop, holder_of, look
from scheduler.policy.demand import Demand, constraints
from scheduler.policy.snapshot import ScalingLimits, Shape
from scheduler.pools.base import DryRunPool, Move, Pool
from streaming.errors import Unavailable
from streaming.fleet.plans import LEADER, Overrides, Plan, Plans, claim_lead
from streaming.fleet.process import Process
from streaming.fleet.processes import Fleet, this_process
from streaming.jobs.codec import Control, Cordon, Hold, decode_control, encode
from streaming.jobs.lease import Lease
from streaming.jobs.queue import Queue
from streaming.jobs.reaper import Reaper, Swept
from streaming.keys import channel, fleet_key
from streaming.order import LaneDepth, Priority, WaitingDeadline
from streaming.redis.client import Call, RedisClient
from telemetry.metrics import Metrics

MODEL = "m"
LIMITS = {MODEL: ScalingLimits(min=0, max=4, cold_start_s=7.0)}
ME, OTHER = this_process("scheduler", "scheduler-1"), this_process("scheduler", "scheduler-2")


class Hand:
    """A scheduler on a clock of ours, and what can be seen of it."""

    def __init__(self, wire: RedisClient) -> None:
        self.wire, self.now = wire, 1_000.0
        self.metrics = Metrics.start("", "scheduler")
        self.plans, self.overrides = Plans(wire), Overrides(wire)
        self.queue, self.fleet = Queue(wire), Fleet(wire)

    def loop(
        self,
        me: Process = ME,
        pool: Pool | None = None,
        reaper: Reaper | None = None,
        limits: Mapping[str, ScalingLimits] = LIMITS,
        **more: object,
    ) -> Loop:
        reaper = reaper or Reaper(self.wire, self.metrics)
        return Loop(self.wire, reaper, limits, pool or Pool(), me, self.metrics, clock=lambda: self.now, **more)  # type: ignore[arg-type]

    async def put(self, jobs: int = 1) -> None:
        for _ in range(jobs):
            await put_job(self.queue, Priority.INTERACTIVE)

    async def worker(self, name: str, state: str = "ready", **more: object) -> Process:
        """A worker that says it is there."""
        worker = a_worker(name, state, 4, model=MODEL, lease=name, **more)
        await self.fleet.report(worker)
        return worker

    async def plan(self) -> Plan:
        return (await self.plans.read())[MODEL]

    async def did(self) -> list[tuple[str, int | None, int | None]]:
        """Actions so far, oldest first."""
        return [(n.action.kind, n.action.was, n.action.want) for n in reversed(await self.plans.actions(99))]


@pytest.fixture
def hand(wire: RedisClient) -> Hand:
    return Hand(wire)


# --- what is published -----------------------------------------------------------------------------------------------


async def test_a_waiting_job_wakes_a_sleeping_model_in_one_tick(hand: Hand) -> None:
    """From nothing published, the first tick after a put publishes one worker, the reason, and what to expect."""
    await hand.put()
    await hand.loop().tick()
    plan, lead = await hand.plan(), await hand.wire.ask(LEADER)
    assert (plan.want, plan.epoch, plan.pool, lead.holder) == (1, lead.epoch, "local", holder_of(ME))
    assert "1 waiting" in plan.reason
    assert (plan.wake_s, plan.cold_start_s) == (7.0, 7.0)
    assert set(plan.lanes) == {"interactive", "standard", "batch"}
    assert await hand.did() == [("lead", None, None), ("up", None, 1)]


async def test_only_changes_are_noted_and_logged(hand: Hand, caplog: pytest.LogCaptureFixture) -> None:
    """Ten equal ticks note and log one action; what the plan is based on is new in each."""
    await hand.put()
    loop = hand.loop()
    with caplog.at_level(logging.INFO, "scheduler.loop"):
        await loop.tick()
        first = await hand.plan()
        for _ in range(10):
            await asyncio.sleep(0.002)
            await loop.tick()
    assert (await hand.plan()).at_ms > first.at_ms
    assert await hand.did() == [("lead", None, None), ("up", None, 1)]
    said = [record for record in caplog.records if "wanted" in record.message]
    assert [(vars(record)["action"], vars(record)["want"]) for record in said] == [("up", 1)]


async def test_a_restarted_scheduler_goes_on_from_the_published_plan(hand: Hand) -> None:
    """A new process finds three workers planned, none of them seen yet, and changes nothing."""
    lead = await hand.wire.ask(claim_lead("before", 60_000))
    assert await hand.plans.publish(lead, [Plan(model=MODEL, want=3, reason="before", epoch=lead.epoch)])
    await hand.wire.ask(claim_lead("before", 0))
    loop = hand.loop()
    for _ in range(3):
        await loop.tick()
        hand.now += 1
    assert (await hand.plan()).want == 3
    assert [kind for kind, _, _ in await hand.did()] == ["lead"]


async def test_a_slow_worker_is_cordoned_and_told(hand: Hand) -> None:
    """Five times its peer's step time, under a minute of looks: it stands in the plan and hears of it."""
    slow, loop = Lease(hand.wire, MODEL), hand.loop()
    controls = slow.controls()
    await anext(controls)  # it listens
    hearing = asyncio.ensure_future(anext(controls))
    await hand.put()
    steps = 0
    while not hearing.done():
        assert hand.now < 1_060.0, "a minute has gone by"
        hand.now, steps = hand.now + 1.0, steps + 10
        await hand.worker("fast", steps=steps, step_s=steps * 0.02, step_tokens=steps, running=1)
        await hand.worker(slow.id, steps=steps, step_s=steps * 0.10, step_tokens=steps, running=1)
        await loop.tick()
        await asyncio.sleep(0.01)
    assert isinstance(hearing.result(), Cordon)
    (cordoned,) = (await hand.plan()).cordon
    assert cordoned.worker == slow.id and "times its peers" in cordoned.reason
    assert [n.action.worker for n in await hand.plans.actions(99) if n.action.kind == "cordon"] == [slow.id]
    await controls.aclose()  # type: ignore[attr-defined]


# --- people ----------------------------------------------------------------------------------------------------------


async def test_overrides_are_obeyed(hand: Hand) -> None:
    """A number set by hand; nothing changed while paused, whatever comes; decided again when that is over."""
    loop = hand.loop()
    await hand.overrides.put(MODEL, 3, "ops")
    await loop.tick()
    plan = await hand.plan()
    assert plan.want == 3 and "by hand" in plan.reason
    await hand.overrides.put(MODEL, None, "ops")
    await hand.put(50)
    await loop.tick()
    plan = await hand.plan()
    assert plan.want == 3 and "paused" in plan.reason
    await hand.overrides.put(MODEL, 1, "ops")
    await loop.tick()
    assert (await hand.plan()).want == 1
    await hand.overrides.end(MODEL, "ops")
    await loop.tick()
    assert "by hand" not in (await hand.plan()).reason


async def test_what_is_held_at_zero_is_not_promised(hand: Hand) -> None:
    """Asleep by itself, a job may expect the wake-up; at zero by hand nobody can say."""
    loop = hand.loop()
    await loop.tick()
    plan = await hand.plan()
    assert plan.want == 0 and plan.lanes["interactive"].wait_s == plan.wake_s == 7.0
    await hand.overrides.put(MODEL, 0, "ops")
    await loop.tick()
    assert (await hand.plan()).lanes["interactive"].wait_s is None


# --- who leads -------------------------------------------------------------------------------------------------------


async def test_the_second_scheduler_stands_by_and_takes_over(hand: Hand, redis_url: str) -> None:
    """Two schedulers: one publishes; when it has fallen silent the other goes on from its plan, under a new epoch."""
    await hand.put()
    first, second = hand.loop(), hand.loop(OTHER)
    await first.tick()
    await second.tick()
    before = await hand.plan()
    assert (await hand.wire.ask(LEADER)).holder == holder_of(ME)
    with Redis.from_url(redis_url) as client:
        assert 0 < client.pttl(fleet_key("leader")) <= 5_000  # type: ignore[operator]
        client.delete(fleet_key("leader"))  # its time is over
    await second.tick()
    after = await hand.plan()
    assert (after.want, after.epoch > before.epoch) == (before.want, True)
    assert (await hand.wire.ask(LEADER)).holder == holder_of(OTHER)
    await first.tick()
    assert (await hand.plan()).epoch == after.epoch, "and the first stands by"


class SlowPool(Pool):
    """Its leader is stopped for a while between deciding and publishing."""

    def __init__(self) -> None:
        self.reached, self.go_on = asyncio.Event(), asyncio.Event()
        self.carried_out = 0

    async def moves(self, plans: Sequence[Plan], workers: Sequence[Process], epoch: int) -> list[Move]:
        self.reached.set()
        await self.go_on.wait()
        return [Move(plan) for plan in plans]

    async def carry_out(self, moves: Sequence[Move], epoch: int) -> None:
        self.carried_out += 1


async def test_what_a_stale_leader_has_decided_is_dropped(hand: Hand, caplog: pytest.LogCaptureFixture) -> None:
    """It wakes up in the middle of its round and another leads: nothing of it is published, nothing is carried out."""
    await hand.put()
    pool = SlowPool()
    stale = asyncio.create_task(hand.loop(pool=pool).tick())
    await pool.reached.wait()
    await hand.wire.ask(claim_lead(holder_of(ME), 0))
    await hand.loop(OTHER).tick()
    did, plan = await hand.did(), await hand.plan()
    pool.go_on.set()
    await stale
    assert (await hand.did(), await hand.plan(), pool.carried_out) == (did, plan, 0)
    assert "what this one decided is dropped" in caplog.text


# --- its life --------------------------------------------------------------------------------------------------------


async def has_workers(hand: Hand) -> bool:
    return (await hand.plan()).want > 0


async def test_a_put_that_finds_nobody_awake_is_answered_at_once(hand: Hand) -> None:
    """Not at the next tick, which is an hour away."""
    stop, reaper, pool = asyncio.Event(), ShakyReaper(down=False), CountingPool()
    running = asyncio.create_task(hand.loop(pool=pool, reaper=reaper, tick_s=3600.0).run(stop))
    await until(lambda: pool.rounds >= 2, 20)
    assert (await hand.plan()).want == 0
    await hand.put()
    assert await until(partial(has_workers, hand), 20)
    assert reaper.asked == 3
    stop.set()
    await running


class CountingPool(Pool):
    """Counts the rounds that have come to their end."""

    rounds = 0

    async def carry_out(self, moves: Sequence[Move], epoch: int) -> None:
        self.rounds += 1


class ShakyReaper(Reaper):
    """Redis is down for whoever asks through it, as long as it is told so."""

    def __init__(self, down: bool = True) -> None:
        self.down, self.asked = down, 0

    def calls(self, ended: str = "") -> list[Call]:
        self.asked += 1
        if self.down:
            raise Unavailable("Redis does not answer: refused")
        return []

    async def take(self, answers: list[Any]) -> Swept:
        return Swept()


async def test_an_outage_is_said_once_and_ends_by_itself(hand: Hand, caplog: pytest.LogCaptureFixture) -> None:
    """Down for many ticks: one warning; back: ready, one line, and scheduling goes on."""
    stop, states, reaper = asyncio.Event(), list[str](), ShakyReaper()
    await hand.put()
    loop = hand.loop(reaper=reaper, tick_s=0.01, on_state=states.append)
    with caplog.at_level(logging.INFO, "scheduler.loop"):
        running = asyncio.create_task(loop.run(stop))
        await until(lambda: reaper.asked > 10, 20)
        assert states == []
        reaper.down = False
        await until(lambda: states == ["ready"], 20)
        while MODEL not in await hand.plans.read():
            await asyncio.sleep(0.005)
        stop.set()
        await running
    assert states == ["ready", "draining"]
    said = [record.message.split(":")[0] for record in caplog.records if "Redis" in record.message]
    assert said.count("Redis is back") == said.count("nothing is scheduled until Redis is back") == len(said) // 2


# --- several shapes --------------------------------------------------------------------------------------------------

SHAPED = {
    MODEL: ScalingLimits(
        0,
        4,
        shapes=(Shape("wide", 6.0), Shape("narrow")),
        pools={"wide": ScalingLimits(0, 1, cold_start_s=7.0), "narrow": ScalingLimits(0, 4, cold_start_s=3.0)},
    )
}


async def test_workers_are_told_which_shape_takes_new_jobs(hand: Hand) -> None:
    """The plan names it, its workers are told to take jobs and the others to leave them, for longer than a tick; one
    that says no shape is told nothing."""
    names = {"w": "wide", "n": "narrow", "x": ""}
    for name, shape in names.items():
        await hand.worker(name, shape=shape)
    loop = hand.loop(limits=SHAPED, tick_s=0.5)
    heard = await _heard(hand, names, loop.tick)
    plan = await hand.plan()
    assert (plan.shape, plan.takes, plan.shapes) == ("wide", ("wide",), {"wide": 1, "narrow": 0})
    assert heard == {"w": [Hold(0)], "n": [Hold(3500)], "x": []}


async def test_a_dry_run_tells_no_worker_anything(hand: Hand, caplog: pytest.LogCaptureFixture) -> None:
    """What would be done is said once of each shape, and the plan is marked as nobody's."""
    await hand.worker("n", shape="narrow")
    await hand.put()
    loop = hand.loop(limits=SHAPED, pool=DryRunPool())
    with caplog.at_level(logging.INFO, "scheduler.pools.base"):
        heard = await _heard(hand, ["n"], loop.tick)
        await loop.tick()
    assert caplog.text.count("would have 1 wide worker and 1 narrow worker, new jobs with narrow") == 1
    assert heard == {"n": []} and (await hand.plan()).pool == "dry-run"


async def test_a_new_leader_goes_on_with_the_shape_of_the_one_before(hand: Hand) -> None:
    """Between the two thresholds it is the plan, not the load, that says which; what was wanted of each stays."""
    await hand.worker("n", shape="narrow")
    await hand.put(5)
    lead, shapes = await hand.wire.ask(claim_lead("before", 60_000)), {"wide": 0, "narrow": 2}
    plan = Plan(model=MODEL, want=2, reason="r", epoch=lead.epoch, shapes=shapes, shape="narrow", takes=("narrow",))
    assert await hand.plans.publish(lead, [plan])
    await hand.wire.ask(claim_lead("before", 0))
    await hand.loop(limits=SHAPED).tick()
    now = await hand.plan()
    assert (now.shape, now.takes, now.shapes) == (plan.shape, plan.takes, plan.shapes)
    assert [kind for kind, _, _ in await hand.did()] == ["lead"]


async def test_changes_and_switches_are_noted_by_shape(hand: Hand) -> None:
    """Nobody is there: the wide shape is woken; nine jobs and its worker, and the narrow one is to take over."""
    await hand.put()
    loop = hand.loop(limits=SHAPED)
    await loop.tick()
    await hand.worker("w", shape="wide")
    await hand.put(9)
    hand.now += 60
    await loop.tick()
    noted = [noted.action for noted in reversed(await hand.plans.actions(99))]
    assert [(each.kind, each.shape, each.was, each.want) for each in noted[:4]] == [
        ("lead", "", None, None),
        ("switch", "wide", None, None),
        ("up", "wide", None, 1),
        ("down", "narrow", None, 0),
    ]
    assert ("up", "narrow") in [(each.kind, each.shape) for each in noted[4:]]
    assert (await hand.plan()).takes == ("wide",), "until a narrow worker is ready"
    assert await hand.plans.cold_starts() == {f"{MODEL}#wide": 60.0}, "each shape's own"
    await loop.leave()
    await hand.loop(OTHER, limits=SHAPED).tick()
    assert (await hand.plan()).cold_start_s == 60.0, "the next leader goes by it"


async def _heard(hand: Hand, leases: Iterable[str], step: Callable[[], Awaitable[object]]) -> dict[str, list[Control]]:
    """What each of these workers is told while a step is made: all that comes before a last word of ours."""
    last, told = Hold(1), dict[str, list[Control]]()
    async with AsyncExitStack() as stack:
        listening = {
            lease: await stack.enter_async_context(hand.wire.subscribe(channel("worker", lease))) for lease in leases
        }
        await step()
        for lease, subscription in listening.items():
            await hand.wire.redis.publish(channel("worker", lease), encode(last))
            told[lease] = []
            while (control := decode_control(await subscription.message())) != last:
                told[lease].append(control)
    return told


# --- what the store tells ---------------------------------------------------------------------------------------------


def test_a_deadline_belongs_to_the_jobs_own_lane_and_model() -> None:
    """With the jobs before it: half of a lane, for a job half as old as the oldest."""
    lanes = [
        LaneDepth("m", Priority.INTERACTIVE, 4, 1, 10_000),
        LaneDepth("m", Priority.STANDARD, 40, 2, 60_000),
        LaneDepth("other", Priority.STANDARD, 8, 0, 60_000),
    ]
    due = [
        WaitingDeadline("m", Priority.STANDARD, 20_000, 30_000),
        WaitingDeadline("m", Priority.INTERACTIVE, 5_000, 10_000),
        WaitingDeadline("other", Priority.STANDARD, 1_000, 0),
    ]
    seen = look("m", lanes, (), due)
    assert (seen.lanes, seen.due) == (tuple(lanes[:2]), tuple(due[:2]))
    found = [each for each in constraints(seen, Demand(), ScalingLimits()) if "for a deadline" in each.why]
    assert [(each.lane, each.jobs, each.within_s) for each in found] == [
        ("interactive", 1, 5.0),
        ("standard", 25, 20.0),
    ]
