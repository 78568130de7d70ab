"""What is shown: each a deployment of its own, played through, with its figures and the goals they are held against."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from bench.chaos.http import fetch
from bench.chaos.processes import becomes, until
from bench.elastic.testbed import MODEL, WAIT_TIMEOUT_S, Crowd, ElasticTestbed, stale
from bench.report import Ratio
from streaming.jobs.reader import JobReader

TICK_S = 1.0
SIM = {"sim.step_ms": 20, "sim.prefill_ms": 20, "sim.slots": 8, "scheduler.tick_s": TICK_S}
HOLD_S = 5.0
"""How long a state is held before the next thing happens."""
SHRINK_TIMEOUT_S = 120.0
"""A pool that is not smaller after so long stays as it is."""


@dataclass(slots=True)
class Shown:
    """Figures, in the order they were measured, and goals."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    goals: list[Ratio] = field(default_factory=list)

    def add(self, what: str, value: float | None, unit: str = "") -> None:
        self.rows.append({"what": what, "value": value, "unit": unit})

    def judge(self, what: str, value: float | None, at_most: float) -> None:
        """A figure with a limit."""
        self.goals.append(Ratio(what=what, value=value, at_most=at_most))

    def judge_goal(self, goal: str, what: str, value: float | None) -> None:
        """A figure with a limit of `bench/goals.toml`, in seconds."""
        self.goals.append(Ratio.held(goal, what, value))

    def judge_clients(self, judged: dict[str, int]) -> None:
        """Nothing may have gone wrong for anybody."""
        self.add("requests", judged.pop("requests"))
        for what, number in judged.items():
            self.judge(f"requests {what}" if what != "broken promises" else what, number, 0)


@dataclass(frozen=True, slots=True)
class ElasticSize:
    """How much of it: for people, or for a test."""

    crowd: int = 20
    most: int = 6
    load_ms: int = 2000
    hold_s: float = HOLD_S
    idle_s: float = 5.0
    sleep_s: float = 2.0
    trials: int = 5
    lead_s: float = 5.0
    down: int = 1
    """Workers that are to be left when the crowd has gone."""


SHORT = ElasticSize(load_ms=300, hold_s=0.5, idle_s=0.5, sleep_s=0.5, trials=1, lead_s=1.0, down=2)


