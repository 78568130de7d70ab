"""F08-F10: clients that leave or read slowly, and API processes that die."""

from __future__ import annotations

import asyncio

from bench.chaos.asks import Ask
from bench.chaos.budget import Budget
from bench.chaos.checker import Life, lives_of
from bench.chaos.house import House
from bench.chaos.rows.workers import requests, victim
from bench.chaos.stage import FaultRow, FaultTestbed
from bench.chaos.stalls import percentile
from bench.chaos.tenants import TENANTS


async def _kill_door(stage: FaultTestbed, house: House, *, worker_too: bool) -> None:
    """All streams at one API process; it dies, and they go on at the other one with their cursor."""
    for trial in stage.tries():
        number = trial % len(house.apis)
        doomed, port = house.apis[number], house.ports[number]
        prompts = [f"{stage.row.id} trial {trial} number {n}" for n in range(5)]
        asks = [
            Ask(text, 130, chat=n % 5 != 4, key=text if n % 2 else "", tenant=TENANTS[n % 2])
            for n, text in enumerate(prompts)
        ]
        begun = house.begin(asks, port=port)
        waiting = asyncio.gather(*(told.accepted.wait() for told, _ in begun))
        if trial % 4:  # every fourth kill may come before the answer
            await waiting
        await asyncio.sleep(stage.rng.uniform(0.0, 1.0))
        stage.fault(f"kill -9 {doomed.name}")
        doomed.kill()
        if worker_too:
            (await victim(stage, house)).kill()
        await waiting
        await house.finish(begun)
        cut = any(life.of("cut", "unknown") for life in _lives(stage, requests(begun)))
        moved = not worker_too or stage.moved(requests(begun))
        stage.bit(cut and moved, "no stream was cut" if moved else "the worker held no job")
        await house.ready()


async def f10(stage: FaultTestbed) -> None:
    """Resumed on another API process: the first frame within a second."""
    async with stage.house() as house:
        await _kill_door(stage, house, worker_too=False)
    _resumed(stage, 1000.0)


async def f10_both(stage: FaultTestbed) -> None:
    """API process and worker die at once: the stall is a lease and the sweep, the resume is not."""
    async with stage.house() as house:
        await _kill_door(stage, house, worker_too=True)
    _resumed(stage, None)


def _lives(stage: FaultTestbed, reqs: list[int]) -> list[Life]:
    lives = lives_of(stage.history.events)
    return [lives[req] for req in reqs]


def _resumed(stage: FaultTestbed, limit_ms: float | None) -> None:
    """From the moment a connection broke to the first token of the next one."""
    times = []
    for life in lives_of(stage.history.events).values():
        cut: float | None = None
        for event in life.of("cut", "token"):
            if event["event"] == "cut":
                cut = event["t"] if cut is None else cut
            elif cut is not None:
                times.append(1000 * (event["t"] - cut))
                cut = None
    times.sort()
    stage.figures["streams resumed"] = len(times)
    stage.must(len(times) >= stage.wanted, f"only {len(times)} streams were resumed in {stage.wanted} kills")
    p99 = percentile(times, 0.99)
    if p99 is not None:
        stage.figures["resumed p99 ms"] = round(p99)
        stage.must(limit_ms is None or p99 <= limit_ms, f"resume p99 {p99:.0f} ms, allowed: {limit_ms} ms")


CUT_OFF = Budget(unanswered=5, broken=20, why="all 5 streams of a trial are at the process that is killed")

ROWS = (
    FaultRow(
        *("F10", "API process killed", "kill -9 under all open streams; resumed on the other", 50, f10, 420),
        alone=True,
        proves="Readers of a killed API process go on at another one, with every token once.",
        budget=CUT_OFF,
    ),
    FaultRow(
        *("F10b", "API process and worker killed", "both at once", 20, f10_both, 240),
        proves="The same when the worker dies at the same time.",
        budget=CUT_OFF,
    ),
)
