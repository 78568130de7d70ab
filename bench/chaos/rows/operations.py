"""F17, F18: scaling down and rolling restarts, as operators do them."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from functools import partial
from itertools import count

from bench.chaos.asks import Ask
from bench.chaos.budget import Budget
from bench.chaos.history import of_kind
from bench.chaos.house import House
from bench.chaos.http import Exchange
from bench.chaos.processes import ManagedProcess
from bench.chaos.rows.workers import asks
from bench.chaos.stage import FaultRow, FaultTestbed
from bench.chaos.stalls import percentile, stalls_ms
from bench.chaos.waiting import becomes

MAX_EXIT_S = 35.0
HOLDS_S = 5.0
"""How long a worker under load may take to come to a job."""
MAX_GAP_MS = 2000.0


async def f17(stage: FaultTestbed) -> None:
    """Two of three workers get SIGTERM with streams open; the grace time is enough for some of them only."""
    async with stage.house(environ={"PENSTOCK_WORKER_DRAIN_S": "0.6"}) as house:
        for trial in stage.tries():
            begun = house.begin(asks(stage.row.id, trial))
            await asyncio.sleep(stage.rng.uniform(0.1, 1.2))
            leaving = stage.rng.sample(house.workers, 2)
            holders = await house.holders()
            stage.fault(" and ".join(f"SIGTERM {worker.name}" for worker in leaving))
            await asyncio.gather(*(_stop(stage, worker, 5.0) for worker in leaving))
            await house.finish(begun)
            stage.bit(holds_some(leaving, holders), "no worker that was stopped held a job")
            await house.ready()
        jobs = [event["job"] for event in of_kind(stage.history.events, "final")]
        lost = [job for job in jobs if await house.losses(job)]
    moved = sum(event["attempts"] > 1 for event in of_kind(stage.history.events, "final"))
    stage.figures["jobs handed over"] = moved
    least = max(1, stage.wanted // 4)
    stage.must(moved >= least, f"only {moved} jobs were handed over in {stage.wanted} trials")
    stage.must(not lost, f"{len(lost)} handed-over jobs count as lost by a worker")


def holds_some(children: Sequence[ManagedProcess], holders: Sequence[ManagedProcess]) -> bool:
    """Whether one of these processes is among those that hold jobs."""
    return any(child in holders for child in children)


async def _stop(stage: FaultTestbed, child: ManagedProcess, within_s: float) -> None:
    """SIGTERM; it must end by itself, in time, with exit code 0."""
    lives = len(child.exits)
    child.send(signal.SIGTERM)
    try:
        async with asyncio.timeout(within_s):
            await child.exited(lives + 1)
    except TimeoutError:
        stage.must(False, f"{child.name} did not end within {within_s:g} s of SIGTERM")
        return
    stage.must(child.exits[lives] == 0, f"{child.name} ended with {child.exits[lives]}")


async def f18(stage: FaultTestbed) -> None:
    """Every process restarted, one by one, again and again, under load, with readers that have stalled."""
    environ = {"PENSTOCK_API_DRAIN_S": "3", "PENSTOCK_WORKER_DRAIN_S": "1"}
    async with stage.house(environ=environ) as house:
        running, numbers = asyncio.Event(), count()
        running.set()
        load = [asyncio.create_task(_load(house, running, numbers)) for _ in range(6)]
        await asyncio.sleep(1.0)
        while stage.trials < stage.wanted and stage.missed <= stage.row.most_missed:
            for child in house.children:
                stalled = [await _stalled(port) for port in house.ports]
                held = child not in house.workers or await becomes(partial(_holds, house, child), HOLDS_S)
                stage.fault(f"SIGTERM {child.name}")
                await _stop(stage, child, MAX_EXIT_S)
                await house.ready()
                for exchange in stalled:
                    exchange.close()
                read = stage.across(event["req"] for event in of_kind(stage.history.events, "ask"))
                stage.bit(held and read, "nobody read across it" if held else f"{child.name} held no job")
        running.clear()
        await asyncio.gather(*load)
    refused = of_kind(stage.history.events, "refused", "unknown")
    stage.figures["requests"] = len(of_kind(stage.history.events, "ask"))
    stage.must(not refused, f"{len(refused)} requests were refused or not answered: {refused[:2]}")
    p99 = percentile(stalls_ms(stage.history.events), 0.99) or 0.0
    stage.must(p99 <= MAX_GAP_MS, f"gap p99 {p99:.0f} ms, allowed: {MAX_GAP_MS:.0f} ms")


async def _holds(house: House, child: ManagedProcess) -> bool:
    return holds_some([child], await house.holders())


async def _load(house: House, running: asyncio.Event, numbers: count[int]) -> None:
    while running.is_set():
        number = next(numbers)
        await house.finish(house.begin([Ask(f"rolling {number}", 80, number % 3 != 2)], port=house.ports[number % 2]))


async def _stalled(port: int) -> Exchange:
    """A client that asks and never reads; its job is not judged."""
    ask = Ask("stalled", 1200, queue={"on_disconnect": "cancel"})
    return await Exchange.begin(port, "POST", ask.path, ask.body, receive_buffer=4096)


ROWS = (
    FaultRow(
        *("F17", "scale-down", "SIGTERM of 2 of 3 workers; grace time 0.6 s", 20, f17, 200),
        proves="Stopping workers hands over what they cannot finish; it counts as no loss.",
    ),
    FaultRow(
        *("F18", "rolling restart", "SIGTERM of every process in turn, under load", 24, f18, 240),
        proves="Every process can be restarted under load; readers change over or wait.",
        # Three times the most that was seen: 7 broken off in a trial.
        budget=Budget(refused=3, broken=21, why="an API process that stops refuses, and ends streams"),
        short=6,
    ),
)
