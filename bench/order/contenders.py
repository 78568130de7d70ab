"""Contenders of the simulator: queue, worker and engine of each, by name. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

from planner.simulator.engine import EngineShape, Greedy, ModelEngine, ModelText, Ungated
from planner.simulator.queues import (
    ModelWorker,
    PenstockQueue,
    PenstockWorker,
    Simulation,
    SortedQueue,
    TextQueue,
    by_arrival,
    by_lane,
)
from streaming.fleet.settings import LatencyTargets

OURS, FIFO, LANES, VLLM = "penstock", "FIFO", "lanes only", "vLLM's priority"

Contender = Callable[[EngineShape, int, LatencyTargets], tuple[TextQueue, ModelWorker]]


def _penstock(shape: EngineShape, seed: int, targets: LatencyTargets) -> tuple[TextQueue, ModelWorker]:
    random = Random(seed)  # noqa: S311 - a simulation
    return PenstockQueue(), PenstockWorker(ModelEngine(shape), random, targets)


def _fifo(shape: EngineShape, _seed: int, _targets: LatencyTargets) -> tuple[TextQueue, ModelWorker]:
    return SortedQueue(by_arrival), ModelWorker(ModelEngine(shape), Greedy())


def _lanes(shape: EngineShape, _seed: int, _targets: LatencyTargets) -> tuple[TextQueue, ModelWorker]:
    return SortedQueue(by_lane), ModelWorker(ModelEngine(shape), Greedy())


def _vllm(shape: EngineShape, _seed: int, _targets: LatencyTargets) -> tuple[TextQueue, ModelWorker]:
    return SortedQueue(by_arrival), ModelWorker(ModelEngine(replace(shape, by_rank=True)), Ungated("MAX_UTILIZATION"))


CONTENDERS: dict[str, Contender] = {OURS: _penstock, FIFO: _fifo, LANES: _lanes, VLLM: _vllm}

NOTES = {
    OURS: "Penstock: the order, the gate, preemption, and, with targets for chats, co-location; the product's code.",
    FIFO: "FIFO: by arrival. An engine gets the next text while the texts fit as they are now, with 5 % of the cache "
    "free; it evicts the youngest if they grow beyond it.",
    LANES: "lanes only: strict priority between lanes, by arrival in a lane; otherwise as FIFO.",
    VLLM: "vLLM's priority: the engine has everything at once. It takes the lowest priority number first, then the "
    "earliest arrival; if the running texts grow beyond the cache, it evicts the last of them in that order, and "
    "computes it again later.",
}


def ran(
    name: str,
    texts: Sequence[ModelText],
    shape: EngineShape,
    seed: int,
    targets: LatencyTargets = LatencyTargets(),  # noqa: B008 - frozen
    until_s: float = float("inf"),
) -> tuple[float, ModelWorker]:
    """Run the texts, which keep what came of them. Returns the time and the worker."""
    queue, worker = CONTENDERS[name](shape, seed, targets)
    return Simulation(queue, [worker]).run(texts, until_s), worker
