"""`penstock plan grid`: few large replicas or many small ones, by the number of concurrent requests."""

from __future__ import annotations

from cli.plan.command import PlanAnswer, PlanTable, inputs_of, plan_command, search_options, three
from planner.cost import best_by_concurrency, grid_advice
from planner.cost import grid as measured
from planner.search import SearchInput

USUAL_BATCH = 64
"""ScaleLLM's router sends more concurrent requests than that to several replicas."""


@plan_command("grid")
@search_options(USUAL_BATCH)
def grid(given: SearchInput) -> PlanAnswer:
    """Compare one large replica with several small ones on the same GPUs, by concurrent requests."""
    rows = measured(given)
    top = best_by_concurrency(rows)
    value = {
        **inputs_of(given),
        "max_batch": given.limits.batch,
        "layouts": [{"plan": row.plan.name, "tokens_s": row.tokens_s} for row in rows],
        "best": {each: plan.name for each, plan in top.items()},
    }
    table = [[f"{each}", *(three(row.tokens_s[each]) for row in rows), plan.name] for each, plan in top.items()]
    header = ["concurrent", *(f"{row.plan.name} tok/s" for row in rows), "best"]
    return PlanAnswer(value, [PlanTable(header, table)], grid_advice(rows))
