"""A bursty day, a constant noisy load, and a slow worker: what each autoscaler makes of them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Any

from bench.scale.contenders import Contender, Freeness, KedaRule, Own, Static, Utilisation
from bench.scale.run import SimulationOutcome, simulate
from bench.scale.simulator import EngineModel
from bench.workload.trace import TraceRow, WorkloadShape, bursts, requests
from scheduler.policy.limits import TARGETS, ScalingLimits

WARM_S = 7200.0
"""Before the day that is measured: what a policy has to learn, it learns here."""
BEGIN = 4
"""Workers at the beginning of that, for those who change their number."""
MAX_WORKERS = 200
BURST_EVERY_S = 2700.0
BURST_FACTOR = (1.5, 3.0)
CURVE_S = 600.0
"""Between two points of the curves that are kept."""


@dataclass(frozen=True, slots=True)
class Day:
    """Which day, and what it takes to get a worker."""

    seed: int = 1
    hours: float = 24.0
    rate: float = 7.0
    """Requests a second in the mean, without bursts."""
    engine: EngineModel = field(default_factory=EngineModel)

    @property
    def seconds(self) -> float:
        return self.hours * 3600

    @property
    def limits(self) -> ScalingLimits:
        """As they are where nobody has set anything: how long a start takes is found out during the warm-up."""
        return ScalingLimits(1, MAX_WORKERS)


@lru_cache(maxsize=1)
def requests_of(day: Day) -> Sequence[TraceRow]:
    """The day with its warm-up; the measured part begins at two in the morning."""
    seconds = WARM_S + day.seconds
    crowds = bursts(random.Random(day.seed), seconds, every_s=BURST_EVERY_S, factor=BURST_FACTOR)  # noqa: S311
    return tuple(requests(WorkloadShape(rate=day.rate, cv=1.5, wave=0.6, bursts=crowds), day.seed, seconds))


@lru_cache(maxsize=1)
def peak_workers(day: Day) -> int:
    """Workers that can do the work of the day's heaviest minute in a minute, all slots in use all the time."""
    engine, work = day.engine, [0.0] * (int((WARM_S + day.seconds) / 60) + 1)
    for request in requests_of(day):
        if request.at >= WARM_S:
            in_batch = request.answer * engine.step(engine.slots) / engine.slots
            work[int(request.at / 60)] += in_batch + request.prompt * engine.prompt_s
    return math.ceil(max(work) / 60)


def play(day: Day, contender: Contender) -> SimulationOutcome:
    """One contender through one day."""
    begin = contender.workers if isinstance(contender, Static) else BEGIN
    return simulate(contender, requests_of(day), day.seconds, day.engine, warm_s=WARM_S, begin=begin, seed=day.seed)


PENSTOCK, STATIC = "penstock", "static"
CONTENDERS: Mapping[str, Callable[[Day], Contender]] = {
    PENSTOCK: lambda day: Own(day.limits),
    STATIC: lambda day: Static(peak_workers(day)),
    "keda": lambda day: KedaRule(day.limits),
    "hpa": lambda day: Utilisation(day.limits),
    "llumnix": lambda day: Freeness(day.limits),
}
"""Who is there, by name, made for a day."""
RULES = (
    "Penstock: the scheduler's own policy at its defaults, but looking every 2 s.",
    "static: as many workers as do the work of the heaviest minute with every slot in use, all day.",
    "keda: jobs waiting and running over 5.6 (70 % of a worker's slots), HPA defaults behind it.",
    "hpa: slots in use held at 70 %, as CPU-style scaling does; HPA defaults.",
    "llumnix: one more under a freeness of 10 blocks per job, one fewer over 60, every 10 s.",
)


def played(name: str, day: Day) -> dict[str, Any]:
    """The figures of one contender on one day. Shares in percent; workers and jobs there every `CURVE_S`."""
    outcome = play(day, CONTENDERS[name](day))
    curve = [point for point in outcome.curve if point[0] >= WARM_S and point[0] % CURVE_S == 0]
    return {
        "seed": day.seed,
        "name": name,
        "interactive": 100 * outcome.within("interactive", TARGETS["interactive"]),
        "standard": 100 * outcome.within("standard", TARGETS["standard"]),
        "p99_s": outcome.percentile("interactive", 0.99),
        "worker_hours": outcome.worker_hours,
        "share_of_peak": 100 * outcome.worker_s / (peak_workers(day) * day.seconds),
        "most_workers": max(workers for at, workers, _ in outcome.curve if at >= WARM_S),
        "reversals_per_hour": outcome.reversals / day.hours,
        "requests": sum(map(len, outcome.waits.values())),
        "workers": [workers for _, workers, _ in curve],
        "jobs": [round(jobs) for _, _, jobs in curve],
    }


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
