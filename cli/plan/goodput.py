"""`penstock plan goodput`: the highest rate within the objectives, with prefill beside decode or apart."""

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
from cli.plan.slo import batch_option, gpus_option, slo_options
from planner.facts.device import Accelerator
from planner.facts.model import ModelShape
from planner.goodput import best_goodput, goodput_advice, work_note
from planner.load import Precision, RequestLengths
from planner.search import SearchInput
from planner.serving import BatchLimits, LatencySlo


@plan_command("goodput", shown="searching")
@model_options
@gpu_option
@gpus_option
@length_options
@bits_options
@batch_option()
@slo_options
@efficiency_option
def goodput(
    model: ModelShape,
    device: Accelerator,
    gpus: int,
    lengths: RequestLengths,
    precision: Precision,
    limits: BatchLimits,
    slo: LatencySlo,
    efficiency: float,
) -> PlanAnswer:
    """Find the highest rate of requests that keep both latency objectives, with prefill beside decode or apart."""
    given = SearchInput(model, device, gpus, lengths, precision, efficiency, slo=slo, limits=limits)
    rows = best_goodput(given)
    value = {
        **inputs(model, device, lengths, precision),
        "gpus": gpus,
        "efficiency": efficiency,
        "ttft_ms": 1e3 * slo.ttft_s,
        "tpot_ms": 1e3 * slo.tpot_s,
        "share": slo.share,
        "deployments": [
            {
                "prefill": row.deployment.prefill.name if row.deployment.prefill else None,
                "decode": row.deployment.decode.name,
                "gpus": row.deployment.gpus,
                "requests_s": row.rate,
                "requests_s_per_gpu": row.per_gpu,
                "requests_s_if_judged_apart": row.separate_rate,
            }
            for row in rows
        ],
    }
    table = [
        (
            row.deployment.prefill.name if row.deployment.prefill else "beside decode",
            row.deployment.decode.name,
            three(row.rate),
            three(row.per_gpu),
        )
        for row in rows
    ]
    header = ("prefill", "decode", "requests/s", "per GPU")
    notes = [work_note(given, rows[0].deployment)] if gpus > 1 else []
    return PlanAnswer(value, [PlanTable(header, table)], goodput_advice(given, rows), notes=notes)
