"""Schedulers as real processes: settings, one alone, and several of which the leader is stopped."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TypeVar

import pytest
from flow import put_job, until

from penstock.config import Config, ConfigError
from penstock.process import Lifeline
from scheduler.__main__ import main, open_pool, read_limits, run
from scheduler.pools.base import DryRunPool, Pool
from scheduler.pools.kubernetes import KubernetesPool
from streaming.fleet.plans import LEADER, Lead, Noted, Overrides, Plans
from streaming.fleet.process import Process
from streaming.fleet.processes import Fleet, this_process
from streaming.jobs.queue import Queue
from streaming.redis.client import RedisClient
from streaming.store.identity import enter_store
from telemetry.metrics import Metrics

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
MODEL = "m"
T = TypeVar("T")


class Schedulers:
    """Processes that share one server, and what they do there."""

    def __init__(self, redis_url: str, wire: RedisClient, folder: Path) -> None:
        self.folder, self.wire = folder, wire
        self.settings = folder / "settings.json"
        self.plans, self.overrides = Plans(wire), Overrides(wire)
        self.processes: list[subprocess.Popen[bytes]] = []
        models = {MODEL: {"engine": "sim", "min_workers": 0, "max_workers": 9}}
        raw = {"redis": {"url": redis_url}, "scheduler": {"tick_s": 0.05, "lead_s": 1.0}, "models": models}
        Config(raw).save(self.settings)

    def start(self, name: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "scheduler", "--settings", str(self.settings), "--id", name]
        with (self.folder / f"{name}.log").open("wb") as log:
            environ = {**os.environ, "PYTHONPATH": str(ROOT)}
            process = subprocess.Popen(command, env=environ, cwd=self.folder, stderr=log)
        self.processes.append(process)
        return process

    async def leader(self, *, after: int = 0) -> tuple[Lead, subprocess.Popen[bytes]]:
        """Whoever leads under an epoch beyond `after`."""

        async def found() -> tuple[Lead, subprocess.Popen[bytes]] | None:
            lead = await self.wire.ask(LEADER)
            if not lead.holder or lead.epoch <= after:
                return None
            return lead, next(each for each in self.processes if lead.holder.endswith(f":{each.pid}"))

        return await until(found)

    async def want(self, number: int) -> None:
        """A decision of ours, and the plan that follows from it."""
        await self.overrides.put(MODEL, number, "test")

        async def planned() -> bool:
            plan = (await self.plans.read()).get(MODEL)
            return plan is not None and plan.want == number

        await until(planned)

    async def actions(self) -> list[Noted]:
        """Oldest first."""
        return list(reversed(await self.plans.actions(1000)))

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture
async def schedulers(redis_url: str, wire: RedisClient, tmp_path: Path) -> AsyncIterator[Schedulers]:
    schedulers = Schedulers(redis_url, wire, tmp_path)
    await enter_store(wire)
    yield schedulers
    schedulers.close()


# --- one -------------------------------------------------------------------------------------------------------------


class NotedLifeline(Lifeline):
    """Keeps what it is told."""

    def __init__(self) -> None:
        super().__init__(None)
        self.said: list[tuple[str, str]] = []

    def say(self, state: str, detail: str = "") -> None:
        self.said.append((state, detail))


async def test_a_scheduler_without_redis_tells_its_supervisor_the_cause(caplog: pytest.LogCaptureFixture) -> None:
    """Not only that it waits: `penstock up` shows it. The log has it once, however often it tries."""
    config = Config({"redis": {"url": "redis://127.0.0.1:1/0"}})
    lifeline, metrics = NotedLifeline(), Metrics.start("", "scheduler")
    running = asyncio.create_task(run(config, read_limits(config), this_process("scheduler", "s"), lifeline, metrics))
    await until(lambda: len(lifeline.said) >= 3)
    (_, waiting), (state, cause), *_ = lifeline.said
    assert waiting == "waiting for Redis" and state == "starting"
    assert cause.startswith("waiting for Redis: ") and "127.0.0.1:1" in cause
    assert [record.message for record in caplog.records if record.name == "penstock.process"] == [cause]
    os.kill(os.getpid(), signal.SIGTERM)
    assert await running == 0
    metrics.close()


def test_limits_come_from_the_models() -> None:
    """min_workers alone is also the maximum."""
    models = {"a": {"engine": "sim", "min_workers": 2}, "b": {"engine": "sim", "max_workers": 5}}
    limits = read_limits(Config({"models": models, "scheduler": {"idle_s": 7}}))
    found = {name: (each.min, each.max, each.idle_s) for name, each in limits.items()}
    assert found == {"a": (2, 2, 7.0), "b": (1, 5, 7.0)}


@pytest.mark.parametrize(("name", "kind"), [("local", Pool), ("dry-run", DryRunPool), ("kubernetes", KubernetesPool)])
async def test_the_pool_is_the_one_that_the_settings_name(name: str, kind: type[Pool]) -> None:
    pool = open_pool(Config({"scheduler": {"pool": name}}), this_process("scheduler", "s"))
    assert type(pool) is kind
    await pool.close()


def test_a_bad_setting_is_an_error_that_names_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, the key and the nearest known one on stderr."""
    path = tmp_path / "penstock.toml"
    path.write_text("[scheduler]\nidel_s = 3\n")
    assert main(["--config", str(path)]) == 2
    assert capsys.readouterr().err == "error: scheduler.idel_s: no such setting (did you mean 'idle_s'?)\n"


