"""F17, F18: scaling down and rolling restarts as operators do them."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from functools import partial
from itertools import count

from bench.chaos.asks import Ask
from bench.chaos.cluster import Begun, PenstockCluster
from bench.chaos.history import of_kind
from bench.chaos.http import Exchange
from bench.chaos.processes import ManagedProcess, becomes
from bench.chaos.rows.workers import asks, requests
from bench.chaos.stage import FaultTestbed
from bench.report import bound

MAX_EXIT_S = bound("chaos.exit")
CLAIM_TIMEOUT_S = 5.0
"""How long a worker under load may take to come to a job."""
MAX_GAP_MS = bound("chaos.restart")


async def f17(stage: FaultTestbed) -> None:
    """Two of three workers get SIGTERM with streams open; the grace time is enough for some of them only."""
    async with stage.cluster(environ={"PENSTOCK_WORKER_DRAIN_S": "0.6"}) as cluster:
        for trial in stage.tries():
            begun = cluster.begin(asks(stage.row.id, trial))
            await asyncio.sleep(stage.rng.uniform(0.1, 1.2))
            leaving = stage.rng.sample(cluster.workers, 2)
            holders = await cluster.holders()
            stage.fault(" and ".join(f"SIGTERM {worker.name}" for worker in leaving))
            await asyncio.gather(*(_stop(stage, worker, 5.0) for worker in leaving))
            await cluster.finish(begun)
            stage.bit(holds_some(leaving, holders), "no worker that was stopped held a job")
            await cluster.ready()
        jobs = [event["job"] for event in of_kind(stage.history.events, "final")]
        lost = [job for job in jobs if await cluster.losses(job)]
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
    """Every process restarted, one by one, again and again, under load, with readers that have stalled, and with
    requests for whole answers that take longer than an API process has to drain."""
    environ = {"PENSTOCK_API_DRAIN_S": "3", "PENSTOCK_WORKER_DRAIN_S": "1"}
    async with stage.cluster(environ=environ) as cluster:
        running, numbers = asyncio.Event(), count()
        running.set()
        load = [asyncio.create_task(_load(cluster, running, numbers)) for _ in range(6)]
        whole: list[Begun] = []
        await asyncio.sleep(1.0)
        while stage.trials < stage.wanted and stage.missed <= stage.row.most_missed:
            for child in cluster.children:
                stalled = [await _stalled(port) for port in cluster.ports]
                if child in cluster.apis:
                    port = cluster.ports[cluster.apis.index(child)]
                    whole += cluster.begin([Ask(f"whole {len(whole)}", WHOLE_TOKENS, whole=True)], port=port)
                held = await becomes(partial(is_at_work, cluster, child), CLAIM_TIMEOUT_S, 0.02)
                readers = readers_of(cluster, child)
                stage.fault(f"SIGTERM {child.name}")
                await _stop(stage, child, MAX_EXIT_S)
                await cluster.ready()
                for exchange in stalled:
                    exchange.close()
                read = stage.across(readers)
                stage.bit(held and read, "nobody read across it" if held else f"{child.name} had nothing to do")
        running.clear()
        await asyncio.gather(*load)
        await cluster.finish(whole)
    lives = stage.lives(requests(whole))
    cut_off = sum(event["why"] == "draining" for life in lives for event in life.of("cut"))
    stage.figures["whole answers cut off by the end of a drain"] = cut_off
    stage.must(cut_off > 0, "no whole answer outlasted the drain of its process")
    refused = of_kind(stage.history.events, "refused", "unknown")
    stage.figures["requests"] = len(of_kind(stage.history.events, "ask"))
    stage.must(not refused, f"{len(refused)} requests were refused or not answered: {refused[:2]}")
    stage.stalled_at_most(MAX_GAP_MS)


WHOLE_TOKENS = 600
"""Twice as many as a process has time for while it drains."""


async def is_at_work(cluster: PenstockCluster, child: ManagedProcess) -> bool:
    """Whether the end of a process meets somebody: a worker's jobs, an API process's own readers, anybody's of the
    scheduler."""
    return bool(readers_of(cluster, child)) and (
        child not in cluster.workers or holds_some([child], await cluster.holders())
    )


def readers_of(cluster: PenstockCluster, child: ManagedProcess) -> list[int]:
    """The requests of readers who are in the middle of a stream that a process may break: of an API process its own,
    of any other all."""
    ports = dict(zip(cluster.apis, cluster.ports, strict=True))
    return [req for port in ([ports[child]] if child in ports else cluster.ports) for req in cluster.readers_at(port)]


async def _load(cluster: PenstockCluster, running: asyncio.Event, numbers: count[int]) -> None:
    while running.is_set():
        number = next(numbers)
        await cluster.finish(
            cluster.begin([Ask(f"rolling {number}", 80, number % 3 != 2)], port=cluster.ports[number % 2])
        )


async def _stalled(port: int) -> Exchange:
    """A client that asks and never reads; its job is not judged."""
    ask = Ask("stalled", 1200, queue={"on_disconnect": "cancel"})
    return await Exchange.begin(port, "POST", ask.path, ask.body, receive_buffer=4096)
