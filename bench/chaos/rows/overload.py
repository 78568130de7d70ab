"""F15: five times more requests than the workers can serve.

Quick means quick beside a server that does nothing but refuse, asked at the same time on the same machine. What the
workers serve when every slot has a client and nobody else asks is shown, and loosens nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from itertools import count

from bench.chaos.asks import Ask
from bench.chaos.budget import ANY, Budget
from bench.chaos.checker import Life, lives_of
from bench.chaos.history import of_kind
from bench.chaos.house import Begun, House
from bench.chaos.stage import FaultRow, FaultTestbed
from bench.chaos.stalls import percentile
from bench.chaos.yardstick import PASSES, yardstick

SLOTS, WORKERS, TOKENS, STEP_MS, PREFILL_MS = 8, 2, 25, 20, 20
LANE_LIMIT = 32
TIMES = 5
SECONDS, FULL_S = 20.0, 8.0
SHARES = {"interactive": 0.3, "standard": 2.2, "batch": 2.5}
"""Each lane's load, in multiples of what the workers can serve."""
REFUSED_MS = 20.0
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
    async with stage.house(workers=WORKERS, environ=environ) as house, yardstick(stage) as bare_ms:
        calm = await _offer(house, numbers, capacity, {"interactive": 0.3}, 5.0)
        full = await _full(house, numbers)
        stage.figures["served at full load, of capacity"] = round(full / capacity, 2)
        for _ in stage.tries():
            began = house.history.events[-1]["t"]
            stage.fault(f"{TIMES} times the load")
            bare_ms.clear()
            offered = asyncio.create_task(_offer(house, numbers, capacity, SHARES, SECONDS))
            deepest = 0.0
            while not offered.done():
                deepest = max(deepest, (await house.leftovers())["lane"])
                await asyncio.sleep(0.5)
            lives = await offered
            _judge(stage, capacity, calm, lives, began, percentile(sorted(bare_ms), 0.99) or 0.0)
            cap = LANE_LIMIT * len(SHARES) + WORKERS * (SLOTS + 1)
            stage.must(deepest <= cap, f"{deepest:.0f} jobs in the lanes, allowed: {cap}")
            stage.bit(any(life.of("refused") for life in lives), "nothing was refused: that was no overload")


async def _full(house: House, numbers: count[int]) -> float:
    """Jobs a second with a client for each slot, that asks again once it has its answer."""
    begun: list[Begun] = []
    start = time.monotonic()

    async def client() -> None:
        while time.monotonic() < start + FULL_S:
            (asked,) = house.begin([Ask(f"full {next(numbers)}", TOKENS, retries=False)])
            begun.append(asked)
            await asked[1]

    await asyncio.gather(*(client() for _ in range(SLOTS * WORKERS)))
    spent = time.monotonic() - start
    await house.finish(begun)
    return len(begun) / spent


async def _offer(
    house: House, numbers: count[int], capacity: float, shares: dict[str, float], seconds: float
) -> list[Life]:
    """Requests of every lane at even intervals; what became of them."""
    begun = []

    async def one_lane(lane: str, every_s: float) -> None:
        due = time.monotonic()
        for _ in range(int(seconds / every_s)):
            chat, queue = lane == "interactive", {"priority": lane}
            ask = Ask(f"{lane} {next(numbers)}", TOKENS, chat=chat, queue=queue, reads=chat, retries=False)
            begun.extend(house.begin([ask]))
            due += every_s
            await asyncio.sleep(max(0.0, due - time.monotonic()))

    await asyncio.gather(*(one_lane(lane, 1 / (share * capacity)) for lane, share in shares.items()))
    await house.finish(begun)
    requests = {told.req for told, _ in begun}
    return [life for req, life in lives_of(house.history.events).items() if req in requests]


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
    quick = REFUSED_MS + PASSES * bare
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
        *("F15", "overload", f"{TIMES} times the capacity for {SECONDS:.0f} s, three lanes", 5, f15, 300),
        alone=True,
        proves="Overload is refused quickly, and what is accepted is served in the order of its lanes.",
        budget=Budget(refused=ANY, why="four of five requests cannot be served; the row judges their number"),
        short=1,
    ),
)
