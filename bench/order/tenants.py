"""Part `tenants`: a light tenant alone and beside one that sends ten times as much, in the simulator and on processes.

The wait is the time from a request to its first token. A step takes as long with one text as with all slots in use, so
what differs is the order alone. `pytest -s tests/streaming/jobs/test_order.py -k gap` prints the service gap of two
backlogged tenants, and `-k very_many_tenants` what a claim costs with 10,000.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from random import Random
from statistics import median
from typing import Any

from bench.order.contenders import FIFO, OURS, ran
from bench.penstock import MODEL, Penstock, key_rows
from bench.program import ProgramRun, Testbed, in_processes
from bench.report import Ratio, Report, columns
from bench.stats import quantile
from bench.table1.client import HttpConnection, TargetServer, ask, seen
from penstock.client import AsyncPenstockClient
from planner.simulator.engine import EngineShape, ModelText, StepCosts

COLUMNS = columns("""
    where: where; slots: slots; rule: order; seed: seed; alone_ms: p95 wait alone, ms; beside_ms: beside the flood, ms;
    ratio: ratio .2; flood_s: p95 wait of the flood, s .2
""")
NOTES = (
    "Wait: from the request to its first token. The light tenant sends 13 % of what the engine can do, the other ten "
    "times as much; gaps are exponential, answers of 50 to 400 tokens. Engine: the simulated one with its defaults, a "
    "step of 15 ms and a prompt of 25 ms, whatever they compute. Both tenants have the same weight and lane.",
    "Workers keep one slot in 128, rounded, from the tenant that floods. If it is taken, the light tenant waits for "
    "the next text that ends. With fewer slots that takes longer, whatever the order: jobs of one lane do not preempt "
    "each other.",
)
TOKENS, TOKENS_MEAN = (50, 400), 225
AHEAD_S = 6.0
"""The flood begins so much earlier, so that every slot is taken and its jobs wait."""
QUESTION = [{"role": "user", "content": "what is water?"}]
LIGHT, FLOOD = "light", "flood"
SHARE, TIMES = 0.13, 10
STEP_S, PREFILL_S, SLOTS = 0.015, 0.025, 256
"""Defaults of the simulated engine."""


@dataclass(frozen=True, slots=True)
class TenantSize:
    """How much is simulated, and how much is asked of processes."""

    seeds: tuple[int, ...] = (41, 42, 43)
    slots: tuple[int, ...] = (16, 64, 256)
    seconds: float = 300.0
    rounds: int = 3
    live_s: float = 20.0
    """Of each half of a round on processes."""


QUICK = TenantSize(seeds=(21,), slots=(256,), seconds=20.0, rounds=0)


def measured(run: ProgramRun) -> Report:
    """Simulate, serve, show and keep."""
    size = QUICK if run.args.quick else TenantSize()
    tasks = [(slots, rule, seed, size.seconds) for slots in size.slots for rule in (OURS, FIFO) for seed in size.seeds]
    rows = in_processes(simulated, tasks, run.args.jobs)
    if size.rounds:
        config = "".join(key_rows(name, name) for name in (LIGHT, FLOOD))
        settings = {"sim.slots": SLOTS, "sim.step_ms": 1000 * STEP_S, "sim.prefill_ms": 1000 * PREFILL_S}
        with Testbed(run.console, "processes", size.rounds) as testbed:
            for number in range(1, size.rounds + 1):
                with Penstock(testbed.room(number), settings=settings, config=config) as penstock:
                    rows.append(asyncio.run(_live(penstock, number, size.live_s)))
                testbed.done()
    ratios = () if run.args.quick else goals(rows)
    title = f"A light tenant beside one that sends {TIMES} times as much"
    return run.keep(run.result("order-tenants", title, COLUMNS, rows, ratios, NOTES, **asdict(size)))


# --- simulated -------------------------------------------------------------------------------------------------------


def simulated(slots: int, rule: str, seed: int, seconds: float) -> dict[str, Any]:
    """One engine with so many slots, with the light tenant alone and then with both."""
    shape = EngineShape(10**9, slots, costs=StepCosts(STEP_S, 0.0, 0.0, 0.0))
    rate = SHARE * slots / (TOKENS_MEAN * STEP_S)
    alone = made(LIGHT, rate, seed, seconds)
    ran(rule, alone, shape, seed)
    light, flood = made(LIGHT, rate, seed, seconds), made(FLOOD, TIMES * rate, seed + 1000, seconds)
    ran(rule, [*light, *flood], shape, seed)
    waits = [first_tokens_s(texts) for texts in (alone, light, flood)]
    return row("simulator", slots, rule, seed, *waits)


def made(tenant: str, rate: float, seed: int, seconds: float) -> list[ModelText]:
    """The texts of one tenant."""
    random, at = Random(seed), 0.0  # noqa: S311 - a simulation
    texts = []
    while (at := at + random.expovariate(rate)) < seconds:
        tokens = random.randint(*TOKENS)
        texts.append(ModelText(random.randint(50, 400), tokens, tokens, arrived_s=at, tenant=tenant))
    return texts


def first_tokens_s(texts: Sequence[ModelText]) -> list[float]:
    """Waits in seconds, sorted. The engine model takes no time for a prompt here."""
    return sorted(text.first_s - text.arrived_s + PREFILL_S for text in texts if text.first_s is not None)


def row(where: str, slots: int, order: str, seed: int, *waits: Sequence[float]) -> dict[str, Any]:
    """One row of the table, of sorted waits in seconds: of the light tenant alone, beside the flood, and of that."""
    without, beside, flood = (quantile(each, 0.95) for each in waits)
    return {
        "where": where,
        "slots": slots,
        "rule": order,
        "seed": seed,
        "alone_ms": 1000 * without,
        "beside_ms": 1000 * beside,
        "ratio": beside / without,
        "flood_s": flood,
    }


# --- on processes ----------------------------------------------------------------------------------------------------


async def _live(penstock: Penstock, number: int, seconds: float) -> dict[str, Any]:
    rate = SHARE * SLOTS / (TOKENS_MEAN * STEP_S + PREFILL_S)
    alone = await _light(penstock, rate, number, seconds)
    flooding = asyncio.create_task(_flood(penstock, TIMES * rate, number, AHEAD_S + seconds))
    await asyncio.sleep(AHEAD_S)
    light = await _light(penstock, rate, number, seconds)
    return row("processes", SLOTS, OURS, number, alone, light, await flooding)


async def _light(penstock: Penstock, rate: float, seed: int, seconds: float) -> list[float]:
    """Streams of the light tenant, at their times; seconds to the first token of each, sorted."""
    server, random = TargetServer.at(f"{penstock.url}/v1", MODEL, LIGHT), Random(seed)  # noqa: S311 - a load
    idle: list[HttpConnection] = []
    waits: list[float] = []

    async def one() -> None:
        line = idle.pop() if idle else HttpConnection(server)
        body = server.chat(QUESTION, random.randint(*TOKENS), queue={"priority": "standard"})
        answer = seen(await ask(line, body, 0, 60.0))
        if answer.fault:
            raise RuntimeError(f"a chat of the light tenant failed: {answer.fault}")
        idle.append(line)
        waits.append(answer.ttft)

    until = time.monotonic() + seconds
    async with asyncio.TaskGroup() as tasks:
        while time.monotonic() < until:
            await asyncio.sleep(random.expovariate(rate))
            tasks.create_task(one())
    for line in idle:
        line.close()
    return sorted(waits)


async def _flood(penstock: Penstock, rate: float, seed: int, seconds: float) -> list[float]:
    """Jobs of the other tenant, at their times. Returns the waits of some until a worker began them, sorted; of those
    that still wait, so far."""
    random, ids = Random(seed), list[str]()  # noqa: S311 - a load
    async with AsyncPenstockClient(penstock.url, FLOOD) as client:

        async def one(tokens: int) -> None:
            ids.append((await client.submit({"model": MODEL, "messages": QUESTION, "max_tokens": tokens}))["id"])

        at = time.monotonic()
        until = at + seconds
        async with asyncio.TaskGroup() as tasks:
            while (at := at + random.expovariate(rate)) < until:
                await asyncio.sleep(max(0.0, at - time.monotonic()))
                tasks.create_task(one(random.randint(*TOKENS)))
        jobs = [await client.get(job_id) for job_id in ids[:: len(ids) // 100]]
    return sorted((job["started_at"] or time.time()) - job["created_at"] for job in jobs)


def goals(rows: Sequence[Mapping[str, Any]]) -> Iterator[Ratio]:
    """Of each number of slots, simulated and on processes."""
    mine = [each for each in rows if each["rule"] == OURS]
    for where, slots in dict.fromkeys((each["where"], each["slots"]) for each in mine):
        found = [each["ratio"] for each in mine if (each["where"], each["slots"]) == (where, slots)]
        words = f"{where}, {slots} slots: p95 wait of the light tenant beside the flood, over alone"
        yield Ratio.held("order.light_tenant", words, median(found) if found else None, rounds=found)
