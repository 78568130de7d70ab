"""`penstock plan simulate`: a trace, or generated requests, served by one parallelism of a model, over time."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path

import click

from cli.output import USAGE, Problem
from cli.plan.command import (
    MAX_GPUS,
    PlanAnswer,
    PlanTable,
    batch_option,
    bits_options,
    efficiency_option,
    gpu_option,
    length_options,
    model_options,
    plan_command,
    seconds,
    slo_options,
    three,
)
from cli.plan.command import given as inputs
from cli.plan.records import is_records, records_in, rows_of
from planner.cost import MAX_REQUESTS, TimelineRow, simulated, texts_of, timeline, timeline_advice
from planner.facts.catalogue import PlanError
from planner.facts.device import Accelerator
from planner.facts.model import ModelShape
from planner.load import Precision, RequestLengths
from planner.search import (
    Attainment,
    BatchLimits,
    LatencySlo,
    ParallelPlan,
    ReplicaModel,
    ServedLoad,
    attainment,
    is_valid,
    quantile,
    requests,
)
from planner.simulator.engine import ModelText
from planner.simulator.trace import Malformed, Trace, cut


@plan_command("simulate", shown="simulating")
@model_options
@gpu_option
@click.option("--trace", "path", type=click.Path(path_type=Path), help="A CSV, a .jsonl, or records.")
@click.option("--scale", type=float, default=1.0, show_default=True, help="So many times as fast as the trace.")
@click.option("--rate", type=float, default=1.0, show_default=True, help="Without a trace: requests a second.")
@click.option("--count", type=int, default=1000, show_default=True, help="Without a trace: requests.")
@click.option("--dp", type=int, default=1, show_default=True, help="Replicas.")
@click.option("--pp", type=int, default=1, show_default=True, help="Stages of a replica.")
@click.option("--tp", type=int, default=1, show_default=True, help="GPUs of a stage.")
@length_options
@bits_options
@batch_option()
@slo_options
@efficiency_option
def simulate(
    model: ModelShape,
    device: Accelerator,
    path: Path | None,
    scale: float,
    rate: float,
    count: int,
    dp: int,
    pp: int,
    tp: int,
    lengths: RequestLengths,
    precision: Precision,
    limits: BatchLimits,
    slo: LatencySlo,
    efficiency: float,
) -> PlanAnswer:
    """Serve a trace with one parallelism, iteration by iteration, and show who was served in time, and when.

    A trace is a CSV in BurstGPT's columns, a .jsonl in APEX's form, or Penstock's own records: a file or their folder.
    """
    plan = ParallelPlan(dp, pp, tp)
    if min(dp, pp, tp) < 1 or not is_valid(plan, model):
        raise PlanError(f"{plan.name} does not divide {model.name}: `penstock plan search` lists what does")
    if plan.gpus > MAX_GPUS:
        raise PlanError(f"{plan.name} takes {plan.gpus:,} GPUs: at most {MAX_GPUS:,} can be planned with")
    if not (0 < scale < math.inf and 0 < rate < math.inf) or count < 1:
        raise PlanError(f"--scale {scale:g} --rate {rate:g} --count {count}: the first two are above 0, --count from 1")
    if count > MAX_REQUESTS:
        raise PlanError(f"--count {count}: at most {MAX_REQUESTS:,} requests are simulated")
    lengths.check(model)
    texts, failed = _texts(path, scale, rate, count, lengths, model)
    prompt = round(sum(text.prompt for text in texts) / len(texts))
    found = simulated(ReplicaModel(model, device, plan, precision, prompt, efficiency), texts, limits)
    rows, kept = timeline(texts, slo), attainment(texts, slo)
    evictions = sum(text.evictions for text in texts)
    value = {
        **inputs(model, device, None, precision),
        "plan": plan.name,
        "gpus": plan.gpus,
        "efficiency": efficiency,
        "failed_in_trace": failed,
        "evictions": evictions,
        **_as_json(found, kept),
        "timeline": [asdict(row) for row in rows],
    }
    note = (
        f"{three(found.tokens_s)} tokens/s over {seconds(found.seconds)}, {three(found.joules_token)} J/token, "
        f"{evictions} evictions." + (f" {failed} requests without an answer are left out." if failed else "")
    )
    tables = [] if all(row.kept == 1.0 for row in rows) else [_table(rows)]
    return PlanAnswer(value, tables, timeline_advice(rows, kept.both, slo), notes=[note])


def _texts(
    path: Path | None, scale: float, rate: float, count: int, lengths: RequestLengths, model: ModelShape
) -> tuple[list[ModelText], int]:
    """The requests, and how many of the trace are left out because they had no answer. Raises PlanError,
    Problem."""
    if path is None:
        return requests(lengths, count, rate), 0
    try:
        if is_records(path):
            rows, failed = rows_of(records_in(path).requests)
            return texts_of(cut(rows, scale=scale), model), failed
        trace = Trace(path)
        return texts_of(cut(trace, scale=scale), model), trace.failed
    except OSError as error:
        raise Problem(f"--trace {path}: {(error.strerror or str(error)).lower()}", exit_code=USAGE, code="plan",
                      next_step="give a CSV or .jsonl that is there, or leave --trace out and give --rate and --count",
                      ) from None  # fmt: skip
    except Malformed as error:
        raise PlanError(str(error)) from None


def _as_json(found: ServedLoad, kept: Attainment) -> dict[str, float]:
    return {
        "requests": len(found.texts),
        "seconds": found.seconds,
        "tokens_s": found.tokens_s,
        "joules_per_token": found.joules_token,
        "mfu": found.mfu,
        "mbu": found.mbu,
        "kept_both": kept.both,
        "kept_ttft": kept.ttft,
        "kept_tpot": kept.tpot,
        **{f"ttft_{name}_s": quantile(found.ttfts_s, share) for name, share in (("p50", 0.5), ("p90", 0.9))},
        **{f"tpot_{name}_s": quantile(found.tpots_s or [0.0], share) for name, share in (("p50", 0.5), ("p90", 0.9))},
    }


def _table(rows: list[TimelineRow]) -> PlanTable:
    table = [
        (
            f"{row.begin_s:,.0f}",
            f"{row.requests:,}",
            three(row.tokens),
            seconds(row.ttft_p90_s),
            seconds(row.tpot_p90_s),
            f"{100 * row.kept:.0f} %",
            "#" * round(20 * row.kept),
        )
        for row in rows
    ]
    return PlanTable(("from, s", "requests", "tokens", "first p90", "token p90", "kept", ""), table)