@pytest.mark.parametrize(("deployment", "models"), [
    ("w-{model}", {"a.b": {}, "A-b": {}}),
    ("w-{model}", {"a-fast": {}, "a": {"shapes": {"fast": {"upto": 4}, "slow": {}}}}),
    ("w", {"a": {}, "b": {}}),
])  # fmt: skip
def test_two_pools_of_one_deployment_are_refused(deployment: str, models: dict[str, dict[str, object]]) -> None:
    """They would scale it against each other; pools of other kinds have no such names."""
    tables = {name: {"engine": "sim", **more} for name, more in models.items()}
    config = {"models": tables, "kubernetes": {"deployment": deployment}}
    assert read_limits(Config({**config, "scheduler": {"pool": "local"}}))
    with pytest.raises(ConfigError, match=r"kubernetes\.deployment: .* would both be the Deployment"):
        read_limits(Config({**config, "scheduler": {"pool": "kubernetes"}}))
    read_limits(Config({"models": {"a": {"engine": "sim"}}, "scheduler": {"pool": "kubernetes"}}))


async def test_one_alone(schedulers: Schedulers, wire: RedisClient) -> None:
    """It sees a put job, publishes one worker, is in the fleet, and SIGTERM ends it with 0 and the lead free."""
    fleet = Fleet(wire)
    await put_job(Queue(wire))
    process = schedulers.start("scheduler-7")
    plan = await until(lambda: _plan(schedulers))

    async def ready() -> list[Process]:
        return [each for each in await fleet.processes("scheduler") if each.state == "ready"]

    found = await until(ready)
    process.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(process.wait, 20) == 0
    assert plan.want == 1
    assert [(each.id, each.pid, each.state) for each in found] == [("scheduler-7", process.pid, "ready")]
    assert await fleet.processes("scheduler") == [] and (await wire.ask(LEADER)).holder == ""
    events = [json.loads(line) for line in (schedulers.folder / "scheduler-7.log").read_text().splitlines()]
    assert [event["want"] for event in events if event.get("action") == "up"] == [1]


async def _plan(schedulers: Schedulers) -> object:
    return (await schedulers.plans.read()).get(MODEL)


# --- several ---------------------------------------------------------------------------------------------------------


async def test_a_stopped_leader_does_nothing_when_it_goes_on(schedulers: Schedulers) -> None:
    """SIGSTOP in the middle of its work, another leads, SIGCONT: no action under an older epoch follows a newer one."""
    for number in (1, 2):
        schedulers.start(f"scheduler-{number}")
    lead, process = await schedulers.leader()
    for turn in range(2):
        await schedulers.want(1 + turn)
        await schedulers.overrides.put(MODEL, 9, "test")  # something is about to be done
        process.send_signal(signal.SIGSTOP)
        try:
            newer, successor = await schedulers.leader(after=lead.epoch)
            await schedulers.want(5 + turn)
        finally:
            process.send_signal(signal.SIGCONT)
        await schedulers.want(1 + turn)
        lead, process = newer, successor
    actions = await schedulers.actions()
    epochs = [noted.epoch for noted in actions]
    assert epochs == sorted(epochs) and len(set(epochs) - {0}) >= 3
    done = [noted for noted in actions if noted.action.kind in ("up", "down")]
    holders = {noted.epoch: noted.action.by for noted in actions if noted.action.kind == "lead"}
    assert all(noted.action.by == holders[noted.epoch] for noted in done)
    assert all(f"@{socket.gethostname()}/" in holder for holder in holders.values())
