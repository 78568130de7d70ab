"""F15, F17, F18: scaling down and rolling restarts as operators do them, and five times the capacity's load.

Overload is judged beside a server that does nothing but refuse, asked at the same time on the same machine. What the
workers serve when every slot has a client and nobody else asks is shown, and loosens nothing.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count

from bench.chaos.asks import ANY, Ask, Budget
from bench.chaos.bounds import bound
from bench.chaos.cluster import Begun, PenstockCluster
from bench.chaos.history import Life, lives_of, of_kind
from bench.chaos.http import Exchange
from bench.chaos.processes import ManagedProcess, becomes
from bench.chaos.rows.workers import asks, requests
from bench.chaos.stage import PASSES, FaultRow, FaultTestbed, yardstick
from bench.stats import percentile

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


SLOTS, WORKERS, TOKENS, STEP_MS, PREFILL_MS = 8, 2, 25, 20, 20
LANE_LIMIT = 32
TIMES = 5
SECONDS, FULL_S = 20.0, 8.0
SHARES = {"interactive": 0.3, "standard": 2.2, "batch": 2.5}
"""Each lane's load, in multiples of what the workers can serve."""
MAX_REFUSAL_MS = bound("chaos.refusal")
"""At the 99th percentile, on a machine that never stands still."""


async def f15(stage: FaultTestbed) -> None:
    """Open loop: requests come at their own pace, whatever becomes of them."""
    environ = {
        "PENSTOCK_SIM_SLOTS": str(SLOTS),
        "PENSTOCK_SIM_STEP_MS": str(STEP_MS),
        "PENSTOCK_SIM_PREFILL_MS": str(PREFILL_MS),
        "PENSTOCK_REDIS_LANE_LIMIT": str(LANE_LIMIT),
    }
    capacity = SLOTS * WORKERS / ((TOKENS * STEP_MS + PREFILL_MS) / 1000)
    numbers = count()
    async with stage.cluster(workers=WORKERS, environ=environ) as cluster, yardstick(stage) as bare_ms:
        calm = await _offer(cluster, numbers, capacity, {"interactive": 0.3}, 5.0)
        full = await _full(cluster, numbers)
        stage.figures["served at full load, of capacity"] = round(full / capacity, 2)
        for _ in stage.tries():
            began = cluster.history.events[-1]["t"]
            stage.fault(f"{TIMES} times the load")
            bare_ms.clear()
            offered = asyncio.create_task(_offer(cluster, numbers, capacity, SHARES, SECONDS))
            deepest = 0
            while not offered.done():
                deepest = max(deepest, sum((await cluster.held("lane")).values()))
                await asyncio.sleep(0.5)
            lives = await offered
            _judge(stage, capacity, calm, lives, began, percentile(sorted(bare_ms), 0.99) or 0.0)
            cap = LANE_LIMIT * len(SHARES) + WORKERS * (SLOTS + 1)
            stage.must(deepest <= cap, f"{deepest} jobs in the lanes, allowed: {cap}")
            stage.bit(any(life.of("refused") for life in lives), "nothing was refused: that was no overload")


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
    cluster: PenstockCluster, numbers: count[int], capacity: float, shares: dict[str, float], seconds: float
) -> list[Life]:
    """Requests of every lane at even intervals; what became of them."""
    begun = []

    async def one_lane(lane: str, every_s: float) -> None:
        due = time.monotonic()
        for _ in range(int(seconds / every_s)):
            chat, queue = lane == "interactive", {"priority": lane}
            ask = Ask(f"{lane} {next(numbers)}", TOKENS, chat=chat, queue=queue, reads=chat, retries=False)
            begun.extend(cluster.begin([ask]))
            due += every_s
            await asyncio.sleep(max(0.0, due - time.monotonic()))

    await asyncio.gather(*(one_lane(lane, 1 / (share * capacity)) for lane, share in shares.items()))
    await cluster.finish(begun)
    requests = {told.req for told, _ in begun}
    return [life for req, life in lives_of(cluster.history.events).items() if req in requests]


def _judge(
    stage: FaultTestbed, capacity: float, calm: list[Life], lives: list[Life], began: float, bare: float
) -> None:
    done = {life.ask["prompt"]: life for life in lives if life.job}
    lanes = {lane: sum(prompt.startswith(lane) for prompt in done) for lane in SHARES}
    last = max(event["t"] for event in of_kind(stage.history.events, "final"))
    goodput = len(done) / (last - began)
    refusals = [event for life in lives for event in life.of("refused")]
    slow = percentile(sorted(event["ms"] for event in refusals), 0.99) or 0.0
    unloaded, loaded = (percentile(sorted(_first_token_ms(some)), 0.99) or 0.0 for some in (calm, lives))
    share = lanes["batch"] / max(1, len(done))
    _note(stage, min, "served of capacity", round(goodput / capacity, 2))
    _note(stage, max, "refusal p99 ms", round(slow, 1))
    _note(stage, max, "refusal p99 ms, bare server", round(bare, 1))
    _note(stage, max, "TTFT p99 ms, high lane", round(loaded))
    _note(stage, max, "TTFT p99 ms, unloaded", round(unloaded))
    _note(stage, min, "share of the lowest lane", round(share, 3))
    stage.must(goodput >= 0.9 * capacity, f"{goodput:.1f} jobs/s served of {capacity:.1f}")
    stage.must(all(event["retry_after"] for event in refusals), "a refusal without Retry-After")
    quick = MAX_REFUSAL_MS + PASSES * bare
    stage.must(slow <= quick, f"refusal p99 {slow:.1f} ms, allowed: {quick:.1f} ms")
    # No slot is free under load, and none is taken from a running job: the high lane waits for one of them to end.
    allowed = 1.5 * unloaded + TOKENS * STEP_MS + PREFILL_MS + bare
    stage.must(loaded <= allowed, f"TTFT p99 {loaded:.0f} ms, allowed: {allowed:.0f} ms")
    stage.must(share >= 0.05, f"the lowest lane got {share:.1%} of the work, at least 5% is due")


def _note(stage: FaultTestbed, worse: Callable[[float, float], float], name: str, value: float) -> None:
    """The worst of all trials."""
    stage.figures[name] = worse(float(stage.figures.get(name, value)), value)


def _first_token_ms(lives: list[Life]) -> list[float]:
    """Of streamed requests."""
    firsts = ((life, life.of("token")) for life in lives)
    return [1000 * (tokens[0]["t"] - life.ask["t"]) for life, tokens in firsts if tokens]


ROWS = (
    FaultRow(
        *("F17", "scale-down", "SIGTERM of 2 of 3 workers; grace time 0.6 s", 20, f17, 200),
        proves="Stopping workers hands over what they cannot finish; it counts as no loss.",
    ),
    FaultRow(
        *("F18", "rolling restart", "SIGTERM of every process in turn, under load", 24, f18, 240),
        proves="Every process can be restarted under load; readers change over or wait.",
        # Three times the most that was seen: 7 broken off in a trial.
        budget=Budget(
            refused=3, codes=("draining",), broken=21, why="an API process that stops refuses, and ends streams"
        ),
        short=6,
    ),
    FaultRow(
        *("F15", "overload", f"{TIMES} times the capacity for {SECONDS:.0f} s, three lanes", 5, f15, 300),
        alone=True,
        proves="Overload is refused quickly, and what is accepted is served in the order of its lanes.",
        budget=Budget(
            refused=ANY,
            codes=("queue_full",),
            why="four of five requests cannot be served; the row judges their number",
        ),
        short=1,
    ),
)
