"""Part `tenants`: a light tenant alone and beside one that sends ten times as much, simulated.

The wait is the time from a request to its first token. A step takes as long with one text as with all slots in use, so
what differs is the order alone. `pytest -s tests/streaming/jobs/test_order.py -k gap` prints the service gap of two
backlogged tenants, and `-k very_many_tenants` what a claim costs with 10,000.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from random import Random
from statistics import median
from typing import Any

from bench.order.contenders import FIFO, OURS, ran
from bench.program import ProgramRun, in_processes
from bench.report import Ratio, Report, columns
from bench.stats import quantile
from planner.simulator.engine import EngineShape, ModelText, StepCosts

COLUMNS = columns("""
    slots: slots; rule: order; seed: seed; alone_ms: p95 wait alone, ms; beside_ms: beside the flood, ms;
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
LIGHT, FLOOD = "light", "flood"
SHARE, TIMES = 0.13, 10
STEP_S, PREFILL_S = 0.015, 0.025
"""Defaults of the simulated engine."""


@dataclass(frozen=True, slots=True)
class TenantSize:
    """How much is simulated."""

    seeds: tuple[int, ...] = (41, 42, 43)
    slots: tuple[int, ...] = (16, 64, 256)
    seconds: float = 300.0


QUICK = TenantSize(seeds=(21,), slots=(256,), seconds=20.0)


def measured(run: ProgramRun) -> Report:
    """Simulate, show and keep."""
    size = QUICK if run.args.quick else TenantSize()
    tasks = [(slots, rule, seed, size.seconds) for slots in size.slots for rule in (OURS, FIFO) for seed in size.seeds]
    rows = in_processes(simulated, tasks, run.args.jobs)
    ratios = () if run.args.quick else goals(rows)
    title = f"A light tenant beside one that sends {TIMES} times as much"
    return run.keep(run.result("order-tenants", title, COLUMNS, rows, ratios, NOTES, **asdict(size)))


def simulated(slots: int, rule: str, seed: int, seconds: float) -> dict[str, Any]:
    """One engine with so many slots, with the light tenant alone and then with both."""
    shape = EngineShape(10**9, slots, costs=StepCosts(STEP_S, 0.0, 0.0, 0.0))
    rate = SHARE * slots / (TOKENS_MEAN * STEP_S)
    alone = made(LIGHT, rate, seed, seconds)
    ran(rule, alone, shape, seed)
    light, flood = made(LIGHT, rate, seed, seconds), made(FLOOD, TIMES * rate, seed + 1000, seconds)
    ran(rule, [*light, *flood], shape, seed)
    without, beside, flooding = (quantile(first_tokens_s(texts), 0.95) for texts in (alone, light, flood))
    return {
        "slots": slots,
        "rule": rule,
        "seed": seed,
        "alone_ms": 1000 * without,
        "beside_ms": 1000 * beside,
        "ratio": beside / without,
        "flood_s": flooding,
    }


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


def goals(rows: Sequence[Mapping[str, Any]]) -> Iterator[Ratio]:
    """Of each number of slots."""
    mine = [each for each in rows if each["rule"] == OURS]
    for slots in dict.fromkeys(each["slots"] for each in mine):
        found = [each["ratio"] for each in mine if each["slots"] == slots]
        words = f"simulator, {slots} slots: p95 wait of the light tenant beside the flood, over alone"
        yield Ratio.held("order.light_tenant", words, median(found) if found else None, rounds=found)
