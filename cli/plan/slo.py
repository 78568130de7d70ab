"""Options of plans that serve requests on several GPUs: how many, at which rate, within which latencies."""

from __future__ import annotations

import functools
from collections.abc import Callable

import click

from cli.plan.command import PlanAnswer
from planner.facts.catalogue import PlanError
from planner.goodput import slo_of
from planner.serving import MAX_BATCH, BatchLimits


def gpus_option(function: Callable[..., PlanAnswer]) -> Callable[..., PlanAnswer]:
    """Add --gpus; the function gets `gpus`."""
    return click.option("--gpus", type=int, default=1, show_default=True, help="How many such GPUs.")(function)


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
