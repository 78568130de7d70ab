"""F15: five times the load that the workers can serve.

Overload is judged beside two controls on the same machine at the same time: as many requests to a server that does
nothing but refuse, and a bare queue that keeps as many engines of the same kind full. What the workers serve when every
slot has a client and nobody else asks is shown, and loosens nothing.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count

from bench.chaos.asks import Ask
from bench.chaos.cluster import Begun, PenstockCluster
from bench.chaos.history import Life, lives_of
from bench.chaos.processes import ManagedProcess, until
from bench.chaos.rows.workers import requests
from bench.chaos.stage import PASSES, FaultTestbed, bare_server, yardstick
from bench.processes import uncollected
from bench.report import bound
from bench.stats import percentile

SLOTS, WORKERS, TOKENS, STEP_MS, PREFILL_MS = 8, 2, 25, 20, 20
LANE_LIMIT = 32
TIMES = 5
SECONDS, FULL_S = 20.0, 8.0
SHARES = {"interactive": 0.3, "standard": 2.2, "batch": 2.5}
"""Each lane's load, in multiples of what the workers can serve."""
MAX_REFUSAL_MS = bound("chaos.refusal")
"""At the 99th percentile, on a machine that never stands still."""
CAPACITY = SLOTS * WORKERS / ((TOKENS * STEP_MS + PREFILL_MS) / 1000)
"""Jobs a second that the workers can serve."""
DRAIN_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Controls:
    """What the machine let the controls do during a flood."""

    refusal_ms: float
    """99th percentile of a bare server's answers."""
    goodput: float
    """Requests a second that a bare queue served."""


async def f15(stage: FaultTestbed) -> None:
    """Open loop: requests come at their own pace, whatever becomes of them."""
    environ = {
        "PENSTOCK_SIM_SLOTS": str(SLOTS),
        "PENSTOCK_SIM_STEP_MS": str(STEP_MS),
        "PENSTOCK_SIM_PREFILL_MS": str(PREFILL_MS),
        "PENSTOCK_REDIS_LANE_LIMIT": str(LANE_LIMIT),
    }
    numbers = count()
    async with stage.cluster(workers=WORKERS, environ=environ) as cluster, bare_queue(stage) as bare_ends:
        calm = await _told(cluster, await _offer(cluster, numbers, {"interactive": 0.3}, 5.0))
        full = await _full(cluster, numbers)
        stage.figures["served at full load, of capacity"] = round(full / CAPACITY, 2)
        for _ in stage.tries():
            async with yardstick(stage, 1 / (TIMES * CAPACITY)) as bare_ms:
                with uncollected():
                    stage.fault(f"{TIMES} times the load")
                    began = time.monotonic()
                    begun, deepest = await _flood(cluster, numbers)
                    ended = time.monotonic()
            served = sum(began <= each <= ended for each in bare_ends())
            controls = Controls(percentile(sorted(bare_ms), 0.99) or 0.0, served / (ended - began))
            lives = await _told(cluster, begun)
            stage.bit(any(life.of("refused") for life in lives), "nothing was refused: that was no overload")
            judge_overload(stage, calm, lives, ended - began, controls)
            cap = LANE_LIMIT * len(SHARES) + WORKERS * (SLOTS + 1)
            stage.must(deepest <= cap, f"{deepest} jobs in the lanes, allowed: {cap}")


async def _flood(cluster: PenstockCluster, numbers: count[int]) -> tuple[list[Begun], int]:
    """The requests of a flood, all of whose jobs have ended, and the most jobs that were seen in the lanes. No job is
    read here: reading hundreds of them takes seconds, and the processor time that the workers need."""
    offered = asyncio.create_task(_offer(cluster, numbers, SHARES, SECONDS))
    deepest = 0
    while not offered.done():
        deepest = max(deepest, sum((await cluster.held("lane")).values()))
        await asyncio.sleep(0.5)
    await until(lambda: _is_idle(cluster), DRAIN_TIMEOUT_S, 0.1)
    return await offered, deepest


@asynccontextmanager
async def bare_queue(stage: FaultTestbed) -> AsyncIterator[Callable[[], list[float]]]:
    """A bare queue with engines like those of the workers; tells when its requests ended so far, in monotonic
    seconds."""
    async with bare_server(stage, refuses=False) as port:
        shape = (port, WORKERS, SLOTS, TOKENS, STEP_MS, PREFILL_MS)
        argv = [sys.executable, "-m", "bench.chaos.bare_queue", *map(str, shape)]
        child = ManagedProcess("bare-queue", argv, dict(os.environ), stage.folder)
        await child.start()
        try:
            yield lambda: [float(line) for line in child.log.read_text().splitlines()]
        finally:
            await child.end()


