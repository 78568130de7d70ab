"""Plan command: adds the options that all plans share, and prints a plan as tables and advice, or as JSON."""

from __future__ import annotations

import functools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import click

from cli.options import Command, json_option
from cli.output import DONE, INTERRUPTED, USAGE, Problem, emit, fitted, note, print_json, print_table
from cli.progress import ProgressLine
from planner.facts import catalogue
from planner.facts.catalogue import PlanError
from planner.facts.device import Accelerator
from planner.facts.model import ModelShape
from planner.facts.model_config import from_config, from_gguf
from planner.goodput import Workload, mix_of, slo_of, workloads
from planner.goodput import workload as workload_named
from planner.load import KvReads, Precision, RequestLengths
from planner.search import MAX_BATCH, BatchLimits, SearchInput, SearchWatch

CPU = "cpu"


def model_named(name: str | None, config: Path | None) -> ModelShape:
    """The model of --model, or of the file of --config. Raises PlanError."""
    if config is None:
        if name is None:
            raise PlanError("no model is named: give --model NAME, such as llama-3.1-8b, or --config config.json")
        return catalogue.model(name)
    if name is not None:
        raise PlanError("--model and --config both name a model: leave one out")
    return _of_gguf(config) if config.suffix == ".gguf" else _of_config(config)


def device_named(name: str) -> Accelerator:
    """A device of the catalogue, or this machine's CPU, measured now (a second). Raises PlanError."""
    if name.lower() != CPU:
        return catalogue.device(name)
    from cli.plan.command import measured_cpu  # noqa: PLC0415 - numpy, which only this needs

    return measured_cpu()


def _of_config(path: Path) -> ModelShape:
    try:
        config = json.loads(path.read_bytes())
    except OSError as error:
        raise PlanError(f"--config {path} cannot be read: {error.strerror or error}") from None
    except RecursionError:
        raise PlanError(f"{path} is no config.json of a model: it nests too deep") from None
    except ValueError as error:
        raise PlanError(f"{path} is no config.json of a model: {error}") from None
    if not isinstance(config, dict):
        raise PlanError(f"{path} is no config.json of a model: it holds no object")
    return from_config(config, path.parent.name if path.stem == "config" and path.parent.name else path.stem)


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
    return from_gguf(file.metadata, sizes, file.vocabulary, path.stem)


Rows: TypeAlias = Sequence[Sequence[str]]
NEEDS = "needs"
"""Attribute of a command's function: what must be given."""
MODEL = "--model NAME (such as llama-3.1-8b; or --config FILE)"
GPU = "--gpu NAME (such as h200)"
LEAST, MOST = 1e-9, 1e12
"""Of a number that is given, beside 0."""
USUAL = RequestLengths()
"""Without --in and --out."""


@dataclass(frozen=True, slots=True)
class PlanTable:
    """A table of a plan; its header names the units."""

    header: Sequence[str]
    rows: Rows
    title: str = ""


@dataclass(frozen=True, slots=True)
class PlanAnswer:
    """What a plan command has found."""

    value: Mapping[str, Any]
    """For --json; `advice` is added."""
    tables: Sequence[PlanTable]
    advice: str
    """A sentence with its reason."""
    plot: str = ""
    notes: Sequence[str] = field(default_factory=tuple)
    exit_code: int = DONE

    def print(self, *, as_json: bool) -> None:
        if as_json:
            print_json({**self.value, "advice": self.advice})
            return
        for table in self.tables:
            if table.title:
                emit(f"{table.title}\n")
            print_table(table.header, table.rows)
            emit("\n")
        if self.plot:
            emit("\n".join(part for line in self.plot.split("\n") for part in fitted(sys.stdout, line)) + "\n\n")
        for line in (self.advice, *self.notes):
            emit("\n".join(fitted(sys.stdout, line)) + "\n")


