"""The scheduler's rounds against doubles of the wire's parts, and the whole process on a real server."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from scheduler.__main__ import Settings, main
from scheduler.loop import Loop, Me, Parts
from scheduler.policy import Limits
from streaming.backlog import Backlog, Lane
from streaming.config import Config
from streaming.errors import Unavailable
from streaming.fleet import Fleet, Plan
from streaming.messages import Chat, Job, Priority, Process, Role, Turn
from streaming.queue import Queue
from streaming.reaper import Reaper, Swept
from streaming.wire import Wire
from telemetry.metrics import Metrics

ROOT = Path(__file__).parent.parent
LIMITS = {"m": Limits(min=0, max=4, backlog_per_worker=16, idle_s=60)}
ME = Me("scheduler-1", 1, "here")


class World:
    """What the doubles share: the state a real server would hold."""

    def __init__(self) -> None:
        self.now = 1_000.0
        self.down = False
        self.lanes: list[Lane] = []
        self.workers: list[Process] = []
        self.plans: dict[str, Plan] = {}
        self.published = 0
        self.swept = [Swept()]
        self.seen: dict[str, Process] = {}
        self.leader: tuple[str, float] = ("", 0.0)

    def answer(self) -> None:
        if self.down:
            raise Unavailable("Redis does not answer: refused")

    def wait(self, jobs: int, oldest_ms: int = 500) -> None:
        self.lanes = [Lane("m", Priority.STANDARD, jobs, 0, oldest_ms if jobs else 0)]

    async def now_ms(self) -> int:
        self.answer()
        return int(self.now * 1000)


class FleetDouble(Fleet):
    def __init__(self, world: World) -> None:
        self.world = world

    async def report(self, process: Process) -> None:
        self.world.answer()
        self.world.seen[process.id] = process

    async def leave(self, role: Role, process_id: str) -> None:
        self.world.answer()
        del self.world.seen[process_id]

    async def processes(self, role: Role | None = None) -> list[Process]:
        self.world.answer()
        return [worker for worker in self.world.workers if role in (None, worker.role)]

    async def plan(self, model: str, want: int, reason: str) -> None:
        self.world.answer()
        self.world.plans[model] = Plan(model=model, want=want, reason=reason)
        self.world.published += 1

    async def plans(self) -> dict[str, Plan]:
        self.world.answer()
        return dict(self.world.plans)

    async def lead(self, holder: str, ttl_ms: int) -> bool:
        self.world.answer()
        leader, until = self.world.leader
        if leader != holder and until > self.world.now:
            return False
        self.world.leader = (holder, self.world.now + ttl_ms / 1000)
        return True


class BacklogDouble(Backlog):
    def __init__(self, world: World) -> None:
        self.world = world

    async def lanes(self, models: Iterable[str]) -> list[Lane]:
        self.world.answer()
        return [lane for lane in self.world.lanes if lane.model in models]


class ReaperDouble(Reaper):
    def __init__(self, world: World) -> None:
        self.world = world

    async def sweep(self) -> Swept:
        self.world.answer()
        return self.world.swept.pop() if self.world.swept else Swept()


def a_loop(world: World, me: Me = ME, states: list[str] | None = None, metrics: Metrics | None = None) -> Loop:
    return Loop(
        Parts(FleetDouble(world), BacklogDouble(world), ReaperDouble(world), world.now_ms),
        LIMITS,
        me,
        metrics or Metrics.start("", "scheduler"),
        tick_s=0.01,
        clock=lambda: world.now,
        on_state=(states if states is not None else []).append,
    )


def a_worker(number: int, state: str = "ready") -> Process:
    return Process(role="worker", id=f"w{number}", pid=1, host="h", state=state, since=0, model="m", slots=4)


async def until(condition: Callable[[], bool], what: str) -> None:
    """Poll until it holds; a generous deadline turns a hang into a failure that says what was awaited."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.005)


async def test_a_waiting_job_wakes_a_sleeping_model_in_one_tick() -> None:
    """From nothing published, the first tick after a put publishes one worker and the reason."""
    world = World()
    world.wait(1)
    await a_loop(world).tick()
    assert world.plans["m"] == Plan(model="m", want=1, reason="1 waiting (oldest 0.5 s) and no worker")


