"""A load that is constant but for its noise: how often a policy changes its mind. And health: who is cordoned when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from bench.scale.contenders import KedaRule, Own
from bench.scale.plant import EngineModel
from bench.scale.run import SimulationOutcome, simulate
from bench.workload.generate import WorkloadShape, requests
from scheduler.policy.limits import TARGETS, ScalingLimits

WARM_S = 7200.0
HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class Steady:
    """Requests a second, the coefficient of variation of their gaps, and how long it is watched."""

    seed: int
    rate: float = 3.5
    cv: float = 1.5
    hours: float = 6.0


def most_reversals_in_an_hour(outcome: SimulationOutcome) -> int:
    """Changes of direction of the number wanted, in the hour that has most of them, wherever it begins."""
    steps = [(at, after - before) for (_, before), (at, after) in pairwise(outcome.wants)]
    turns = [at for (_, one), (at, other) in pairwise(steps) if (one > 0) != (other > 0)]
    return max((sum(first <= turn < first + HOUR_S for turn in turns) for first in turns), default=0)


def steadied(name: str, load: Steady) -> dict[str, Any]:
    """The figures of one policy, "penstock" or "keda", under one load."""
    engine, seconds = EngineModel(), load.hours * HOUR_S
    limits = ScalingLimits(1, 80)
    contender = Own(limits) if name == "penstock" else KedaRule(limits)
    trace = requests(WorkloadShape(rate=load.rate, cv=load.cv), load.seed, WARM_S + seconds)
    outcome = simulate(contender, trace, seconds, engine, warm_s=WARM_S, begin=4, seed=load.seed)
    workers = [count for at, count, _ in outcome.curve if at >= WARM_S]
    return {
        "seed": load.seed,
        "name": name,
        "hours": load.hours,
        "most_in_an_hour": most_reversals_in_an_hour(outcome),
        "reversals_per_hour": outcome.reversals / load.hours,
        "interactive": 100 * outcome.within("interactive", TARGETS["interactive"]),
        "worker_hours": outcome.worker_hours,
        "workers": f"{min(workers)} to {max(workers)}",
    }


@dataclass(frozen=True, slots=True)
class Ward:
    """Six busy workers for an hour and a half; after an hour the first of them is `slow` times slower; 1: none is."""

    seed: int
    slow: float = 1.0
    workers: int = 6


SLOW_AT_S = 3600.0


def watched(ward: Ward) -> dict[str, Any]:
    """How long after it became slow the slow worker was cordoned, and how many healthy ones ever were."""
    engine = EngineModel()
    outcome = simulate(
        Own(ScalingLimits(ward.workers, ward.workers + 2)),
        requests(WorkloadShape(rate=4.2, cv=1.5), ward.seed, SLOW_AT_S * 1.5),
        SLOW_AT_S * 1.5,
        engine,
        begin=ward.workers,
        seed=ward.seed,
        slow={0: (SLOW_AT_S, ward.slow)} if ward.slow > 1 else None,
    )
    slow_one = outcome.first_workers[0] if ward.slow > 1 else ""
    found = [at - SLOW_AT_S for at, name in outcome.cordons if name == slow_one]
    return {
        "seed": ward.seed,
        "slow": ward.slow,
        "cordoned_after_s": found[0] if found else None,
        "healthy_cordoned": sum(name != slow_one for _, name in outcome.cordons),
    }


def wards(seeds: Sequence[int]) -> list[Ward]:
    """With a slow worker and without for each seed."""
    return [Ward(seed, slow) for seed in seeds for slow in (5.0, 1.0)]