def plan_command(
    name: str, *, shown: str = "", watched: bool = False
) -> Callable[[Callable[..., PlanAnswer]], click.Command]:
    """Make a command of a function that returns a PlanAnswer. A PlanError becomes one line and exit code 2.

    Args:
        shown: what stderr shows while the function computes; "": it is quick, or shows its own progress.
        watched: the function takes a SearchWatch, so that Ctrl-C shows what it has found.
    """

    def decorate(function: Callable[..., PlanAnswer]) -> click.Command:
        needs: Sequence[str] = getattr(function, NEEDS, ())

        def call(as_json: bool, **arguments: Any) -> int:
            try:
                check_given(needs, arguments)
                check_numbers(command, arguments)
                with ProgressLine(sys.stderr, os.environ, quiet=as_json, delay_s=1.0) as progress:
                    progress.phase(shown)
                    watch = SearchWatch(partial(progress.amount, shown))
                    answer = function(**arguments, **({"watch": watch} if watched else {}))
                answer.print(as_json=as_json)
                if watch.interrupted:
                    note("interrupted: these are the best of those that were tried")
                    return INTERRUPTED
            except PlanError as error:
                raise Problem(str(error), exit_code=USAGE, code="plan") from None
            return answer.exit_code

        command = click.command(name, cls=Command, help=function.__doc__)(json_option(call))
        command.params[:0] = reversed(getattr(function, "__click_params__", []))
        return command

    return decorate


def check_given(needs: Sequence[str], arguments: Mapping[str, Any]) -> None:
    """Refuse a plan without its model or GPU, and name both if both are missing. Raises PlanError."""
    has_model = arguments.get("model") is not None or arguments.get("config") is not None
    missing = [each for each in needs if not (has_model if each is MODEL else arguments.get("gpu") is not None)]
    if missing:
        raise PlanError(f"not enough is named: give {' and '.join(missing)}")


def check_numbers(command: click.Command, arguments: Mapping[str, Any]) -> None:
    """Refuse what no plan can count with: nan and infinity, and numbers beyond any quantity. Raises PlanError."""
    for param in command.params:
        value = arguments.get(param.name or "")
        if isinstance(value, float) and not math.isfinite(value):
            raise PlanError(f"{param.opts[0]} {value:g}: it is no number that a plan can count with")
        if isinstance(value, int | float) and value and not LEAST <= abs(value) <= MOST:
            raise PlanError(f"{param.opts[0]} {value:g}: a plan counts with numbers from {LEAST:g} to {MOST:g}")


def model_options(function: Callable[..., PlanAnswer]) -> Callable[..., PlanAnswer]:
    """Add --model and --config; the function gets `model`."""

    @functools.wraps(function)
    def call(model: str | None, config: Path | None, **arguments: Any) -> PlanAnswer:
        return function(model=model_named(model, config), **arguments)

    setattr(call, NEEDS, (MODEL, *getattr(function, NEEDS, ())))
    text = "A model's own config.json, or its GGUF file."
    call = click.option("--config", type=click.Path(path_type=Path), help=text)(call)
    return click.option("--model", metavar="NAME", help="Model, such as llama-3.1-8b.")(call)


def gpu_option(function: Callable[..., PlanAnswer]) -> Callable[..., PlanAnswer]:
    """Add --gpu; the function gets `device`."""

    @functools.wraps(function)
    def call(gpu: str, **arguments: Any) -> PlanAnswer:
        return function(device=device_named(gpu), **arguments)

    setattr(call, NEEDS, (GPU, *getattr(function, NEEDS, ())))
    return click.option("--gpu", metavar="NAME", help="GPU, such as h200; cpu: this machine's.")(call)


def length_options(function: Callable[..., PlanAnswer]) -> Callable[..., PlanAnswer]:
    """Add --in, --out and --workload; the function gets `lengths`."""

    @functools.wraps(function)
    def call(workload: Workload, **arguments: Any) -> PlanAnswer:
        return function(lengths=workload.lengths, **arguments)

    return workload_options(call)


def workload_options(function: Callable[..., PlanAnswer]) -> Callable[..., PlanAnswer]:
    """Add --in, --out and --workload; the function gets `workload`, without a name if it is of --in and --out."""

    @functools.wraps(function)
    def call(prompt: int | None, answer: int | None, workload: str | None, **arguments: Any) -> PlanAnswer:
        return function(workload=workload_of(prompt, answer, workload), **arguments)

    text = "Named lengths, or a file of your own, instead of --in and --out."
    call = click.option("--workload", metavar="NAME|FILE", help=text)(call)
    call = click.option("--out", "answer", type=int, help=f"Tokens of an answer [{USUAL.answer}].")(call)
    return click.option("--in", "prompt", type=int, help=f"Tokens of a prompt [{USUAL.prompt}].")(call)


