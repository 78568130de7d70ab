"""`penstock plan place`: which of several models run on which GPUs, and how many copies of each."""

from __future__ import annotations

import click

from cli.plan.command import (
    LEAST,
    MOST,
    PlanAnswer,
    PlanTable,
    efficiency_option,
    gpu_option,
    gpus_option,
    plan_command,
    slo_options,
)
from planner.cost import knee_of
from planner.facts import catalogue
from planner.facts.catalogue import PlanError
from planner.facts.device import Accelerator
from planner.knee import modelled
from planner.load import Precision, RequestLengths
from planner.placement import ModelLoad, copies_per_gpu, place_advice
from planner.placement import place as placed
from planner.roofline import RooflineInput
from planner.search import LatencySlo

FORM = "write MODEL=RATE or MODEL=RATE:IN:OUT, as opt-1.3b=4:512:256"


def load_of(text: str, w_bits: float | None) -> ModelLoad:
    """The load that a text such as opt-1.3b=4:512:256 describes. Raises PlanError."""
    name, _, numbers = text.partition("=")
    rate, *lengths = numbers.split(":")
    try:
        found = float(rate), [int(each) for each in lengths]
    except ValueError:
        raise PlanError(f"--load {text}: {FORM}") from None
    if not LEAST <= found[0] <= MOST or len(lengths) not in (0, 2):
        raise PlanError(f"--load {text}: {FORM}")
    model = catalogue.model(name)
    tokens = RequestLengths(found[1][0], found[1][1]) if found[1] else RequestLengths()
    return ModelLoad(model, found[0], tokens, Precision.stored(model, w_bits))


@plan_command("place", shown="placing")
@click.option("--load", "texts", metavar="MODEL=RATE[:IN:OUT]", multiple=True, required=True,
              help="A model and its requests a second; give it again for others.")  # fmt: skip
@gpu_option
@gpus_option
@click.option("--w-bits", type=float, help="Bits of a weight of all models [as their files have them].")
@slo_options
@efficiency_option
def place(
    texts: tuple[str, ...], device: Accelerator, gpus: int, w_bits: float | None, slo: LatencySlo, efficiency: float
) -> PlanAnswer:
    """Choose which of several models run on which GPUs, so that most requests keep their objectives."""
    loads = [load_of(text, w_bits) for text in texts]
    names = [load.model.name for load in loads]
    if len(set(names)) < len(names):
        raise PlanError("--load names a model twice: add its rates, and give it once")
    found = placed(loads, device, gpus, slo, efficiency)
    shared = {load.model.name: _shared(load, device, efficiency) for load in loads}
    value = {
        "gpu": device.name,
        "gpu_source": device.source,
        "gpus": gpus,
        "kept": found.kept,
        "copies": [dict(zip(names, gpu, strict=True)) for gpu in found.copies],
        "copies_per_gpu_at_the_knee": shared,
        "kept_after_each_copy": found.steps,
    }
    rows = [
        [f"{number}", *(f"{count}" if count else "-" for count in gpu)] for number, gpu in enumerate(found.copies, 1)
    ]
    note = ", ".join(f"{name} {count}" for name, count in shared.items())
    return PlanAnswer(
        value,
        [PlanTable(["gpu", *names], rows)],
        place_advice(loads, found, slo),
        notes=[f"Copies that a whole GPU holds with the batch of their knee (at most 3, which gained most): {note}."],
    )


def _shared(load: ModelLoad, device: Accelerator, efficiency: float) -> int:
    """Copies of a model on a GPU of its own."""
    points = modelled(RooflineInput(load.model, device, load.precision), load.lengths, efficiency)
    return copies_per_gpu(load, device, knee_of(points)[0].batch)
