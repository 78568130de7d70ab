"""Replica grid: throughput of fixed layouts of the same GPUs by concurrent requests (ScaleLLM, experiment 4).

Few GPUs in a replica read all weights in each replica; many GPUs read them once, and talk more. Which is better depends
on how many requests run at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from planner.facts.catalogue import PlanError
from planner.parallel import ParallelPlan, is_valid
from planner.search import SearchInput, enough
from planner.serving import BatchLimits, requests, serve

CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
ROUNDS = 4
"""Requests for each that runs at once."""


@dataclass(frozen=True, slots=True)
class GridRow:
    """One layout: tokens a second by concurrency."""

    plan: ParallelPlan
    tokens_s: dict[int, float]


def layouts(gpus: int, experts: int) -> list[ParallelPlan]:
    """Those of the paper, for its 8 GPUs TP8 x 1, TP4 x 2 and TP2 x 4; with experts also EP4-TP2 and EP2-TP4 of one
    replica."""
    dense = [ParallelPlan(dp=gpus // tp, tp=tp) for tp in (gpus, gpus // 2, gpus // 4) if tp > 0 and gpus % tp == 0]
    mixed = [ParallelPlan(tp=gpus, ep=ep) for ep in (gpus // 2, gpus // 4) if ep > 1 and experts > 1]
    return list(dict.fromkeys([*dense, *mixed]))


def grid(given: SearchInput, concurrencies: Sequence[int] = CONCURRENCIES) -> list[GridRow]:
    """All layouts that fit. Raises PlanError if none does."""
    found = []
    for plan in layouts(given.gpus, given.model.experts):
        try:
            if is_valid(plan, given.model) and given.replica(plan).kv_tokens > given.lengths.longest:
                found.append(GridRow(plan, {each: closed_loop(given, plan, each) for each in concurrencies}))
        except PlanError:
            continue
    if not found:
        raise PlanError(
            f"no layout of {given.model.name} fits on {given.gpus} x {given.device.name}; {enough(given)} would fit"
        )
    return found


def closed_loop(given: SearchInput, plan: ParallelPlan, clients: int) -> float:
    """Tokens a second with so many clients, which ask again as soon as they are answered.

    Each replica has its share of the clients, at most its largest batch; the others wait.
    """
    each = min(given.limits.batch, math.ceil(clients / plan.dp))
    used = min(plan.dp, clients)
    one = replace(given, limits=BatchLimits(each, given.limits.step_tokens)).replica(replace(plan, dp=1))
    served = serve(one, requests(given.lengths, ROUNDS * each, math.inf), BatchLimits(each, given.limits.step_tokens))
    return used * served.tokens_s


def best_by_concurrency(rows: Sequence[GridRow]) -> dict[int, ParallelPlan]:
    """The layout with the most tokens a second at each concurrency."""
    return {each: max(rows, key=lambda row: row.tokens_s[each]).plan for each in rows[0].tokens_s}


def grid_advice(rows: Sequence[GridRow]) -> str:
    """Which layout is best where."""
    top = list(best_by_concurrency(rows).items())
    first, plan = top[0]
    said = [f"{plan.name} yields most from {first} concurrent request on"]
    said += [f"{plan.name} from {at} on" for (_, before), (at, plan) in pairwise(top) if plan != before]
    return ", ".join(said) + "."
