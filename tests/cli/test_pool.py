"""Pools of workers: how many there are, which ones go, on whose word, what each may use; when a lease is given up."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from flow import until
from msgspec import structs

from cli.instance import ProcessEntry
from cli.supervisor import Child, LeaseRelease, PoolSupervisor, Program, Supervisor, allowed, follow
from streaming.errors import Unavailable
from streaming.fleet.plans import Action, Lead, Plan, Plans, PoolKind, claim_lead
from streaming.fleet.processes import Fleet, this_process
from streaming.fleet.settings import ModelSettings, Resources
from streaming.jobs.reaper import Lapse, Reaper, Swept
from streaming.keys import fleet_key
from streaming.redis.client import RedisClient
from streaming.redis.settings import RedisSettings

SLEEPS = "import time; time.sleep(600)"
DRAINS = (
    "import signal, time\n"
    "from penstock.process import Lifeline\n"
    "line = Lifeline.from_environ()\n"
    "signal.signal(signal.SIGUSR1, lambda *_: line.say('draining', 'slow'))\n"
    "line.say('ready', '')\n"
    "time.sleep(600)\n"
)
WAIT_S = 30.0
LONG_MS = 60_000


def settings(least: int, most: int, **resources: int) -> ModelSettings:
    return ModelSettings(engine="sim", min_workers=least, max_workers=most, resources=Resources(**resources))


class Basin:
    """A supervisor with two pools of workers that only sleep, and the one who leads."""

    def __init__(self, folder: Path, wire: RedisClient) -> None:
        self.folder = folder
        self.supervisor = Supervisor(lambda child: None)
        self.wire, self.plans = wire, Plans(wire)
        self.a, self.b = self.pool("a", settings(1, 3)), self.pool("b", settings(0, 2))

    def pool(self, model: str, settings: ModelSettings, code: str = SLEEPS) -> PoolSupervisor:
        return PoolSupervisor(self.supervisor, model, settings, lambda worker_id: self.program(worker_id, model, code))

    def program(self, worker_id: str, model: str, code: str) -> Program:
        log = self.folder / f"{worker_id}.log"
        argv = (sys.executable, "-c", code)
        return Program(role="worker", id=worker_id, argv=argv, log=log, env=dict(os.environ), model=model, grace_s=5)

    async def lead(self, holder: str = "s") -> Lead:
        return await self.wire.ask(claim_lead(holder, LONG_MS))

    async def plan(self, model: str, want: int, **more: object) -> Plan:
        """Published by whoever leads."""
        lead = await self.lead()
        plan = Plan(model=model, want=want, reason="because", epoch=lead.epoch, **more)  # type: ignore[arg-type]
        assert await self.plans.publish(lead, [plan])
        return plan

    async def size(self, pool: PoolSupervisor, want: int) -> None:
        await pool.follow(await self.plan(pool.model, want), self.plans, "up@here")

    @property
    def ids(self) -> list[str]:
        return list(self.supervisor.children)

    async def until_ids(self, *ids: str) -> None:
        async with asyncio.timeout(WAIT_S):
            await self.supervisor.until(lambda: sorted(self.ids) == sorted(ids))

    async def did(self) -> list[tuple[str, str]]:
        """What was noted, oldest first."""
        return [(noted.action.kind, noted.action.worker) for noted in reversed(await self.plans.actions(99))]


@pytest.fixture
async def basin(tmp_path: Path, wire: RedisClient) -> AsyncIterator[Basin]:
    basin = Basin(tmp_path, wire)
    yield basin
    basin.supervisor.kill("worker")
    await basin.supervisor.stop("worker")


async def test_size_stays_between_the_bounds(basin: Basin) -> None:
    """Whatever is wanted, never fewer than the least nor more than the most."""
    basin.a.fill()
    await basin.size(basin.a, 0)
    assert len(basin.a.members) == 1
    await basin.size(basin.a, 9)
    assert len(basin.a.members) == 3
    await basin.size(basin.b, 0)
    assert basin.b.members == []


async def test_newest_go_first_and_are_not_replaced(basin: Basin) -> None:
    """Shrinking drains the newest; they count no longer and end for good; each step is noted with its worker."""
    await basin.size(basin.a, 3)
    await basin.size(basin.a, 1)
    assert [child.program.id for child in basin.a.members] == ["worker-1"]
    await basin.until_ids("worker-1")
    assert await basin.did() == [
        *(("start", f"worker-{number}") for number in (1, 2, 3)),
        *(("drain", f"worker-{number}") for number in (3, 2)),
    ]


async def test_a_stale_plan_is_not_followed(basin: Basin) -> None:
    """Once another leads, what the former one asked for is refused, up and down, until the new one has said its own."""
    await basin.size(basin.a, 2)
    old = [await basin.plan("a", want) for want in (3, 1)]
    await basin.wire.ask(claim_lead("s", 0))
    lead = await basin.lead("next")
    for plan in old:
        await basin.a.follow(plan, basin.plans, "up@here")
    assert len(basin.a.members) == 2
    await basin.a.follow(Plan(model="a", want=3, reason="r", epoch=lead.epoch), basin.plans, "up@here")
    assert len(basin.a.members) == 3


async def test_plan_is_followed_at_once(basin: Basin, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change is heard, not waited for; a model without a plan, or whose pool is elsewhere, is left alone."""
    monkeypatch.setattr("cli.supervisor.PLAN_INTERVAL_S", 3600.0)
    following = asyncio.create_task(follow([basin.a, basin.b], basin.plans, "up@here", print))
    lead = await basin.lead()

    async def publish(model: str, want: int, pool: PoolKind = "local") -> None:
        plan = Plan(model=model, want=want, reason="r", epoch=lead.epoch, pool=pool)
        action = Action(model=model, kind="up", reason="r", by="s", want=want)
        assert await basin.plans.publish(lead, [plan], [action])

    await publish("a", 2, "kubernetes")
    await publish("b", 2)
    await basin.until_ids("worker-1", "worker-2")
    await publish("b", 1)
    await basin.until_ids("worker-1")
    assert basin.a.members == []
    following.cancel()


