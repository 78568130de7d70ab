"""`penstock plan goodput`: the highest rate within the objectives, with prefill beside decode or apart."""

from __future__ import annotations

from dataclasses import replace

from cli.plan.command import PlanAnswer, PlanTable, inputs_of, plan_command, search_options, slo_options, three
from planner.goodput import best_goodput, goodput_advice, work_note
from planner.search import LatencySlo, SearchInput, SearchWatch


@plan_command("goodput", shown="searching", watched=True)
@search_options()
@slo_options
def goodput(given: SearchInput, slo: LatencySlo, watch: SearchWatch) -> PlanAnswer:
    """Find the highest rate of requests that keep both latency objectives, with prefill beside decode or apart."""
    given = replace(given, slo=slo)
    rows = best_goodput(given, watch=watch)
    value = {
        **inputs_of(given),
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
    notes = [work_note(given, rows[0].deployment)] if given.gpus > 1 else []
    return PlanAnswer(value, [PlanTable(header, table)], goodput_advice(given, rows), notes=notes)
