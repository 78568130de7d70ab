"""Options of plans: what a command takes, each group read into what the arithmetic takes; measures this CPU."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from timeit import repeat
from typing import Any, NamedTuple

import click
import msgspec

from planner.answers import PlanAnswer
from planner.facts import catalogue
from planner.facts.catalogue import Accelerator, ModelShape, PlanError
from planner.load import MAX_BATCH, KvReads, LatencySlo, PlanInput, Precision, RequestLengths
from planner.trace import Workload, workload

CPU = "cpu"
LEAST, MOST = 1e-9, 1e12
"""Of a number that is given, beside 0."""
USUAL = RequestLengths()
"""Without --in and --out."""


class OptionGroup(NamedTuple):
    """Options that together say one thing: a field of PlanInput, or the argument `name`."""

    name: str
    options: Sequence[click.Option]
    read: Callable[..., Any] | None = None
    """Gets by name what its parameters name: values of the options, and what was read before. Raises PlanError. None:
    its option says it."""


@dataclass(frozen=True, slots=True)
class PlanCommand:
    """A plan that the command line can ask for.

    If its groups name a model and a device, its function gets what they read as one PlanInput, `given`; else each by
    the name of its group.
    """

    name: str
    function: Callable[..., PlanAnswer]
    groups: Sequence[OptionGroup]
    shown: str = ""
    """What to show while it computes; "": it is quick, or shows its own progress."""

    def takes(self, name: str) -> bool:
        """Whether the function has this parameter: `watch`, a SearchWatch, so that Ctrl-C shows what it has found; or
        `source`, how --records and --since name a folder and a time."""
        return name in self.function.__annotations__

    @property
    def options(self) -> list[click.Parameter]:
        """The options of its groups, then its own."""
        own = reversed(getattr(self.function, "__click_params__", []))
        return [*(option for group in self.groups for option in group.options), *own]

    def answer(self, **values: Any) -> PlanAnswer:
        """Answer, by the values of all options. Raises PlanError."""
        for option in self.options:
            _check_number(option.opts[0], values.get(option.name or ""))
        for group in self.groups:
            if group.read is not None:
                found = group.read(**{name: values[name] for name in signature(group.read).parameters})
                for option in group.options:
                    values.pop(option.name or "", None)
                values[group.name] = found
        names = {group.name for group in self.groups}
        if names >= {"model", "device"}:
            values["given"] = PlanInput(**{name: values.pop(name) for name in names})
        return self.function(**values)


def plan_command(
    name: str, *groups: OptionGroup, shown: str = ""
) -> Callable[[Callable[..., PlanAnswer]], PlanCommand]:
    """Make a command of a function that returns a PlanAnswer."""
    return lambda function: PlanCommand(name, function, groups, shown)


def _check_number(option: str, value: object) -> None:
    """Refuse what no plan can count with: nan and infinity, and numbers beyond any quantity. Raises PlanError."""
    if isinstance(value, float) and not math.isfinite(value):
        raise PlanError(f"{option} {value:g}: it is no number that a plan can count with")
    if isinstance(value, int | float) and value and not LEAST <= abs(value) <= MOST:
        raise PlanError(f"{option} {value:g}: a plan counts with numbers from {LEAST:g} to {MOST:g}")


def model_named(model: str | None, config: Path | None) -> ModelShape:
    """The model of --model, or of the file of --config. Raises PlanError."""
    if config is None:
        if model is None:
            raise PlanError("no model is named: give --model NAME, such as llama-3.1-8b, or --config config.json")
        return catalogue.model(model)
    if model is not None:
        raise PlanError("--model and --config both name a model: leave one out")
    return _of_gguf(config) if config.suffix == ".gguf" else _of_config(config)


def device_named(gpu: str) -> Accelerator:
    """A device of the catalogue, or this machine's CPU, measured now (a second). Raises PlanError."""
    return measured_cpu() if gpu.lower() == CPU else catalogue.device(gpu)


