"""Placement: which models run on which GPUs, how many copies of each, chosen greedily by simulation (command place).

A small form of AlpaServe's search: beginning with none, it adds the copy that lets most more requests keep their
objectives, again and again, while memory allows it and something is gained. Copies on one GPU take turns (time
slicing), as SLM-Pareto's replicas do; at most three copies of a model share a GPU, for more gained nothing there.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import product
from random import Random

import click

from planner.answers import PlanAnswer, PlanTable
from planner.cost import knee_of, modelled
from planner.facts import catalogue
from planner.facts.catalogue import Accelerator, PlanError
from planner.load import MAX_BATCH, LatencySlo, PlanInput, Precision, RequestLengths
from planner.options import EFFICIENCY, GPU, GPUS, LEAST, MOST, SLO, plan_command
from planner.roofline import MAX_REPLICAS, SLACK_BYTES, USABLE, copy_bytes, replicas_for
from planner.search import MAX_STEP_TOKENS, ParallelPlan, ReplicaModel, StepMeter, attainment
from planner.simulator.engine import EngineShape, Greedy, ModelEngine, ModelStep, ModelText
from planner.simulator.queues import LANES, ModelWorker, Simulation, TextQueue, by_arrival

REQUESTS = 400
"""Of all models together, in one simulation."""
MIN_GAIN = 0.002
"""Of the share of requests that keep their objectives, for one more copy."""


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


class PlacedWorker(ModelWorker):
    """A copy of a model on a GPU. It takes a text, whose tenant is the model's name, only when its batch is not fuller
    than those of its siblings."""

    def __init__(self, engine: ModelEngine, model: str, gpu: int) -> None:
        super().__init__(engine, Greedy())
        self.model, self.gpu = model, gpu
        self.siblings: Sequence[PlacedWorker] = ()
        self.others: Collection[str] = ()
        """Models that it is no copy of."""

    def fill(self, queue: TextQueue, now_s: float) -> None:
        while len(self.engine.texts) <= min(len(worker.engine.texts) for worker in self.siblings):
            if not self.held and (text := queue.take(now_s, LANES, self.others)) is not None:
                self.held.append(text)
            if not self.held or not self.admits(self.held[0]):
                break
            self.submit(self.held.pop(), now_s)


def place(loads: Sequence[PlanInput]) -> Placement:
    """Choose the copies on the GPUs. Raises PlanError if a model fits on none, or if the loads name different GPUs
    or objectives."""
    first = loads[0]
    for load in loads:
        if (load.device, load.gpus, load.slo) != (first.device, first.gpus, first.slo):
            raise PlanError(f"{load.model.name} and {first.model.name} are not for the same GPUs and objectives")
        load.lengths.check(load.model)
        usable = USABLE * load.device.memory_bytes
        if least_bytes(load) > usable:
            raise PlanError(
                f"{load.model.name} does not fit on one {load.device.name}: it takes {least_bytes(load) / 1e9:.1f} GB "
                f"of {usable / 1e9:.1f} usable; fewer --w-bits or another --gpu would do"
            )
    texts = _texts(loads)
    now = Placement(((0,) * len(loads),) * first.gpus, 0.0)
    while (better := _best_step(now, loads, texts)) is not None:
        now = better
    return now


def least_bytes(load: PlanInput) -> float:
    """Of a copy: weights, workspace and one whole request in 0.95 of the cache."""
    weights, token = copy_bytes(load)
    return weights + SLACK_BYTES + token * (load.lengths.whole + 1) / 0.95


def _best_step(now: Placement, loads: Sequence[PlanInput], texts: Sequence[ModelText]) -> Placement | None:
    """The copy that gains most; None if none gains enough. Every model gets its first copy, whatever it gains."""
    tried: dict[Placed, Placement] = {}
    missing = [model for model in range(len(loads)) if not any(gpu[model] for gpu in now.copies)]
    for gpu, model in product(range(len(now.copies)), missing or range(len(loads))):
        more = tuple(count + (number == model) for number, count in enumerate(now.copies[gpu]))
        copies = (*now.copies[:gpu], more, *now.copies[gpu + 1 :])
        alike = tuple(sorted(copies))  # equal GPUs in any order are one placement
        if alike not in tried and _fits(copies[gpu], loads):
            kept = kept_share(copies, loads, texts)
            tried[alike] = Placement(copies, kept, (*now.steps, kept))
    found = max(tried.values(), key=lambda each: each.kept, default=None)
    return found if found and (missing or found.kept - now.kept >= MIN_GAIN) else None


def kept_share(copies: Placed, loads: Sequence[PlanInput], texts: Sequence[ModelText]) -> float:
    """The share of the texts that keep both objectives; those of a model without a copy do not."""
    workers = [
        _worker(load, gpu, sum(placed))
        for gpu, placed in enumerate(copies)
        for load, count in zip(loads, placed, strict=True)
        for _ in range(count)
    ]
    there = {worker.model for worker in workers}
    for worker in workers:
        worker.siblings = [each for each in workers if each.model == worker.model]
        worker.others = there - {worker.model}
    fresh = [ModelText(text.prompt, text.output, text.limit, text.arrived_s, tenant=text.tenant) for text in texts]
    served = [text for text in fresh if text.tenant in there]
    if served:
        SharedSimulation(TextQueue(by_arrival), workers).run(served)
    return attainment(fresh, loads[0].slo).both


class SharedSimulation(Simulation):
    """A simulation whose workers share GPUs: a step takes as many times longer as copies on its GPU compute at once."""

    _workers: Sequence[PlacedWorker]

    def _duration_s(self, worker: PlacedWorker, step: ModelStep) -> float:  # type: ignore[override]
        stepping = [self._workers[number].gpu for _, number, _ in self._steps]
        return step.duration_s * (1 + stepping.count(worker.gpu))


def _worker(load: PlanInput, gpu: int, replicas: int) -> PlacedWorker:
    """A copy with its share of the GPU's memory in absolute numbers."""
    weights, token = copy_bytes(load)
    room = USABLE * load.device.memory_bytes / replicas - weights - SLACK_BYTES
    costs = StepMeter(ReplicaModel(load, ParallelPlan()))
    shape = EngineShape(int(room / token), MAX_BATCH, MAX_STEP_TOKENS, costs=costs)
    return PlacedWorker(ModelEngine(shape), load.model.name, gpu)