async def test_only_changes_are_published_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Ten equal ticks publish and log one plan; a changed load one more."""
    world = World()
    world.wait(1)
    loop = a_loop(world)
    with caplog.at_level(logging.INFO, "scheduler.loop"):
        for _ in range(10):
            await loop.tick()
        world.wait(40)
        for _ in range(10):
            await loop.tick()
    assert (world.published, world.plans["m"].want) == (2, 2)
    said = [record for record in caplog.records if "wanted" in record.message]
    assert [(vars(record)["was"], vars(record)["want"]) for record in said] == [(None, 1), (1, 2)]


async def test_a_restarted_scheduler_goes_on_from_the_published_plan() -> None:
    """A new process finds three workers planned and busy, and changes nothing."""
    world = World()
    world.plans["m"] = Plan(model="m", want=3, reason="before")
    world.workers = [a_worker(number) for number in range(3)]
    world.lanes = [Lane("m", Priority.STANDARD, 0, 12, 0)]
    await a_loop(world).tick()
    assert (world.published, world.plans["m"].reason) == (0, "before")


async def test_a_lost_plan_is_published_again() -> None:
    """When Redis forgot the plan, the next tick says it again although the decision is the same."""
    world = World()
    world.wait(40)
    loop = a_loop(world)
    await loop.tick()
    world.plans.clear()
    await loop.tick()
    assert (world.plans["m"].want, world.published) == (2, 2)


async def test_workers_that_drain_are_not_counted() -> None:
    """Their slots are not free for the backlog: only ready workers count."""
    world = World()
    world.plans["m"] = Plan(model="m", want=1, reason="before")
    world.workers = [a_worker(1), a_worker(2, "draining"), a_worker(3, "draining")]
    world.wait(20)
    await a_loop(world).tick()
    assert world.plans["m"].want == 2, "20 waiting less 4 free slots of the one ready worker are one worker more"


async def test_the_second_scheduler_stands_by_and_takes_over() -> None:
    """Two schedulers: one publishes; when it falls silent the other goes on from its plan."""
    world = World()
    world.wait(40)
    first, second = a_loop(world), a_loop(world, Me("scheduler-2", 2, "there"))
    await first.tick()
    await second.tick()
    assert (world.published, world.leader[0]) == (1, ME.holder)
    world.now += 60
    world.wait(70)
    await second.tick()
    assert (world.leader[0], world.plans["m"].want, world.published) == ("scheduler-2@there:2", 4, 2)


async def test_an_outage_is_said_once_and_ends_by_itself(caplog: pytest.LogCaptureFixture) -> None:
    """Redis down at start: one warning however many ticks; back: ready, one line, and scheduling goes on."""
    world, stop = World(), asyncio.Event()
    states: list[str] = []
    world.down = True
    world.wait(1)
    loop = a_loop(world, states=states)
    answered = world.answer
    asked = [0]

    def count() -> None:
        asked[0] += 1
        answered()

    world.answer = count  # type: ignore[method-assign]
    with caplog.at_level(logging.INFO, "scheduler.loop"):
        running = asyncio.create_task(loop.run(stop))
        await until(lambda: asked[0] > 10, "it keeps asking")
        assert states == []
        world.down = False
        await until(lambda: "m" in world.plans and "scheduler-1" in world.seen, "it schedules and reports")
        stop.set()
        await running
    assert states == ["ready", "draining"]
    assert [r.message.split(":")[0] for r in caplog.records if "Redis" in r.message] == [
        "nothing is scheduled until Redis is back",
        "Redis is back",
    ]


async def test_it_leaves_cleanly() -> None:
    """After stop it is gone from the fleet, and its lead is free at once."""
    world, stop = World(), asyncio.Event()
    running = asyncio.create_task(a_loop(world).run(stop))
    await until(lambda: [each.state for each in world.seen.values()] == ["ready"], "it is there")
    assert world.seen["scheduler-1"].since == world.now
    stop.set()
    await running
    assert world.seen == {}
    assert world.leader[1] <= world.now + 0.001


def test_limits_come_from_the_models() -> None:
    """min_workers alone is also the maximum; backlog and quiet time are the scheduler's own settings."""
    config = Config(
        {
            "models": {"a": {"engine": "sim", "min_workers": 2}, "b": {"engine": "sim", "max_workers": 5}},
            "scheduler": {"backlog_per_worker": 3, "idle_s": 7},
        }
    )
    assert Settings.read(config).limits == {"a": Limits(2, 2, 3, 7.0), "b": Limits(1, 5, 3, 7.0)}


def test_a_bad_setting_is_an_error_that_names_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, the key and the nearest known one on stderr."""
    path = tmp_path / "penstock.toml"
    path.write_text("[scheduler]\nidel_s = 3\n")
    assert main(["--config", str(path)]) == 2
    assert capsys.readouterr().err == "error: scheduler.idel_s: no such setting (did you mean 'idle_s'?)\n"


async def test_the_process_on_a_real_server(redis_url: str, wire: Wire, tmp_path: Path) -> None:
    """`python -m scheduler` sees a put job, publishes one worker, is in the fleet, and SIGTERM ends it with 0."""
    settings = tmp_path / "settings.json"
    models = {"m": {"engine": "sim", "min_workers": 0, "max_workers": 2}}
    Config({"redis": {"url": redis_url}, "scheduler": {"tick_s": 0.05}, "models": models}).save(settings)
    queue, fleet = Queue(wire), Fleet(wire)
    turn = Chat((Turn("user", "hello"),))
    await queue.put(Job(id=queue.new_id("t"), model="m", tenant="t", priority=Priority.STANDARD, prompt=turn))
    command = [sys.executable, "-m", "scheduler", "--settings", str(settings), "--id", "scheduler-7"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environ, cwd=tmp_path, stderr=subprocess.PIPE) as process:
        deadline = time.monotonic() + 30
        while not ((plan := (await fleet.plans()).get("m")) and (found := await fleet.processes("scheduler"))):
            assert process.poll() is None and time.monotonic() < deadline, "no plan was published"
            await asyncio.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        _, said = await asyncio.to_thread(process.communicate, timeout=20)
    assert process.returncode == 0
    assert plan.want == 1
    assert [(each.id, each.pid, each.state) for each in found] == [("scheduler-7", process.pid, "ready")]
    assert await fleet.processes("scheduler") == []
    events = [json.loads(line) for line in said.splitlines()]
    assert [event["want"] for event in events if "want" in event] == [1]