async def test_a_worker_that_drains_by_itself_is_replaced(basin: Basin) -> None:
    """It was cordoned: another is started while it finishes, and it is not restarted when it has ended."""
    pool = basin.pool("c", settings(1, 1), DRAINS)
    await basin.size(pool, 1)
    (child,) = pool.members
    async with asyncio.timeout(WAIT_S):
        await basin.supervisor.until(lambda: child.status.state == "ready")
        os.kill(child.status.pid, signal.SIGUSR1)
        await basin.supervisor.until(lambda: child.status.state == "draining")
    await basin.size(pool, 1)
    (heir,) = pool.members
    assert heir is not child  # it may have the name of the first one, if that has ended already
    await basin.until_ids(heir.program.id)
    assert await basin.did() == [("start", "worker-1"), ("start", heir.program.id)]


async def test_workers_are_bounded(basin: Basin) -> None:
    """Processors, memory and urgency are those of the settings; the second worker gets the least used processor."""
    show = (
        "import os, resource; print(os.sched_getaffinity(0), resource.getrlimit(resource.RLIMIT_DATA)[0], os.nice(0),"
        " flush=True)"
    )
    code = f"import time; time.sleep(0.5); {show}; time.sleep(600)"
    pool = basin.pool("c", settings(2, 2, cpus=1, memory_mib=512, nice=3), code)
    pool.fill()
    first, second, *_ = (*sorted(allowed()), 0)
    expected = [f"{{{cpu}}} {512 * 1024 * 1024} 3\n" for cpu in (first, second if len(allowed()) > 1 else first)]
    logs = [basin.folder / f"worker-{number}.log" for number in (1, 2)]
    await until(lambda: [log.read_text() if log.exists() else "" for log in logs] == expected)