def workload_of(prompt: int | None, answer: int | None, name: str | None) -> Workload:
    """What the three options say. Raises PlanError."""
    if name is None:
        lengths = RequestLengths(USUAL.prompt if prompt is None else prompt, USUAL.answer if answer is None else answer)
        return Workload("", "--in and --out", lengths)
    if prompt is not None or answer is not None:
        raise PlanError("--workload and --in or --out both say lengths: leave one out")
    from cli.plan.records import is_records, records_in, rows_of  # noqa: PLC0415 - most plans read none

    path = Path(name)
    if name.lower() not in workloads() and path.exists() and is_records(path):
        rows, _ = rows_of(records_in(path).requests)
        return Workload(path.name, f"the records {path}", mix_of(((row.prompt, row.answer) for row in rows), name))
    return workload_named(name)


def bits_options(function: Callable[..., PlanAnswer]) -> Callable[..., PlanAnswer]:
    """Add --w-bits, --a-bits and --kv-bits; the function gets `precision`, a function of the model."""

    @functools.wraps(function)
    def call(w_bits: float | None, a_bits: float, kv_bits: float, model: ModelShape, **arguments: Any) -> PlanAnswer:
        return function(model=model, precision=Precision.stored(model, w_bits, a_bits, kv_bits), **arguments)

    call = click.option("--kv-bits", type=float, default=16, show_default=True, help="Bits of the KV cache.")(call)
    call = click.option("--a-bits", type=float, default=16, show_default=True, help="Bits of activations.")(call)
    return click.option("--w-bits", type=float, help="Bits of a weight, from 1 [as the file has them].")(call)


def reads_options(function: Callable[..., PlanAnswer]) -> Callable[..., PlanAnswer]:
    """Add the options of sparse cache reads; the function gets `reads`."""

    @functools.wraps(function)
    def call(kv_budget: int, streaming_heads: float, stream_window: int, **arguments: Any) -> PlanAnswer:
        return function(reads=KvReads(kv_budget, streaming_heads, stream_window), **arguments)

    text = "Tokens of sink and window of a streaming head."
    call = click.option("--stream-window", type=int, default=256, show_default=True, help=text)(call)
    text = "Share of the heads that stream."
    call = click.option("--streaming-heads", type=float, default=0.0, help=f"{text} [0].")(call)
    text = "Tokens of the cache that a step reads at most [all]."
    return click.option("--kv-budget", type=int, default=0, help=text)(call)


def tp_option(function: Callable[..., PlanAnswer]) -> Callable[..., PlanAnswer]:
    """Add --tp; the function gets `tp`, which divides the model's heads."""

    @functools.wraps(function)
    def call(tp: int, model: ModelShape, **arguments: Any) -> PlanAnswer:
        check_tp(model, tp)
        return function(tp=tp, model=model, **arguments)

    text = "GPUs that share every layer (tensor parallelism)."
    return click.option("--tp", type=int, default=1, show_default=True, help=text)(call)


def check_tp(model: ModelShape, tp: int) -> None:
    """Raises PlanError unless each device gets as many heads."""
    if tp < 1 or model.heads % tp:
        fitting = [each for each in (1, 2, 4, 8, 16, 32) if model.heads % each == 0]
        raise PlanError(f"--tp {tp}: it must divide the {model.heads} heads of {model.name}; {fitting} would")


def efficiency_option(function: Callable[..., PlanAnswer]) -> Callable[..., PlanAnswer]:
    """Add --efficiency; the function gets `efficiency`."""

    @functools.wraps(function)
    def call(efficiency: float, **arguments: Any) -> PlanAnswer:
        if not 0 < efficiency <= 1:
            raise PlanError(f"--efficiency {efficiency:g}: a share of the roofline is more than 0 and at most 1")
        return function(efficiency=efficiency, **arguments)

    text = "Share of the roofline that the engine reaches; 1: the bound itself."
    return click.option("--efficiency", type=float, default=0.7, show_default=True, help=text)(call)


TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))


def seconds(value: float) -> str:
    """A duration: 1.23 s, 12.3 ms, 123 us."""
    size, unit = next(((size, unit) for size, unit in TIMES if value >= size), TIMES[-1])
    return f"{three(value / size)} {unit}"