def _of_config(path: Path) -> ModelShape:
    try:
        config = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise PlanError(f"--config {path} cannot be read: {error.strerror or error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PlanError(f"{path} is no config.json of a model: {error}") from None
    return catalogue.from_config(config, path.parent.name if path.stem == "config" and path.parent.name else path.stem)


def _of_gguf(path: Path) -> ModelShape:
    from workers.engines.llamacpp.gguf import GgufError, read  # noqa: PLC0415 - most plans read none

    try:
        file = read(path)
    except (GgufError, OSError) as error:
        raise PlanError(str(error)) from None
    starts = sorted({tensor.offset for tensor in file.tensors})
    ends = dict(zip(starts, [*starts[1:], file.size], strict=True))
    # A type whose size the parser does not know takes what lies before the next tensor.
    sizes = {tensor.name: tensor.nbytes or ends[tensor.offset] - tensor.offset for tensor in file.tensors}
    return catalogue.from_gguf(file.metadata, sizes, file.vocabulary, path.stem)


def workload_of(prompt: int | None, answer: int | None, named: str | None) -> Workload:
    """What --in, --out and --workload say; without a name if it is of the first two. Raises PlanError."""
    if named is None:
        lengths = RequestLengths(USUAL.prompt if prompt is None else prompt, USUAL.answer if answer is None else answer)
        return Workload("", "--in and --out", lengths)
    if prompt is not None or answer is not None:
        raise PlanError("--workload and --in or --out both say lengths: leave one out")
    return workload(named)


def _option(flag: str, text: str, default: float | None = None, name: str = "") -> click.Option:
    """An option that takes a number, of the kind of its default: whole if it has none, and `text` says it then."""
    kind = float if isinstance(default, float) else int
    names = [flag, name] if name else [flag]
    return click.Option(names, type=kind, default=default, show_default=default is not None, help=text)


NAME_OPTIONS = [
    click.Option(["--model"], metavar="NAME", help="Model, such as llama-3.1-8b."),
    click.Option(["--config"], type=click.Path(path_type=Path), help="A model's own config.json, or its GGUF file."),
]
MODEL = OptionGroup("model", NAME_OPTIONS, model_named)
GPU_OPTION = click.Option(["--gpu"], metavar="NAME", required=True, help="GPU, such as h200; cpu: this machine's.")
GPU = OptionGroup("device", [GPU_OPTION], device_named)
NAMED_LENGTHS = "Named lengths, or a file of your own, instead of --in and --out."
LENGTH_OPTIONS = [
    _option("--in", f"Tokens of a prompt [{USUAL.prompt}].", name="prompt"),
    _option("--out", f"Tokens of an answer [{USUAL.answer}].", name="answer"),
    click.Option(["--workload", "named"], metavar="NAME|FILE", help=NAMED_LENGTHS),
]
WORKLOAD = OptionGroup("workload", LENGTH_OPTIONS, workload_of)
LENGTHS = OptionGroup(
    "lengths", LENGTH_OPTIONS, lambda prompt, answer, named: workload_of(prompt, answer, named).lengths
)
BIT_OPTIONS = [
    click.Option(["--w-bits", "w"], type=float, help="Bits of a weight, from 1 [as the file has them]."),
    click.Option(["--a-bits", "a"], type=float, default=16, show_default=True, help="Bits of activations."),
    click.Option(["--kv-bits", "kv"], type=float, default=16, show_default=True, help="Bits of the KV cache."),
]
BITS = OptionGroup("precision", BIT_OPTIONS, Precision.stored)
READ_OPTIONS = [
    click.Option(
        ["--kv-budget", "budget"], type=int, default=0, help="Tokens of the cache that a step reads at most [all]."
    ),
    click.Option(
        ["--streaming-heads", "streaming"], type=float, default=0.0, help="Share of the heads that stream [0]."
    ),
    _option("--stream-window", "Tokens of sink and window of a streaming head.", 256, name="window"),
]
READS = OptionGroup("reads", READ_OPTIONS, KvReads)
TP = OptionGroup("tp", [_option("--tp", "GPUs that share every layer (tensor parallelism).", 1)])
GPUS = OptionGroup("gpus", [_option("--gpus", "How many such GPUs.", 1)])
EFFICIENCY_TEXT = "Share of the roofline that the engine reaches; 1: the bound itself."
EFFICIENCY = OptionGroup("efficiency", [_option("--efficiency", EFFICIENCY_TEXT, 0.7)])
SLO_OPTIONS = [
    _option("--ttft-ms", "Longest time to the first token, ms.", 200.0),
    _option("--tpot-ms", "Longest time between tokens, ms.", 100.0),
    _option("--share", "Share of the requests that must keep both.", 0.9),
]
SLO = OptionGroup("slo", SLO_OPTIONS, LatencySlo.given)


def max_batch(default: int = MAX_BATCH) -> OptionGroup:
    """--max-batch, with this default."""
    return OptionGroup("max_batch", [_option("--max-batch", "Most requests in one replica.", default)])


def search_options(batch: int = MAX_BATCH) -> Sequence[OptionGroup]:
    """The options of every plan that puts a model on several GPUs."""
    return MODEL, GPU, GPUS, LENGTHS, BITS, max_batch(batch), EFFICIENCY


# --- this machine's CPU ----------------------------------------------------------------------------------------------

COPY_BYTES = 1 << 27
"""Bytes of the copy that measures the memory's bandwidth: more than any cache holds."""
SIDE = 1024
"""Rows of the matrices that are multiplied."""
REPEATS = 6
"""Of which the fastest counts."""
LINK_BYTES_S, HOP_S = 1e9, 50e-6
"""To another machine, over 10 Gbit/s, and its latency: assumed."""


def measured_cpu() -> Accelerator:
    """Measure this CPU. Raises PlanError if numpy is not installed, without which nothing here computes fast enough."""
    try:
        import numpy as np  # noqa: PLC0415 - optional
    except ImportError:
        raise PlanError("--gpu cpu is measured with numpy, which is not installed: pip install '.[llamacpp]'") from None
    source, target = np.ones(COPY_BYTES // 8), np.zeros(COPY_BYTES // 8)
    left, right = np.ones((SIDE, SIDE), np.float32), np.ones((SIDE, SIDE), np.float32)
    copied = min(repeat(lambda: np.copyto(target, source), number=1, repeat=REPEATS))
    multiplied = min(repeat(lambda: left @ right, number=1, repeat=REPEATS))
    return Accelerator(
        name=CPU,
        source=f"measured now: {os.cpu_count()} cores, a copy of {COPY_BYTES >> 20} MiB, a float32 product of {SIDE}^2",
        memory_bytes=float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        bytes_s=2 * COPY_BYTES / copied,  # read and written
        peak={16: 2 * SIDE**3 / multiplied},
        link_bytes_s=LINK_BYTES_S,
        hop_s=HOP_S,
        watts=0.0,
    )