async def _is_idle(cluster: PenstockCluster) -> bool:
    """Whether no job waits or runs."""
    return not any([any((await cluster.held(kind)).values()) for kind in ("lane", "claims")])


async def _full(cluster: PenstockCluster, numbers: count[int]) -> float:
    """Jobs a second with a client for each slot, that asks again once it has its answer."""
    begun: list[Begun] = []
    start = time.monotonic()

    async def client() -> None:
        while time.monotonic() < start + FULL_S:
            (asked,) = cluster.begin([Ask(f"full {next(numbers)}", TOKENS, retries=False)])
            begun.append(asked)
            await asked[1]

    await asyncio.gather(*(client() for _ in range(SLOTS * WORKERS)))
    spent = time.monotonic() - start
    await cluster.finish(begun)
    return len(begun) / spent


async def _offer(
    cluster: PenstockCluster, numbers: count[int], shares: dict[str, float], seconds: float
) -> list[Begun]:
    """Requests of every lane at even intervals, until each is answered, and each chat to its end."""
    begun: list[Begun] = []

    async def one_lane(lane: str, every_s: float) -> None:
        due = time.monotonic()
        for _ in range(int(seconds / every_s)):
            chat, queue = lane == "interactive", {"priority": lane}
            ask = Ask(f"{lane} {next(numbers)}", TOKENS, chat=chat, queue=queue, reads=chat, retries=False)
            begun.extend(cluster.begin([ask]))
            due += every_s
            await asyncio.sleep(max(0.0, due - time.monotonic()))

    await asyncio.gather(*(one_lane(lane, 1 / (share * CAPACITY)) for lane, share in shares.items()))
    await asyncio.gather(*(task for _, task in begun))
    return begun


async def _told(cluster: PenstockCluster, begun: list[Begun]) -> list[Life]:
    """What became of requests, after each accepted one was read once more."""
    await cluster.finish(begun)
    numbers, lives = set(requests(begun)), lives_of(cluster.history.events)
    return [life for req, life in lives.items() if req in numbers]


def judge_overload(stage: FaultTestbed, calm: list[Life], lives: list[Life], spent_s: float, bare: Controls) -> None:
    done = {life.ask["prompt"]: life for life in lives if life.job}
    lanes = {lane: sum(prompt.startswith(lane) for prompt in done) for lane in SHARES}
    goodput = len(done) / spent_s
    refusals = [event for life in lives for event in life.of("refused")]
    slow = percentile(sorted(event["ms"] for event in refusals), 0.99) or 0.0
    unloaded, loaded = (percentile(sorted(_first_token_ms(some)), 0.99) or 0.0 for some in (calm, lives))
    share = lanes["batch"] / max(1, len(done))
    _note(stage, min, "served of capacity", round(goodput / CAPACITY, 2))
    _note(stage, min, "served of capacity, bare queue", round(bare.goodput / CAPACITY, 2))
    _note(stage, max, "refusal p99 ms", round(slow, 1))
    _note(stage, max, "refusal p99 ms, bare server", round(bare.refusal_ms, 1))
    _note(stage, max, "TTFT p99 ms, high lane", round(loaded))
    _note(stage, max, "TTFT p99 ms, unloaded", round(unloaded))
    _note(stage, min, "share of the lowest lane", round(share, 3))
    least = 0.9 * min(CAPACITY, bare.goodput)
    stage.must(bare.goodput > 0, "the bare queue served nothing: it is no control")
    stage.must(goodput >= least, f"{goodput:.1f} jobs/s served, at least {least:.1f} are due")
    stage.must(all(event["retry_after"] for event in refusals), "a refusal without Retry-After")
    quick = MAX_REFUSAL_MS + PASSES * bare.refusal_ms
    stage.must(slow <= quick, f"refusal p99 {slow:.1f} ms, allowed: {quick:.1f} ms")
    # No slot is free under load, and none is taken from a running job: the high lane waits for one of them to end.
    allowed = 1.5 * unloaded + TOKENS * STEP_MS + PREFILL_MS + bare.refusal_ms
    stage.must(loaded <= allowed, f"TTFT p99 {loaded:.0f} ms, allowed: {allowed:.0f} ms")
    stage.must(share >= 0.05, f"the lowest lane got {share:.1%} of the work, at least 5% is due")


def _note(stage: FaultTestbed, worse: Callable[[float, float], float], name: str, value: float) -> None:
    """The worst of all trials."""
    stage.figures[name] = worse(float(stage.figures.get(name, value)), value)


def _first_token_ms(lives: list[Life]) -> list[float]:
    """Of streamed requests."""
    firsts = ((life, life.of("token")) for life in lives)
    return [1000 * (tokens[0]["t"] - life.ask["t"]) for life, tokens in firsts if tokens]
