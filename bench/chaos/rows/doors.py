"""F08-F10: clients that leave or read slowly, and API processes that die."""

from __future__ import annotations

import asyncio

from bench.chaos.asks import Ask
from bench.chaos.checker import lives_of
from bench.chaos.house import House
from bench.chaos.rows.workers import victim
from bench.chaos.stage import Row, Stage
from bench.chaos.stalls import percentile


async def _kill_door(stage: Stage, house: House, trials: int, *, worker_too: bool) -> None:
    """All streams at one API process; it dies, and they go on at the other one with their cursor."""
    for trial in range(trials):
        number = trial % len(house.apis)
        doomed, port = house.apis[number], house.ports[number]
        prompts = [f"{stage.row.id} trial {trial} number {n}" for n in range(5)]
        asks = [Ask(text, 130, key=text if n % 2 else "") for n, text in enumerate(prompts)]
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
        await house.ready()


async def f10(stage: Stage) -> None:
    """Resumed on another API process: the first frame within a second."""
    async with stage.house() as house:
        await _kill_door(stage, house, stage.wanted, worker_too=False)
    _resumed(stage, 1000.0)


async def f10_both(stage: Stage) -> None:
    """API process and worker die at once: the stall is a lease and the sweep, the resume is not."""
    async with stage.house() as house:
        await _kill_door(stage, house, stage.wanted, worker_too=True)
    _resumed(stage, None)


def _resumed(stage: Stage, limit_ms: float | None) -> None:
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


ROWS = (
    Row("F10", "API process killed", "kill -9 under all open streams; resumed on the other", 50, f10, 420, alone=True),
    Row("F10b", "API process and worker killed", "both at once", 20, f10_both, 240),
)