def _fits(placed: Sequence[int], loads: Sequence[PlanInput]) -> bool:
    """Whether each copy fits into its equal share of the GPU's memory."""
    share = USABLE * loads[0].device.memory_bytes / sum(placed)
    return all(
        count <= MAX_REPLICAS and (not count or least_bytes(load) <= share)
        for count, load in zip(placed, loads, strict=True)
    )


def _texts(loads: Sequence[PlanInput]) -> list[ModelText]:
    """Requests to all models for as long as the busiest takes to get its share of them."""
    seconds, texts = REQUESTS / sum(load.checked_rate for load in loads), list[ModelText]()
    for number, load in enumerate(loads):
        random, at, lengths = Random(number), 0.0, load.lengths  # noqa: S311 - a simulation
        before, rate = len(texts), load.checked_rate
        while (at := at + random.expovariate(rate)) < seconds or len(texts) == before:
            texts.append(ModelText(lengths.prompt, lengths.answer, lengths.answer, at, tenant=load.model.name))
    return texts


def place_advice(loads: Sequence[PlanInput], found: Placement) -> str:
    """What is placed where, and whether that is enough."""
    slo, said = loads[0].slo, []
    for number, gpu in enumerate(found.copies, 1):
        names = [f"{count} x {load.model.name}" for load, count in zip(loads, gpu, strict=True) if count]
        said.append(f"GPU {number}: {' + '.join(names) or 'not needed'}")
    told = f"{'; '.join(said)}. {100 * found.kept:.1f} % of the requests keep {slo.words}"
    if found.kept < slo.share:
        told += f", less than the {100 * slo.share:.0f} % that are wanted: give more --gpus"
    return told + "."


# --- command ---------------------------------------------------------------------------------------------------------

FORM = "write MODEL=RATE or MODEL=RATE:IN:OUT, as opt-1.3b=4:512:256"


def load_of(text: str, w_bits: float | None, device: Accelerator) -> PlanInput:
    """The load that a text such as opt-1.3b=4:512:256 describes. Raises PlanError."""
    name, _, numbers = text.partition("=")
    rate, *lengths = numbers.split(":")
    try:
        per_s, tokens = float(rate), [int(each) for each in lengths]
    except ValueError:
        raise PlanError(f"--load {text}: {FORM}") from None
    if not LEAST <= per_s <= MOST or len(lengths) not in (0, 2):
        raise PlanError(f"--load {text}: {FORM}")
    model = catalogue.model(name)
    size = RequestLengths(tokens[0], tokens[1]) if tokens else RequestLengths()
    return PlanInput(model, device, size, Precision.stored(model, w_bits), rate=per_s)


@plan_command("place", GPU, GPUS, SLO, EFFICIENCY, shown="placing")
@click.option("--load", "texts", metavar="MODEL=RATE[:IN:OUT]", multiple=True, required=True,
              help="A model and its requests a second; give it again for others.")  # fmt: skip
@click.option("--w-bits", type=float, help="Bits of a weight of all models [as their files have them].")
def place_command(
    texts: tuple[str, ...], device: Accelerator, gpus: int, w_bits: float | None, slo: LatencySlo, efficiency: float
) -> PlanAnswer:
    """Choose which of several models run on which GPUs, so that most requests keep their objectives.

    \b
    Examples:
      penstock plan place --load opt-1.3b=20 --load opt-13b=2 --gpu h200 --gpus 2
    """
    asked = [load_of(text, w_bits, device) for text in texts]
    loads = [replace(load, gpus=gpus, slo=slo, efficiency=efficiency) for load in asked]
    names = [load.model.name for load in loads]
    if len(set(names)) < len(names):
        raise PlanError("--load names a model twice: add its rates, and give it once")
    found = place(loads)
    shared = {load.model.name: replicas_for(load, knee_of(modelled(load))[0].batch) for load in loads}
    value = {
        "gpu": device.name,
        "gpu_source": device.source,
        "gpus": gpus,
        "kept": found.kept,
        "copies": [dict(zip(names, gpu, strict=True)) for gpu in found.copies],
        "copies_per_gpu_at_the_knee": shared,
        "kept_after_each_copy": found.steps,
    }
    rows = [[f"{at}", *(f"{count}" if count else "-" for count in gpu)] for at, gpu in enumerate(found.copies, 1)]
    said = ", ".join(f"{name} {count}" for name, count in shared.items())
    note = f"Copies that a whole GPU holds with the batch of their knee (at most 3, which gained most): {said}."
    return PlanAnswer(value, [PlanTable(["gpu", *names], rows)], place_advice(loads, found), notes=[note])