async def step(folder: Path, size: ElasticSize) -> Shown:
    """One worker under two clients; ten times as many come at once; then they go, while long answers run."""
    shown = Shown()
    model = {"min_workers": 1, "max_workers": size.most}
    # Else workers would be kept ready for the next such rush, for hours, and there would be no way down to see.
    settings = {**SIM, "sim.load_ms": size.load_ms, "scheduler.idle_s": size.idle_s, "scheduler.cover": 0}
    async with ElasticTestbed(folder / "testbed", model, settings) as testbed:
        crowd = Crowd(folder, testbed.port, tokens=100)
        crowd.size(max(1, size.crowd // 10))
        await testbed.settled(1)
        await asyncio.sleep(size.hold_s)
        known = {worker.lease for worker in await testbed.workers()}
        began = await testbed.now_s()
        crowd.size(size.crowd)
        up, start = await testbed.first(began, "up"), await testbed.first(began, "start")
        await until(lambda: _new(testbed, known), WAIT_TIMEOUT_S)
        ready_s = await testbed.now_s() - began
        start_s = began + ready_s - start.at_ms / 1000
        shown.judge_goal("elastic.decided", "step: decided after", up.at_ms / 1000 - began)
        shown.add("step: first new worker there after", ready_s, "s")
        shown.add("step: of that, its start", start_s, "s")
        shown.judge_goal("elastic.there", "step: there after, less its start", ready_s - start_s)
        await _still(testbed, size.hold_s)
        shown.add("step: workers ready when nothing more was decided", len(await testbed.workers()))
        crowd.size(max(1, size.crowd // 10))
        gone = await testbed.now_s()
        down = await becomes(lambda: _is_down(testbed, size.down), SHRINK_TIMEOUT_S)
        shown.add("step: given back after", await testbed.now_s() - gone if down else None, "s")
        shown.judge("step: workers in the end", len(await testbed.fleet.processes("worker")), size.down)
        shown.add("step: workers drained", len(await testbed.actions(gone, "drain")))
        await crowd.go()
        shown.judge_clients(await crowd.judged())
    return shown


async def wake(folder: Path, size: ElasticSize) -> Shown:
    """A model at zero workers, and five requests at once."""
    shown = Shown()
    model = {"min_workers": 0, "max_workers": 1}
    settings = {**SIM, "sim.load_ms": size.load_ms, "scheduler.idle_s": 0, "scheduler.sleep_s": size.sleep_s}
    async with ElasticTestbed(folder / "testbed", model, settings) as testbed:
        crowd = Crowd(folder, testbed.port, tokens=20)
        for trial in range(1 + size.trials):
            await _asleep(testbed)
            _, _, listed = await fetch(testbed.port, "GET", "/v1/models")
            began = await testbed.now_s()
            asked = [crowd.ask(chat=number > 0) for number in range(5)]
            await asked[0][0].accepted.wait()
            eta_ms = await _eta_ms(testbed, asked[0][0].job)
            start = await testbed.first(began, "start")
            await testbed.settled(1)
            cold_s = await testbed.now_s() - start.at_ms / 1000
            await asyncio.gather(*(task for _, task in asked))
            told = [one for one, _ in asked]
            first_s = min(crowd.times("token", told)) - min(crowd.times("ask", told))
            name = "first wake" if trial == 0 else f"wake {trial + 1}"
            shown.add(f"{name}: first token after", first_s, "s")
            shown.add(f"{name}: of that, the cold start", cold_s, "s")
            shown.judge_goal("elastic.woken", f"{name}: first token less cold start", first_s - cold_s)
            eta_s = None if eta_ms is None else eta_ms / 1000
            shown.add(f"{name}: its ETA had been", eta_s, "s")
            if trial:  # the first one is told what the settings assume
                wrong_s = None if eta_s is None else abs(eta_s - first_s)
                shown.judge_goal("elastic.eta", f"{name}: ETA wrong by", wrong_s)
            shown.judge(f"{name}: model not listed while asleep", float(MODEL.encode() not in listed), 0)
        shown.judge_clients(await crowd.judged())
    return shown


async def failover(folder: Path, size: ElasticSize) -> Shown:
    """Three schedulers; the leader is killed, and a decision is due at that moment."""
    shown = Shown()
    async with ElasticTestbed(folder / "testbed", {"min_workers": 1, "max_workers": 2}, _quick(size)) as testbed:
        for number in (2, 3):
            testbed.start_scheduler(f"scheduler-{number}")
        await until(lambda: _schedulers(testbed, 3), WAIT_TIMEOUT_S)
        worst = 0.0
        for trial in range(size.trials):
            lead, pid = await testbed.leader()
            killed = await testbed.now_s()
            os.kill(pid, signal.SIGKILL)
            await testbed.overrides.put(MODEL, 2 if trial % 2 == 0 else 1, "show")
            acted: list[float] = []

            async def acts(lead: int = lead.epoch, killed: float = killed, acted: list[float] = acted) -> bool:
                acted[:] = [
                    noted.at_ms / 1000 for noted in await testbed.actions(killed, "up", "down") if noted.epoch > lead
                ]
                return bool(acted)

            await until(acts, WAIT_TIMEOUT_S)
            shown.add(f"leader killed, trial {trial + 1}: the next acts after", acted[0] - killed, "s")
            worst = max(worst, acted[0] - killed)
            await asyncio.sleep(size.hold_s)
        shown.judge_goal("elastic.next_leader", "leader killed: the next acts after, at most", worst)
        shown.judge("leader killed: stale actions", len(stale(await testbed.actions())), 0)
    return shown


async def straggler(folder: Path, size: ElasticSize) -> Shown:
    """Three workers under a steady crowd; one becomes five times slower."""
    shown = Shown()
    async with ElasticTestbed(
        folder / "testbed", {"min_workers": 3, "max_workers": 4}, {**SIM, "sim.faults": "true"}
    ) as testbed:
        crowd = Crowd(folder, testbed.port, tokens=40)
        await testbed.settled(3)
        crowd.size(9)
        await asyncio.sleep(3 * size.hold_s)
        told, task = crowd.ask("[[slow@1]]", tokens=3)
        await told.begun.wait()
        began = await testbed.now_s()
        await task
        record = await JobReader(testbed.wire).record(told.job)
        slow = record.terminal.worker if record.terminal else ""
        cordon = await testbed.first(began, "cordon")
        shown.judge_goal(
            "elastic.cordoned", "one worker five times slower: cordoned after", cordon.at_ms / 1000 - began
        )

        async def replaced() -> bool:
            workers = await testbed.fleet.processes("worker")
            return slow not in {worker.lease for worker in workers} and len(await testbed.workers()) == 3

        await until(replaced, WAIT_TIMEOUT_S)
        shown.add("one worker five times slower: replaced after", await testbed.now_s() - began, "s")
        await crowd.go()
        wrong = [noted for noted in await testbed.actions(0, "cordon") if noted.action.worker != slow]
        shown.judge("healthy workers cordoned", len(wrong), 0)
        shown.judge_clients(await crowd.judged())
    return shown


Show: TypeAlias = Callable[[Path, ElasticSize], Coroutine[Any, Any, Shown]]
SHOWS: dict[str, Show] = {
    "step": step,
    "wake": wake,
    "failover": failover,
    "straggler": straggler,
}


def _quick(size: ElasticSize) -> dict[str, object]:
    return {**SIM, "scheduler.lead_s": size.lead_s}


async def _new(testbed: ElasticTestbed, known: set[str]) -> bool:
    return any(worker.lease not in known for worker in await testbed.workers())


async def _still(testbed: ElasticTestbed, seconds: float) -> None:
    """Until nothing has been decided for so long."""

    async def quiet() -> bool:
        return not await testbed.actions(await testbed.now_s() - seconds, "up", "down", "start", "drain")

    await until(quiet, WAIT_TIMEOUT_S)


async def _is_down(testbed: ElasticTestbed, to: int) -> bool:
    return len(await testbed.fleet.processes("worker")) <= to


async def _asleep(testbed: ElasticTestbed) -> None:
    """No worker wanted, and none there."""
    await testbed.settled(0)

    async def decided() -> bool:
        plan = await testbed.plan()
        return plan is not None and plan.want == 0

    await until(decided, WAIT_TIMEOUT_S)


async def _eta_ms(testbed: ElasticTestbed, job: str) -> int | None:
    _, _, body = await fetch(testbed.port, "GET", f"/v1/jobs/{job}")
    eta: int | None = msgspec.json.decode(body)["eta_ms"]
    return eta


async def _schedulers(testbed: ElasticTestbed, number: int) -> bool:
    return len(await testbed.fleet.processes("scheduler")) == number
