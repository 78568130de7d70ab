"""Placement: which models run on which GPUs, how many copies of each, chosen greedily by simulation.

A small form of AlpaServe's search: beginning with none, it adds the copy that lets most more requests keep their
objectives, again and again, while memory allows it and something is gained. Copies on one GPU take turns (time
slicing), as SLM-Pareto's replicas do; at most three copies of a model share a GPU, for more gained nothing there.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain
from random import Random

from planner.facts.catalogue import Accelerator, PlanError
from planner.facts.model import ModelShape
from planner.load import Precision, RequestLengths
from planner.search import MAX_BATCH, MAX_STEP_TOKENS, LatencySlo, ParallelPlan, ReplicaModel, StepMeter, attainment
from planner.simulator.engine import EngineShape, Greedy, ModelEngine, ModelText
from planner.simulator.queues import ModelWorker, Simulation, SortedQueue, by_arrival
from scheduler.policy.snapshot import MAX_REPLICAS, SLACK_BYTES, USABLE, Footprint, replicas_for

REQUESTS = 400
"""Of all models together, in one simulation."""
MIN_GAIN = 0.002
"""Of the share of requests that keep their objectives, for one more copy."""


@dataclass(frozen=True, slots=True)
class ModelLoad:
    """One model and what is asked of it."""

    model: ModelShape
    rate: float
    """Requests a second."""
    lengths: RequestLengths
    precision: Precision

    @property
    def footprint(self) -> Footprint:
        return Footprint(
            round(self.model.weight_bytes(self.precision.w)),
            round(self.model.kv_token_bytes(self.precision.kv)),
            prompt=self.lengths.prompt,
            answer=self.lengths.answer,
        )

    @property
    def least_bytes(self) -> float:
        """Of a copy: weights, workspace and one whole request in 0.95 of the cache."""
        return self.footprint.weights + SLACK_BYTES + self.footprint.kv_token * (self.lengths.whole + 1) / 0.95


Placed = tuple[tuple[int, ...], ...]
"""For each GPU, the copies of each model."""


@dataclass(frozen=True, slots=True)
class Placement:
    """What the search has found."""

    copies: Placed
    kept: float
    """Share of all requests that keep both objectives."""
    steps: tuple[float, ...] = ()
    """The share after each copy that was added."""


@dataclass(slots=True)
class SharedGpu:
    """One GPU, whose copies take turns."""

    stepping: int = 0
    """Copies that compute a step now."""


class ModelQueues(SortedQueue):
    """A queue for each model; a worker takes from that of its own."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(by_arrival)
        self.by_model = {name: SortedQueue(by_arrival) for name in names}

    def __len__(self) -> int:
        return sum(map(len, self.by_model.values()))

    def put(self, text: ModelText, now_s: float) -> None:
        self.by_model[text.model].put(text, now_s)


@dataclass(slots=True)
class SharedStep:
    """Step time on a shared GPU: as many times longer as copies compute at once."""

    meter: StepMeter
    gpu: SharedGpu

    def step_s(self, texts: int, held: int, prefilled: int, squares: int | None = None) -> float:
        return self.meter.step_s(texts, held, prefilled) * max(1, self.gpu.stepping)


class PlacedWorker(ModelWorker):
    """A copy of a model on a GPU. It takes a text only when its batch is not fuller than those of its siblings."""

    def __init__(self, engine: ModelEngine, model: str, gpu: SharedGpu) -> None:
        super().__init__(engine, Greedy())
        self.model, self.gpu = model, gpu
        self.siblings: Sequence[PlacedWorker] = ()

    def fill(self, queue: ModelQueues, now_s: float) -> None:  # type: ignore[override]
        mine = queue.by_model[self.model]
        while len(mine) or self.held:
            if self._load() > min(worker._load() for worker in self.siblings):
                break
            if not self.held and (text := mine.take(now_s, ())) is not None:
                self.held.append(text)
            if not self.held or not self.admits(self.held[0]):
                break
            self.submit(self.held.pop(), now_s)

    def _load(self) -> int:
        return len(self.engine.running) + len(self.engine.waiting)


def place(loads: Sequence[ModelLoad], device: Accelerator, gpus: int, slo: LatencySlo, efficiency: float) -> Placement:
    """Choose the copies. Raises PlanError if a model fits on no GPU."""
    if gpus < 1:
        raise PlanError(f"{gpus} GPUs: give --gpus from 1")
    for load in loads:
        load.lengths.check(load.model)
        if load.least_bytes > USABLE * device.memory_bytes:
            raise PlanError(
                f"{load.model.name} does not fit on one {device.name}: it takes {load.least_bytes / 1e9:.1f} GB of "
                f"{USABLE * device.memory_bytes / 1e9:.1f} usable; fewer --w-bits or another --gpu would do"
            )
    texts = _texts(loads)
    now = Placement(((0,) * len(loads),) * gpus, 0.0)
    while (better := _best_step(now, loads, device, slo, efficiency, texts)) is not None:
        now = better
    return now


