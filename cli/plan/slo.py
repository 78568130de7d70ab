"""Options of plans that serve requests on several GPUs: which and how many, and within which latencies."""

from __future__ import annotations

import functools
from collections.abc import Callable

import click

from cli.plan.command import (
    PlanAnswer,
    bits_options,
    efficiency_option,
    gpu_option,
    length_options,
    model_options,
)
from cli.plan.figures import given
from planner.facts.catalogue import PlanError
from planner.facts.device import Accelerator
from planner.facts.model import ModelShape
from planner.goodput import slo_of
from planner.load import Precision, RequestLengths
from planner.search import MAX_BATCH, BatchLimits, SearchInput

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