def gb(size: float) -> str:
    """Bytes as GB of 1e9: 1.2, 123."""
    return three(size / 1e9)


def three(value: float) -> str:
    """A number with three digits, or all before the point."""
    if value == 0:
        return "0"
    whole = len(f"{abs(value):.0f}") if abs(value) >= 1 else 0
    return f"{value:,.{max(0, 3 - whole)}f}" if abs(value) >= 0.01 else f"{value:.2g}"


def given(
    model: ModelShape, device: Accelerator, lengths: RequestLengths | None = None, precision: Precision | None = None
) -> dict[str, Any]:
    """The inputs of a plan, for JSON: names, sources and lengths."""
    found: dict[str, Any] = {
        "model": model.name,
        "model_source": model.source,
        "model_checked": model.checked or None,
        "parameters": model.weights,
        "gpu": device.name,
        "gpu_source": device.source,
        "gpu_checked": device.checked or None,
    }
    if lengths is not None:
        found |= {"in": lengths.prompt, "out": lengths.answer}
    if precision is not None:
        found |= {f"{name}_bits": bits for name, bits in asdict(precision).items()}
    return found


WIDTH, HEIGHT = 60, 12
POINT, MARK = "*", "O"
FLAT = 1.25
"""Values whose largest is less than so many times the least are shown from zero on: they hardly differ."""


def plot(
    points: Sequence[tuple[float, float]],
    x: str,
    y: str,
    marked: tuple[float, float] | None = None,
    says: str = "",
    signs: str = "",
) -> str:
    """The points over a frame of axes, which are logarithmic; values of `y` that hardly differ are shown from zero on.

    `marked` is drawn as O, and `says` what it is. Values are above 0. `signs`: a character for each point instead of a
    star.
    """
    highest = max(py for _, py in points)
    is_flat = highest < FLAT * min(py for _, py in points)
    xs, ys = [math.log(px) for px, _ in points], [py if is_flat else math.log(py) for _, py in points]
    floor = 0.0 if is_flat else min(ys)
    grid = [[" "] * WIDTH for _ in range(HEIGHT)]
    for (px, py), lx, ly, sign in zip(points, xs, ys, signs or POINT * len(points), strict=True):
        column = round((lx - min(xs)) / ((max(xs) - min(xs)) or 1) * (WIDTH - 1))
        row = HEIGHT - 1 - round((ly - floor) / ((max(ys) - floor) or 1) * (HEIGHT - 1))
        grid[row][column] = MARK if (px, py) == marked else sign
    top, bottom = _label(highest), "0" if is_flat else _label(math.exp(floor))
    margin = max(len(top), len(bottom))
    labels = [top, *[""] * (HEIGHT - 2), bottom]
    lines = [f"{label:>{margin}} |{''.join(row).rstrip()}" for label, row in zip(labels, grid, strict=True)]
    left, right = _label(math.exp(min(xs))), _label(math.exp(max(xs)))
    axis = f"{'':{margin}} +{'-' * WIDTH}"
    ends = f"{'':{margin}}  {left}{right:>{WIDTH - len(left)}}"
    title = f"{y} over {x} ({f'{x} logarithmic' if is_flat else 'both logarithmic'})" + (
        f"; O: {says}" if marked and says else ""
    )
    return "\n".join([title, *lines, axis, ends])