async def test_redis_down_changes_nothing(
    basin: Basin, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the plan cannot be read the pools stay, and the log says why."""
    monkeypatch.setattr("cli.supervisor.PLAN_INTERVAL_S", 0.0)
    await basin.size(basin.a, 2)
    wire, told = RedisClient.open(RedisSettings(url="redis://127.0.0.1:1/0")), list[str]()
    following = asyncio.create_task(follow([basin.a], Plans(wire), "up@here", told.append))
    await until(lambda: "cannot be followed" in caplog.text)
    following.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await following
    assert len(basin.a.members) == 2 and told[0]
    await wire.close()


async def test_each_shape_has_its_own_size(basin: Basin) -> None:
    """One plan for both pools of a model; a plan from before there were shapes changes neither."""

    def shaped(shape: str, most: int) -> PoolSupervisor:
        def program(worker_id: str) -> Program:
            return replace(basin.program(worker_id, "d", SLEEPS), shape=shape)

        return PoolSupervisor(basin.supervisor, "d", settings(0, most), program, shape)

    wide, narrow = shaped("wide", 1), shaped("narrow", 3)
    for shapes in ({}, {"wide": 1, "narrow": 2}, {"wide": 0, "narrow": 3}):
        plan = await basin.plan("d", 2, shapes=shapes)
        for pool in (wide, narrow):
            await pool.follow(plan, basin.plans, "up@here")
    assert (len(wide.members), len(narrow.members)) == (0, 3)
    noted = [noted.action for noted in reversed(await basin.plans.actions(99))]
    assert [(action.kind, action.shape) for action in noted] == [
        ("start", "wide"),
        *[("start", "narrow")] * 2,
        ("drain", "wide"),
        ("start", "narrow"),
    ]


async def test_two_machines_share_what_is_wanted(basin: Basin, tmp_path: Path, wire: RedisClient) -> None:
    """Both follow one plan: together they have what is wanted, none moves, a dead one is replaced."""
    other = Basin(tmp_path, wire)
    try:
        one, two = basin.pool("m", settings(1, 8)), other.pool("m", settings(1, 8))
        one.fill()
        two.fill()

        async def follow(want: int, *pools: PoolSupervisor, rounds: int = 3) -> list[int]:
            plan = await basin.plan("m", want)
            for _ in range(rounds):
                await asyncio.gather(*(pool.follow(plan, basin.plans, f"up@{pool is two}") for pool in pools))
            return [len(one.members), len(two.members)]

        assert sum(await follow(1, one, two)) == 1
        assert await follow(4, one, two) == [2, 2]
        assert sum(await follow(3, one, two)) == 3
        before = await follow(5, one, two)
        assert sorted(before) == [2, 3]
        assert await follow(5, one, two) == before
        await wire.redis.hset(fleet_key("shares", "m"), "up@True", f"{before[1]}:1")  # it has not asked for long
        assert await follow(5, one) == [5, before[1]]
        assert await follow(5, one, two, rounds=6) == [3, 2]
    finally:
        other.supervisor.kill("worker")
        await other.supervisor.stop("worker")


# --- when a lease is given up ----------------------------------------------------------------------------------------


class Ends(Reaper):
    """Notes the leases that it is to end; Redis is away where `away` is set."""

    def __init__(self, wire: RedisClient, *, away: bool = False) -> None:
        super().__init__(wire)
        self.away, self.ended = away, list[str]()

    async def sweep(self, *, ended: str = "") -> Swept:
        self.ended.append(ended)
        if self.away:
            raise Unavailable("Redis does not answer")
        mine, other = (
            Lapse(f"worker-1@{socket.gethostname()}", ["job_1"], {"job_2": "poison"}, []),
            Lapse("worker-1@elsewhere", ["job_3"], {}, []),
        )
        return Swept(lapsed_workers=2, lapses=(mine, other))


def a_worker(name: str = "worker-1") -> Child:
    return Child(Program(role="worker", id=name, argv=(), log=Path("log"), env={}), lambda _: None)


def entry(state: str, detail: str = "", pid: int | None = None, cause: str = "") -> ProcessEntry:
    return ProcessEntry(role="worker", id="worker-1", pid=pid, state=state, since=1.0, detail=detail, cause=cause)


def goes_through(release: LeaseRelease, child: Child, *states: ProcessEntry) -> None:
    for each in states:
        child.status = each
        release.noticed(child)


READY = entry("ready", "lease-1", 7)
DRAINING = entry("draining", "1 jobs", 7)


@pytest.mark.parametrize("before", [(READY,), (READY, DRAINING), (READY, entry("failed", "engine dead", 7))])
@pytest.mark.parametrize("after", [entry("restarting", "killed by SIGKILL"), entry("stopped")])
async def test_an_exit_ends_the_lease_once(
    wire: RedisClient, before: tuple[ProcessEntry, ...], after: ProcessEntry
) -> None:
    """Whatever the process said last; nothing is ended while it lives, or by the start of its successor."""
    reaper = Ends(wire)
    release, child = LeaseRelease(reaper, Fleet(wire)), a_worker()
    goes_through(release, child, entry("starting"), entry("starting", "weights", 7), *before)
    await asyncio.sleep(0)
    assert reaper.ended == []
    goes_through(release, child, after, entry("starting"), entry("starting", pid=8))
    await release.close(60)
    assert reaper.ended == ["lease-1"]


async def test_an_exited_worker_is_listed_no_longer(wire: RedisClient) -> None:
    """Its slots and its tokens would count until its last report expires. Its successor stays."""
    fleet = Fleet(wire)
    for lease in ("lease-1", "lease-2"):
        found = structs.replace(this_process("worker", "worker-1"), lease=lease, running=3, tokens_per_s=90.0)
        await fleet.report(found)
    release = LeaseRelease(Ends(wire), fleet)
    goes_through(release, a_worker(), READY, entry("restarting", "killed by SIGKILL"))
    await release.close(60)
    assert [each.lease for each in await fleet.processes("worker")] == ["lease-2"]


async def test_the_log_of_a_job_has_the_last_words_of_its_worker(
    wire: RedisClient, caplog: pytest.LogCaptureFixture
) -> None:
    """One line has them both: `penstock logs --job` shows the lines that name the job."""
    release = LeaseRelease(Ends(wire), Fleet(wire))
    with caplog.at_level(logging.INFO):
        goes_through(release, a_worker(), READY, entry("restarting", cause="killed by SIGABRT: no memory"))
        await release.close(60)
    (record,) = [each for each in caplog.records if "has exited" in each.message]
    assert "worker-1 has exited (killed by SIGABRT: no memory): lease lease-1 ends" in record.message
    assert vars(record)["jobs"] == ["job_1", "job_2"]


async def test_each_worker_has_its_own_lease(wire: RedisClient) -> None:
    """The second life's exit ends the second lease; the neighbour keeps its own."""
    reaper = Ends(wire)
    release, child, other = LeaseRelease(reaper, Fleet(wire)), a_worker(), a_worker("worker-2")
    goes_through(release, other, entry("ready", "theirs", 9))
    goes_through(release, child, READY, entry("restarting"), entry("ready", "lease-2", 8), entry("restarting"))
    await release.close(60)
    assert reaper.ended == ["lease-1", "lease-2"]


async def test_a_redis_that_hangs_does_not_hold_up_the_end(wire: RedisClient) -> None:
    """What has not ended by then is dropped."""

    class Hangs(Ends):
        async def sweep(self, *, ended: str = "") -> Swept:
            return await asyncio.get_running_loop().create_future()

    release = LeaseRelease(Hangs(wire), Fleet(wire))
    goes_through(release, a_worker(), READY, entry("stopped"))
    async with asyncio.timeout(60):
        await release.close(0.01)
