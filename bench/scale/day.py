"""A bursty day: Penstock's policy beside a pool sized for the peak and beside the rules others scale by."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from bench.scale.contenders import Contender, Freeness, KedaRule, Own, Static, Utilisation
from bench.scale.plant import EngineModel
from bench.scale.run import SimulationOutcome, simulate
from bench.workload.generate import WorkloadShape, bursts, requests
from bench.workload.trace import TraceRow
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