def _label(value: float) -> str:
    """Four digits, or all before the point: never an exponent for a large number."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


MAX_GPUS = 1024
"""A search over them takes about ten seconds."""


def gpus_option(function: Callable[..., PlanAnswer]) -> Callable[..., PlanAnswer]:
    """Add --gpus; the function gets `gpus`."""

    @functools.wraps(function)
    def call(gpus: int, **arguments: object) -> PlanAnswer:
        if not 1 <= gpus <= MAX_GPUS:
            raise PlanError(f"--gpus {gpus}: 1 to {MAX_GPUS:,} GPUs can be planned with")
        return function(gpus=gpus, **arguments)

    return click.option("--gpus", type=int, default=1, show_default=True, help="How many such GPUs.")(call)


def slo_options(function: Callable[..., PlanAnswer]) -> Callable[..., PlanAnswer]:
    """Add --ttft-ms, --tpot-ms and --share; the function gets `slo`."""

    @functools.wraps(function)
    def call(ttft_ms: float, tpot_ms: float, share: float, **arguments: object) -> PlanAnswer:
        return function(slo=slo_of(ttft_ms, tpot_ms, share), **arguments)

    text = "Share of the requests that must keep both."
    call = click.option("--share", type=float, default=0.9, show_default=True, help=text)(call)
    text = "Longest time between tokens, ms."
    call = click.option("--tpot-ms", type=float, default=100.0, show_default=True, help=text)(call)
    text = "Longest time to the first token, ms."
    return click.option("--ttft-ms", type=float, default=200.0, show_default=True, help=text)(call)


def batch_option(default: int = MAX_BATCH) -> Callable[[Callable[..., PlanAnswer]], Callable[..., PlanAnswer]]:
    """Add --max-batch; the function gets `limits`."""

    def decorate(function: Callable[..., PlanAnswer]) -> Callable[..., PlanAnswer]:
        @functools.wraps(function)
        def call(max_batch: int, **arguments: object) -> PlanAnswer:
            if max_batch < 1:
                raise PlanError(f"--max-batch {max_batch}: a replica runs at least 1 request")
            return function(limits=BatchLimits(max_batch), **arguments)

        text = "Most requests in one replica."
        return click.option("--max-batch", type=int, default=default, show_default=True, help=text)(call)

    return decorate


def inputs_of(searched: SearchInput) -> dict[str, object]:
    """What such a plan was given, for JSON."""
    named = given(searched.model, searched.device, searched.lengths, searched.precision)
    return {**named, "gpus": searched.gpus, "efficiency": searched.efficiency}


def search_options(
    batch: int = MAX_BATCH,
) -> Callable[[Callable[..., PlanAnswer]], Callable[..., PlanAnswer]]:
    """Add the options of every plan that puts a model on several GPUs; the function gets `given`. `batch`: of
    --max-batch, if it is not given."""

    def decorate(function: Callable[..., PlanAnswer]) -> Callable[..., PlanAnswer]:
        @functools.wraps(function)
        def call(
            model: ModelShape,
            device: Accelerator,
            gpus: int,
            lengths: RequestLengths,
            precision: Precision,
            limits: BatchLimits,
            efficiency: float,
            **arguments: object,
        ) -> PlanAnswer:
            searched = SearchInput(model, device, gpus, lengths, precision, efficiency, limits=limits)
            return function(given=searched, **arguments)

        return model_options(
            gpu_option(gpus_option(length_options(bits_options(batch_option(batch)(efficiency_option(call))))))
        )

    return decorate


COPY_BYTES = 1 << 27
"""More than any cache holds."""
SIDE = 1024
"""Rows of the matrices that are multiplied."""
REPEATS = 5
LINK_BYTES_S = 1e9
"""To another machine, over 10 Gbit/s: assumed."""
HOP_S = 50e-6
"""The same: assumed."""


def measured_cpu() -> Accelerator:
    """Measure. Raises PlanError if numpy is not installed, without which nothing here computes fast enough."""
    try:
        import numpy as np  # noqa: PLC0415 - optional
    except ImportError:
        raise PlanError("--gpu cpu is measured with numpy, which is not installed: pip install '.[llamacpp]'") from None
    source, target = np.ones(COPY_BYTES // 8), np.zeros(COPY_BYTES // 8)
    left, right = np.ones((SIDE, SIDE), np.float32), np.ones((SIDE, SIDE), np.float32)
    copied = best_s(lambda: np.copyto(target, source))
    multiplied = best_s(lambda: left @ right)
    return Accelerator(
        name="cpu",
        source=f"measured now: {os.cpu_count()} cores, a copy of {COPY_BYTES >> 20} MiB, a float32 product of {SIDE}^2",
        memory_bytes=float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        bytes_s=2 * COPY_BYTES / copied,  # read and written
        peak={16: 2 * SIDE**3 / multiplied},
        link_bytes_s=LINK_BYTES_S,
        hop_s=HOP_S,
        watts=0.0,
    )


def best_s(action: Callable[[], object]) -> float:
    """Seconds of the fastest of a few runs, after one that is not counted."""
    action()
    found = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        action()
        found.append(time.perf_counter() - began)
    return min(found)
