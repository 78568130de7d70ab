"""One contender steering one simulator through one workload, and what came of it."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

from bench.scale.contenders import Contender
from bench.scale.simulator import LANES, EngineModel, PoolSimulator, SimWorker
from bench.workload.trace import TraceRow

SAMPLE_S = 60.0
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
    engine: EngineModel,
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

    def begun(request: TraceRow, waited: float) -> None:
        if simulator.now - waited >= warm_s:
            outcome.waits[request.lane].append(waited)

    simulator = PoolSimulator(engine, seed, on_begun=begun)
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
        jobs = sum(map(len, simulator.lanes.values())) + sum(worker.running for worker in simulator.workers.values())
        outcome.curve.append((now, len(simulator.workers), jobs))

    simulator.every(contender.every_s, steer)
    simulator.every(SAMPLE_S, sample)
    simulator.run(warm_s)
    before = simulator.total_worker_s()
    outcome.wants[:] = [(warm_s, outcome.wants[-1][1])] if outcome.wants else []
    simulator.run(warm_s + seconds)
    outcome.worker_s = simulator.total_worker_s() - before
    outcome.left = {name: len(lane) for name, lane in simulator.lanes.items()}
    return outcome


def _slow_down(simulator: PoolSimulator, worker: SimWorker, factor: float, _: float) -> None:
    simulator.slow_down(worker, factor)
