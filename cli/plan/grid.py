"""`penstock plan grid`: few large replicas or many small ones, by the number of concurrent requests."""

from __future__ import annotations

from cli.plan.command import (
    PlanAnswer,
    PlanTable,
    bits_options,
    efficiency_option,
    gpu_option,
    length_options,
    model_options,
    plan_command,
)
from cli.plan.figures import given as inputs
from cli.plan.figures import three
from cli.plan.slo import batch_option, gpus_option
from planner.facts.device import Accelerator
from planner.facts.model import ModelShape
from planner.grid import best_by_concurrency, grid_advice
from planner.grid import grid as measured
from planner.load import Precision, RequestLengths
from planner.search import SearchInput
from planner.serving import BatchLimits

USUAL_BATCH = 64
"""ScaleLLM's router sends more concurrent requests than that to several replicas."""


@plan_command("grid")
@model_options
@gpu_option
@gpus_option
@length_options
@bits_options
@batch_option(USUAL_BATCH)
@efficiency_option
def grid(
    model: ModelShape,
    device: Accelerator,
    gpus: int,
    lengths: RequestLengths,
    precision: Precision,
    limits: BatchLimits,
    efficiency: float,
) -> PlanAnswer:
    """Compare one large replica with several small ones on the same GPUs, by concurrent requests."""
    rows = measured(SearchInput(model, device, gpus, lengths, precision, efficiency, limits=limits))
    top = best_by_concurrency(rows)
    value = {
        **inputs(model, device, lengths, precision),
        "gpus": gpus,
        "max_batch": limits.batch,
        "efficiency": efficiency,
        "layouts": [{"plan": row.plan.name, "tokens_s": row.tokens_s} for row in rows],
        "best": {each: plan.name for each, plan in top.items()},
    }
    table = [[f"{each}", *(three(row.tokens_s[each]) for row in rows), plan.name] for each, plan in top.items()]
    header = ["concurrent", *(f"{row.plan.name} tok/s" for row in rows), "best"]
    return PlanAnswer(value, [PlanTable(header, table)], grid_advice(rows))
