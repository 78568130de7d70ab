"""Days of load that one autoscaler steers on the simulator: bursty, constant but noisy, and with a slow worker."""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

from bench.scale.contenders import Contender, Freeness, KedaRule, Own, Static, Utilisation
from planner.simulator.engine import EngineShape, ModelText, StepCosts
from planner.simulator.pool import PoolEngine, PoolSimulation
from planner.simulator.pool_worker import PoolWorker
from planner.simulator.queues import LANES
from planner.simulator.trace import TraceRow, WorkloadShape, bursts, requests
from scheduler.policy.limits import TARGETS, ScalingLimits

ENGINE = PoolEngine(
    EngineShape(kv_tokens=16_384, slots=8, costs=StepCosts(0.030, text_s=0.001, held_s=0.0, prefill_s=1 / 8000)),
    start_s=60.0,
)
"""Of the days."""
SAMPLE_INTERVAL_S = 60.0
"""Between two points of a curve."""


@dataclass(slots=True)
class SimulationOutcome:
    """Everything after the warm-up."""

    waits: dict[str, array[float]] = field(default_factory=lambda: {lane: array("d") for lane in LANES})
    """Seconds in the queue, by lane."""
    left: dict[str, int] = field(default_factory=dict)
    """Requests that were never begun, by lane."""
    worker_s: float = 0.0
    wants: list[tuple[float, int]] = field(default_factory=list)
    """Every change of the number wanted."""
    curve: list[tuple[float, int, float]] = field(default_factory=list)
    """(time, workers there, jobs that run or wait)."""
    cordons: list[tuple[float, str]] = field(default_factory=list)
    """(time, worker) of each that was cordoned."""
    first_workers: tuple[str, ...] = ()

    def within(self, lane: str, target_s: float) -> float:
        """Share of a lane's requests that were begun in time; those never begun were not."""
        waits = self.waits[lane]
        total = len(waits) + self.left.get(lane, 0)
        return sum(wait <= target_s for wait in waits) / total if total else 1.0

    def percentile(self, lane: str, share: float) -> float:
        """Seconds in the queue."""
        waits = sorted(self.waits[lane])
        return waits[min(len(waits) - 1, int(share * len(waits)))] if waits else 0.0

    @property
    def reversals(self) -> int:
        """Changes of direction of the number wanted."""
        steps = [after - before for (_, before), (_, after) in pairwise(self.wants)]
        return sum((one > 0) != (other > 0) for one, other in pairwise(steps))

    @property
    def worker_hours(self) -> float:
        return self.worker_s / 3600


def simulate(
    contender: Contender,
    requests: Iterable[TraceRow],
    seconds: float,
    engine: PoolEngine,
    *,
    warm_s: float = 0.0,
    begin: int = 1,
    seed: int = 0,
    slow: Mapping[int, tuple[float, float]] | None = None,
) -> SimulationOutcome:
    """Run for `warm_s` and then `seconds`, which are measured, from `begin` ready workers.

    `slow` maps the number of a first worker to (when, how many times slower) it becomes.
    """
    outcome = SimulationOutcome()

    def begun(text: ModelText, waited_s: float) -> None:
        if text.arrived_s >= warm_s:
            outcome.waits[text.lane].append(waited_s)

    simulator = PoolSimulation(engine, seed, on_begun=begun)
    simulator.order(begin, at_once=True)
    simulator.feed(requests)
    first = list(simulator.workers.values())
    outcome.first_workers = tuple(simulator.workers)
    for number, (when, factor) in (slow or {}).items():
        simulator.at(when, partial(_slow_down, simulator, first[number], factor))

    def steer(now: float) -> None:
        want = contender.want(simulator.snapshot(), now)
        if not outcome.wants or outcome.wants[-1][1] != want:
            outcome.wants.append((now, want))
        for name in contender.cordoned:
            if name in simulator.workers and simulator.workers[name].state == "ready":
                outcome.cordons.append((now, name))
        simulator.resize(want, contender.cordoned)

    def sample(now: float) -> None:
        jobs = len(simulator.queue) + sum(worker.running for worker in simulator.workers.values())
        outcome.curve.append((now, len(simulator.workers), jobs))

    simulator.every(contender.every_s, steer)
    simulator.every(SAMPLE_INTERVAL_S, sample)
    simulator.run(warm_s)
    before = simulator.total_worker_s()
    outcome.wants[:] = [(warm_s, outcome.wants[-1][1])] if outcome.wants else []
    simulator.run(warm_s + seconds)
    outcome.worker_s = simulator.total_worker_s() - before
    outcome.left = {name: len(lane.waiting) for name, lane in simulator.queue.lanes.items()}
    return outcome


def _slow_down(simulator: PoolSimulation, worker: PoolWorker, factor: float, _: float) -> None:
    simulator.slow_down(worker, factor)


WARM_S = 7200.0
"""Before the day that is measured: what a policy has to learn, it learns here."""
BEGIN = 4
"""Workers at the beginning of that, for those who change their number."""
MAX_WORKERS = 200
BURST_INTERVAL_S = 2700.0
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
    engine: PoolEngine = ENGINE

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
    crowds = bursts(random.Random(day.seed), seconds, every_s=BURST_INTERVAL_S, factor=BURST_FACTOR)  # noqa: S311
    return tuple(requests(WorkloadShape(rate=day.rate, cv=1.5, wave=0.6, bursts=crowds), day.seed, seconds))


@lru_cache(maxsize=1)
def peak_workers(day: Day) -> int:
    """Workers that can do the work of the day's heaviest minute in a minute, all slots in use all the time."""
    engine, costs, work = day.engine.shape, day.engine.shape.costs, [0.0] * (int((WARM_S + day.seconds) / 60) + 1)
    for request in requests_of(day):
        if request.at >= WARM_S:
            in_batch = request.answer * costs.step_s(engine.slots, 0, 0) / engine.slots
            work[int(request.at / 60)] += in_batch + costs.step_s(0, 0, request.prompt) - costs.step_s(0, 0, 0)
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
    engine, seconds = ENGINE, load.hours * HOUR_S
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
    outcome = simulate(
        Own(ScalingLimits(ward.workers, ward.workers + 2)),
        requests(WorkloadShape(rate=4.2, cv=1.5), ward.seed, SLOW_AT_S * 1.5),
        SLOW_AT_S * 1.5,
        ENGINE,
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
