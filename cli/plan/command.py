"""Plan command: adds the options that all plans share, and prints a plan as tables and advice, or as JSON."""

from __future__ import annotations

import functools
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import click

from cli.errors import DONE, INTERRUPTED, USAGE, Problem
from cli.options import Command, json_option
from cli.output import emit, fitted, note, print_json, print_table
from cli.plan.inputs import device_named, model_named
from cli.progress import ProgressLine
from planner.facts.catalogue import PlanError
from planner.facts.model import ModelShape
from planner.goodput import Workload, mix_of, workloads
from planner.goodput import workload as workload_named
from planner.load import KvReads, Precision, RequestLengths
from planner.search import SearchWatch

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