def _best_step(
    now: Placement, loads: Sequence[ModelLoad], device: Accelerator, slo: LatencySlo, efficiency: float,
    texts: Sequence[ModelText],
) -> Placement | None:  # fmt: skip
    """The copy that gains most; None if none gains enough. Every model gets its first copy, whatever it gains."""
    tried: dict[Placed, Placement] = {}
    missing = [model for model in range(len(loads)) if not any(gpu[model] for gpu in now.copies)]
    for gpu, model in ((gpu, model) for gpu in range(len(now.copies)) for model in missing or range(len(loads))):
        copies = _with(now.copies, gpu, model)
        if not _fits(copies[gpu], loads, device) or _sorted(copies) in tried:
            continue
        kept = kept_share(copies, loads, device, slo, efficiency, texts)
        tried[_sorted(copies)] = Placement(copies, kept, (*now.steps, kept))
    if not tried:
        return None
    found = max(tried.values(), key=lambda each: each.kept)
    return found if missing or found.kept - now.kept >= MIN_GAIN else None


def kept_share(
    copies: Placed,
    loads: Sequence[ModelLoad],
    device: Accelerator,
    slo: LatencySlo,
    efficiency: float,
    texts: Sequence[ModelText],
) -> float:
    """The share of the texts that keep both objectives; those of a model without a copy do not."""
    workers = []
    for placed in copies:
        gpu, replicas = SharedGpu(), sum(placed)
        for load, count in zip(loads, placed, strict=True):
            workers += [_worker(load, device, gpu, replicas, efficiency) for _ in range(count)]
    for worker in workers:
        worker.siblings = [each for each in workers if each.model == worker.model]
    there = {worker.model for worker in workers}
    fresh = [ModelText(text.prompt, text.output, text.limit, text.arrived_s, model=text.model) for text in texts]
    served = [text for text in fresh if text.model in there]
    if served:
        SharedSimulation(ModelQueues(there), workers).run(served)
    return attainment(fresh, slo).both


class SharedSimulation(Simulation):
    """A simulation whose workers share GPUs."""

    def _begin_step(self, number: int, worker: ModelWorker) -> bool:
        assert isinstance(worker, PlacedWorker)
        worker.gpu.stepping += 1
        begun = super()._begin_step(number, worker)
        worker.gpu.stepping -= not begun
        return begun

    def _end_step(self, worker: ModelWorker, step: object) -> None:
        assert isinstance(worker, PlacedWorker)
        worker.gpu.stepping -= 1
        super()._end_step(worker, step)  # type: ignore[arg-type]


def _worker(load: ModelLoad, device: Accelerator, gpu: SharedGpu, replicas: int, efficiency: float) -> PlacedWorker:
    """A copy with its share of the GPU's memory in absolute numbers."""
    room = USABLE * device.memory_bytes / replicas - load.footprint.weights - SLACK_BYTES
    replica = ReplicaModel(load.model, device, ParallelPlan(), load.precision, load.lengths.prompt, efficiency)
    costs = SharedStep(StepMeter(replica), gpu)
    shape = EngineShape(int(room / load.footprint.kv_token), MAX_BATCH, MAX_STEP_TOKENS, costs=costs)
    return PlacedWorker(ModelEngine(shape), load.model.name, gpu)


def _fits(placed: Sequence[int], loads: Sequence[ModelLoad], device: Accelerator) -> bool:
    """Whether each copy fits into its equal share of the GPU's memory."""
    share = USABLE * device.memory_bytes / sum(placed)
    return all(
        count <= MAX_REPLICAS and (not count or load.least_bytes <= share)
        for count, load in zip(placed, loads, strict=True)
    )


def _with(copies: Placed, gpu: int, model: int) -> Placed:
    changed = tuple(count + (number == model) for number, count in enumerate(copies[gpu]))
    return (*copies[:gpu], changed, *copies[gpu + 1 :])


def _sorted(copies: Placed) -> Placed:
    """Equal GPUs in any order are one placement."""
    return tuple(sorted(copies))


def _texts(loads: Sequence[ModelLoad]) -> list[ModelText]:
    """Requests to all models for as long as the busiest takes to get its share of them."""
    whole = sum(load.rate for load in loads)
    return list(chain.from_iterable(_arrivals(load, REQUESTS / whole, number) for number, load in enumerate(loads)))


def _arrivals(load: ModelLoad, seconds: float, seed: int) -> list[ModelText]:
    random, at = Random(seed), 0.0  # noqa: S311 - a simulation
    found: list[ModelText] = []
    while (at := at + random.expovariate(load.rate)) < seconds or not found:
        found.append(
            ModelText(load.lengths.prompt, load.lengths.answer, load.lengths.answer, at, model=load.model.name)
        )
    return found


def copies_per_gpu(load: ModelLoad, device: Accelerator, knee: int) -> int:
    """Copies of one model that share a GPU, each with its knee's requests (SLM-Pareto; at most three)."""
    return replicas_for(load.footprint, math.floor(device.memory_bytes), knee)


def place_advice(loads: Sequence[ModelLoad], found: Placement, slo: LatencySlo) -> str:
    """What is placed where, and what the last copy gained."""
    said = []
    for number, gpu in enumerate(found.copies, 1):
        names = [f"{count} x {load.model.name}" for load, count in zip(loads, gpu, strict=True) if count]
        if names:
            said.append(f"GPU {number}: {' + '.join(names)}")
    told = f"{'; '.join(said)}. {100 * found.kept:.1f} % of the requests keep {slo.words}"
    if len(found.steps) > 1:
        told += f"; the last copy gained {100 * (found.steps[-1] - found.steps[-2]):.1f} points"
    if found.kept < slo.share:
        told += f", less than the {100 * slo.share:.0f} % that are wanted: give more --gpus"
    empty = sum(not sum(gpu) for gpu in found.copies)
    return told + (f". GPUs that are not needed: {empty}." if empty else ".")
