"""Part `deadlines`: share of deadlines met by load, by our order, by arrival and by strict priority; simulated."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from random import Random
from statistics import fmean
from typing import Any

from bench.order.contenders import FIFO, LANES, NOTES, OURS, capacity, ran, waits_s
from bench.program import ProgramRun, in_processes
from bench.report import Ratio, Report, columns
from planner.simulator.engine import EngineShape, ModelText
from planner.simulator.trace import WorkloadShape, arrivals
from streaming.order import Priority

RULES = (OURS, FIFO, LANES)
SHAPE = EngineShape(kv_tokens=40_000, slots=64)
COLUMNS = columns("""
    batch: deadlines of batch; load: load, % .0; rule: order; met: deadlines met, %; tight: of the tight, % ;
    loose: of the loose, %;
    interactive_s: longest wait in interactive, s .0; standard_s: in standard, s .0; batch_s: in batch, s .0
""")
SHARES = {Priority.INTERACTIVE: 0.3, Priority.STANDARD: 0.5, Priority.BATCH: 0.2}
TIGHT_S, LOOSE_S = (1.0, 10.0), (30.0, 120.0)
"""Seconds that a text has beyond those of its longest answer."""
LOOSE, AS_OTHERS = "loose", "as others"
"""The deadlines of lane batch. The order takes lanes first, so tight ones do not suit that lane."""
STEP_S = 0.02
"""A usual step of this engine under load."""
DETAILS = (
    "load: of what the engine does when it always has texts to begin. Mean of the seeds; longest waits of all seeds.",
    "Whatever the order, a text whose deadline has passed is given up, waiting or running. A deadline is met if the "
    "whole answer is there.",
    "Three tenants, gaps of cv 5, 30 % interactive, 50 % standard, 20 % batch. A deadline allows 20 ms for each token "
    "of max_tokens, and 1 to 10 s more (tight: a third of the texts) or 30 to 120 s more (loose: a third); the others "
    "have none. Deadlines of batch: all loose, or as those of the other lanes. Prompts of 64 to 512 tokens, "
    "answers lognormal with a median of 200, max_tokens the next power of two; 64 slots, 40,000 tokens of cache.",
)


@dataclass(frozen=True, slots=True)
class DeadlineSize:
    """How much is simulated."""

    seeds: tuple[int, ...] = (41, 42, 43)
    loads: tuple[int, ...] = (70, 80, 90, 100, 110)
    """Per cent."""
    batches: tuple[str, ...] = (LOOSE, AS_OTHERS)
    seconds: float = 600.0


QUICK = DeadlineSize(seeds=(21,), loads=(100,), seconds=30.0)


def measured(run: ProgramRun) -> Report:
    """Simulate, show and keep."""
    size = QUICK if run.args.quick else DeadlineSize()
    cases = product(size.batches, size.loads, RULES, size.seeds, (size.seconds,))
    single = in_processes(outcome_of, list(cases), run.args.jobs)
    rows = [merged([each for each in single if case_of(each) == of]) for of in dict.fromkeys(map(case_of, single))]
    ratios = () if run.args.quick else goals(single)
    title = f"Deadlines met, of texts that come for {size.seconds:.0f} s"
    notes = (*DETAILS, NOTES[OURS], NOTES[FIFO], NOTES[LANES])
    return run.keep(run.result("order-deadlines", title, COLUMNS, rows, ratios, notes, **asdict(size)))


def made(rate: float, seed: int, seconds: float, batch: str = LOOSE) -> list[ModelText]:
    """The texts of one load, by arrival."""
    random = Random(seed)  # noqa: S311 - a simulation
    texts = []
    for at in arrivals(WorkloadShape(rate=rate, cv=5.0), random, seconds):
        output = min(1024, 1 + int(random.lognormvariate(5.3, 0.8)))
        text = ModelText(random.randint(64, 512), output, 1 << (output - 1).bit_length(), arrived_s=at)
        text.lane = random.choices(list(SHARES), list(SHARES.values()))[0]
        text.tenant, kind = random.choice("abc"), random.choice(("tight", "loose", ""))
        loose = kind == "loose" or (text.lane == Priority.BATCH and batch == LOOSE)
        spare_s = random.uniform(*(LOOSE_S if loose else TIGHT_S))
        text.deadline_s = at + STEP_S * text.limit + spare_s if kind else math.inf
        texts.append(text)
    return texts


def outcome_of(batch: str, load: int, rule: str, seed: int, seconds: float) -> dict[str, Any]:
    """One simulation."""
    flood = made(20.0, seed, 100.0)
    for text in flood:
        text.arrived_s, text.deadline_s = 0.0, math.inf
    texts = made(load / 100 * capacity(flood, SHAPE), seed, seconds, batch)
    ran(rule, texts, SHAPE, seed)
    tight, loose = ([text for text in texts if of[0] <= spare_s(text) <= of[1]] for of in (TIGHT_S, LOOSE_S))
    free = [text for text in texts if text.deadline_s == math.inf]
    longest = {f"{lane}_s": max(waits_s(free, lane), default=0.0) for lane in Priority}
    return {
        "batch": batch,
        "load": load,
        "rule": rule,
        "seed": seed,
        "met": _met([*tight, *loose]),
        "tight": _met(tight),
        "loose": _met(loose),
        **longest,
    }


def spare_s(text: ModelText) -> float:
    """Seconds that it has beyond those of its longest answer."""
    return text.deadline_s - text.arrived_s - STEP_S * text.limit


def _met(texts: Sequence[ModelText]) -> float:
    return 100 * fmean([text.ended_s is not None and text.ended_s <= text.deadline_s for text in texts])


def case_of(row: Mapping[str, Any]) -> tuple[str, int, str]:
    return row["batch"], row["load"], row["rule"]


def merged(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One row of the table from those of its seeds."""
    means = {key: fmean([row[key] for row in rows]) for key in ("met", "tight", "loose")}
    most = {key: max(row[key] for row in rows) for key in rows[0] if key.endswith("_s")}
    case = {key: rows[0][key] for key in ("batch", "load", "rule")}
    return {**case, **means, **most}


def goals(rows: Sequence[Mapping[str, Any]]) -> Iterator[Ratio]:
    """Of each load: deadlines met over those of the other orders. (A run lasts until every text without a deadline has
    begun, so none can be missing: that no lane starves, tests of the simulator show beside a load that never ends.)"""
    for batch, load in dict.fromkeys((row["batch"], row["load"]) for row in rows):
        of = {rule: [row["met"] for row in rows if case_of(row) == (batch, load, rule)] for rule in RULES}
        for rule in (FIFO, LANES):
            rounds = [mine / other for mine, other in zip(of[OURS], of[rule], strict=True)]
            words = f"batch {batch}, load {load} %: deadlines met over those of {rule}"
            yield Ratio.held("order.deadlines", words, fmean(rounds), digits=3, rounds=rounds)
