"""Plans that simulate requests over time: `penstock plan simulate`, and `fit`, which learns step times from records."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from planner.commands.answers import PlanAnswer, PlanTable, inputs_of, seconds, three
from planner.commands.inputs import BITS, EFFICIENCY, GPU, LENGTHS, MODEL, SLO, max_batch, plan_command
from planner.commands.records import (
    DEFAULT_STEP_TOKENS,
    EMBEDDED_STEP_TOKENS,
    RecordsSource,
    is_records,
    limits_of,
    of_model,
    records_in,
    rows_of,
    served_of,
    workers_of,
)
from planner.cost import MAX_REQUESTS, TimelineRow, simulated, texts_of, timeline, timeline_advice
from planner.facts.catalogue import PlanError
from planner.fit import (
    NO_LIMIT,
    ComparedLoad,
    EngineFit,
    LoadFigures,
    ServedText,
    compared,
    errors_of,
    figures,
    fit_advice,
    loads_of,
    predicted,
)
from planner.load import MAX_GPUS, PlanInput
from planner.search import (
    Attainment,
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
from telemetry.records.reader import ReportedRequest


@plan_command("simulate", MODEL, GPU, LENGTHS, BITS, max_batch(), SLO, EFFICIENCY, shown="simulating")
@click.option("--trace", "path", type=click.Path(path_type=Path), help="A CSV, a .jsonl, or records.")
@click.option("--scale", type=float, default=1.0, show_default=True, help="So many times as fast as the trace.")
@click.option("--rate", type=float, default=1.0, show_default=True, help="Without a trace: requests a second.")
@click.option("--count", type=int, default=1000, show_default=True, help="Without a trace: requests.")
@click.option("--dp", type=int, default=1, show_default=True, help="Replicas.")
@click.option("--pp", type=int, default=1, show_default=True, help="Stages of a replica.")
@click.option("--tp", type=int, default=1, show_default=True, help="GPUs of a stage.")
def simulate(
    given: PlanInput, path: Path | None, scale: float, rate: float, count: int, dp: int, pp: int, tp: int
) -> PlanAnswer:
    """Serve a trace with one parallelism, iteration by iteration, and show who was served in time, and when.

    A trace is a CSV in BurstGPT's columns, a .jsonl in APEX's form, or Penstock's own records: a file or their folder.

    \b
    Examples:
      penstock plan simulate --model opt-13b --gpu h200 --rate 4
      penstock plan simulate --model opt-13b --gpu h200 --trace burstgpt.csv
      penstock plan simulate --model opt-13b --gpu l4 --trace .penstock/records
    """
    model, slo, plan = given.model, given.slo, ParallelPlan(dp, pp, tp)
    if min(dp, pp, tp) < 1 or not is_valid(plan, model):
        raise PlanError(f"{plan.name} does not divide {model.name}: `penstock plan search` lists what does")
    if plan.gpus > MAX_GPUS:
        raise PlanError(f"{plan.name} takes {plan.gpus:,} GPUs: at most {MAX_GPUS:,} can be planned with")
    if not (0 < scale < math.inf and 0 < rate < math.inf) or count < 1:
        raise PlanError(f"--scale {scale:g} --rate {rate:g} --count {count}: the first two are above 0, --count from 1")
    if count > MAX_REQUESTS:
        raise PlanError(f"--count {count}: at most {MAX_REQUESTS:,} requests are simulated")
    given.lengths.check(model)
    texts, failed = _texts(path, scale, rate, count, given)
    prompt = round(sum(text.prompt for text in texts) / len(texts))
    found = simulated(ReplicaModel(replace(given, lengths=replace(given.lengths, prompt=prompt)), plan), texts)
    rows, kept = timeline(texts, slo), attainment(texts, slo)
    evictions = sum(text.evictions for text in texts)
    value = {
        **{name: each for name, each in inputs_of(given).items() if name not in ("in", "out")},
        "efficiency": given.efficiency,
        "plan": plan.name,
        "gpus": plan.gpus,
        "failed_in_trace": failed,
        "evictions": evictions,
        **_served_json(found, kept),
        "timeline": [asdict(row) for row in rows],
    }
    note = (
        f"{three(found.tokens_s)} tokens/s over {seconds(found.seconds)}, {three(found.joules_token)} J/token, "
        f"{evictions} evictions." + (f" {failed} requests without an answer are left out." if failed else "")
    )
    tables = [] if all(row.kept == 1.0 for row in rows) else [PlanTable.of(rows, TIMELINE_COLUMNS)]
    return PlanAnswer(value, tables, timeline_advice(rows, kept.both, slo), notes=[note])


def _texts(path: Path | None, scale: float, rate: float, count: int, given: PlanInput) -> tuple[list[ModelText], int]:
    """The requests, and how many of the trace are left out because they had no answer. Raises PlanError."""
    if path is None:
        return requests(given.lengths, count, rate), 0
    try:
        if is_records(path):
            rows, failed = rows_of(records_in(path).requests)
            return texts_of(cut(rows, scale=scale), given.model), failed
        trace = Trace(path)
        return texts_of(cut(trace, scale=scale), given.model), trace.failed
    except OSError as error:
        raise PlanError(
            f"--trace {path}: {(error.strerror or str(error)).lower()}",
            "give a CSV or .jsonl that is there, or leave --trace out and give --rate and --count",
        ) from None
    except Malformed as error:
        raise PlanError(str(error)) from None


def _served_json(found: ServedLoad, kept: Attainment) -> dict[str, float]:
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


TIMELINE_COLUMNS: Mapping[str, Callable[[TimelineRow], str]] = {
    "from, s": lambda row: f"{row.begin_s:,.0f}",
    "requests": lambda row: f"{row.requests:,}",
    "tokens": lambda row: three(row.tokens),
    "first p90": lambda row: seconds(row.ttft_p90_s),
    "token p90": lambda row: seconds(row.tpot_p90_s),
    "kept": lambda row: f"{100 * row.kept:.0f} %",
    "": lambda row: "#" * round(20 * row.kept),
}
STEP_TOKENS = f"Prompt tokens of a step [{DEFAULT_STEP_TOKENS}; embedded: {EMBEDDED_STEP_TOKENS}]."
EMBEDDED = "The engine was the embedded one, which computes prompts in the order of its slots."


@plan_command("fit", shown="fitting the records")
@click.option("--records", type=click.Path(path_type=Path), help="Folder, or one file [those of this instance].")
@click.option("--since", help="Requests that ended since: 15m, 2h, 7d ago, or a time [all].")
@click.option("--model", metavar="NAME", help="Only this model, as penstock.toml names it.")
@click.option("--scale", type=float, help="Also: what if requests came so many times as fast?")
@click.option("--step-tokens", type=int, help=STEP_TOKENS)
@click.option("--embedded", is_flag=True, help=EMBEDDED)
def fit(
    records: Path | None,
    since: str | None,
    model: str | None,
    scale: float | None,
    step_tokens: int | None,
    embedded: bool,
    source: RecordsSource,
) -> PlanAnswer:
    """Fit step times to the records of a Penstock, and say how far the simulator's prediction is from them.

    Half of the loads are fitted; the simulator predicts all, with the order, gate and preemption of Penstock.

    \b
    Examples:
      penstock plan fit --since 1h
      penstock plan fit --records .penstock/records --scale 2
    """
    if scale is not None and not 0 < scale <= 1000:
        raise PlanError(f"--scale {scale:g}: above 0 and at most 1000, such as 2 for twice the load")
    step_tokens = (EMBEDDED_STEP_TOKENS if embedded else DEFAULT_STEP_TOKENS) if step_tokens is None else step_tokens
    if step_tokens < 1:
        raise PlanError(f"--step-tokens {step_tokens}: a step computes at least 1")
    evidence = records_in(*source(records, since), since)
    requests = of_model(evidence.requests, model)
    served = served_of(requests)
    loads, workers = loads_of(served), workers_of(served)
    found, rows = compared(loads, limits_of(evidence, served, step_tokens, by_slot=embedded), workers)
    errors = {"median_errors": errors_of(rows), "worst_errors": errors_of(rows, max)}
    value: dict[str, Any] = {
        "requests": len(requests),
        "texts": len(served),
        "workers": workers,
        **_coefficients(found),
        "loads": [asdict(each) for each in rows],
        **{name: asdict(each) for name, each in errors.items()},
    }
    tables = [PlanTable.of(rows, LOAD_COLUMNS, "Measured > predicted"), _error_table(*errors.values())]
    if scale is not None:
        whole, scaled = (figures(found, predicted(found, served, workers, each)) for each in (1.0, scale))
        value["scaled"] = {"scale": scale, **asdict(scaled)}
        tables.append(_scaled_table(scale, whole, scaled))
    notes = [_fit_note(found, workers), _left_out(requests, served)]
    return PlanAnswer(value, tables, fit_advice(rows), notes=notes)


def _coefficients(found: EngineFit) -> dict[str, Any]:
    return {
        "slots": found.limits.slots,
        "kv_tokens": 0 if found.limits.kv_tokens == NO_LIMIT else found.limits.kv_tokens,
        "step_tokens": found.limits.prefill_tokens,
        "decode": asdict(found.times.small),
        "decode_from_95_texts": asdict(found.times.large),
        "lone_s": found.times.lone_s,
        "prefill": dict(zip(("fixed_s", "token_s", "square_s"), found.times.prefill, strict=True)),
        "delay_s": found.delay_s,
        "path_s": found.path_s,
    }


LOAD_COLUMNS: Mapping[str, Callable[[ComparedLoad], str]] = {
    "from, s": lambda row: f"{row.begin_s:,.0f}",
    "texts": lambda row: f"{row.requests:,}",
    "": lambda row: "held out" if row.held_out else "fitted",
    "tokens/s": lambda row: f"{three(row.measured.tokens_s)} > {three(row.predicted.tokens_s)}",
    "first p50": lambda row: f"{seconds(row.measured.ttft_p50_s)} > {seconds(row.predicted.ttft_p50_s)}",
    "first p90": lambda row: f"{seconds(row.measured.ttft_p90_s)} > {seconds(row.predicted.ttft_p90_s)}",
    "token p50": lambda row: f"{seconds(row.measured.tpot_p50_s)} > {seconds(row.predicted.tpot_p50_s)}",
}


def _error_table(medians: LoadFigures, worst: LoadFigures) -> PlanTable:
    named = (("simulator, median", medians), ("simulator, worst load", worst))
    rows = [(name, *(f"{100 * value:.1f} %" for value in asdict(each).values())) for name, each in named]
    return PlanTable(("error of the held-out loads", "tokens/s", "first p50", "first p90", "token p50"), rows)


def _scaled_table(scale: float, whole: LoadFigures, scaled: LoadFigures) -> PlanTable:
    rows = [
        (name, three(each.tokens_s), seconds(each.ttft_p50_s), seconds(each.ttft_p90_s), seconds(each.tpot_p50_s))
        for name, each in (("as recorded", whole), (f"{scale:g} times as fast", scaled))
    ]
    return PlanTable(("predicted", "tokens/s", "first p50", "first p90", "token p50"), rows)


def _fit_note(found: EngineFit, workers: int) -> str:
    small, (fixed_s, token_s, _) = found.times.small, found.times.prefill
    return (
        f"A step takes {seconds(small.fixed_s)}, {seconds(small.text_s)} more for each text and "
        f"{seconds(1000 * small.held_s)} more for 1,000 tokens in the cache; a prompt adds {seconds(fixed_s)} and "
        f"{seconds(1000 * token_s)} for 1,000 tokens. Simulated with {workers} worker{'s' * (workers > 1)} of "
        f"{found.limits.slots} slots all the time."
    )


def _left_out(requests: list[ReportedRequest], served: list[ServedText]) -> str:
    used = len({(text.arrived_s, text.begun_s, text.worker) for text in served})
    return f"{used:,} of {len(requests):,} requests are used: those that ended in their first attempt."
