"""`penstock plan fit`: step times of the engines that served, from the records, and how well they predict the rest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from cli.plan.command import PlanAnswer, PlanTable, plan_command, seconds, three
from cli.plan.records import (
    DEFAULT_STEP_TOKENS,
    EMBEDDED_STEP_TOKENS,
    limits_of,
    of_model,
    records_in,
    served_of,
    why_unused,
    workers_of,
)
from planner.facts.catalogue import PlanError
from planner.fit import (
    MIN_REQUESTS,
    ComparedLoad,
    EngineFit,
    FitErrors,
    LoadFigures,
    ServedText,
    compared,
    constant_errors_of,
    errors_of,
    figures,
    fit_advice,
    loads_of,
    predicted,
    worst_errors_of,
)
from telemetry.report.requests import ReportedRequest

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
) -> PlanAnswer:
    """Fit step times to the records of a Penstock, and say how far the simulator's prediction is from them.

    Half of the loads are fitted; the simulator predicts all, with the order, gate and preemption of Penstock.
    """
    if scale is not None and not 0 < scale <= 1000:
        raise PlanError(f"--scale {scale:g}: above 0 and at most 1000, such as 2 for twice the load")
    step_tokens = (EMBEDDED_STEP_TOKENS if embedded else DEFAULT_STEP_TOKENS) if step_tokens is None else step_tokens
    if step_tokens < 1:
        raise PlanError(f"--step-tokens {step_tokens}: a step computes at least 1")
    evidence = records_in(records, since)
    requests = of_model(evidence.requests, model)
    served = served_of(requests)
    if len(served) < MIN_REQUESTS and (why := why_unused(requests)):
        raise PlanError(f"{len(served)} requests can be used, and a fit needs {MIN_REQUESTS}; of the others, {why}")
    loads, workers = loads_of(served), workers_of(served)
    found, rows = compared(loads, limits_of(evidence, served, step_tokens, by_slot=embedded), workers)
    errors = {
        "median_errors": errors_of(rows), "worst_errors": worst_errors_of(rows),
        "constant_errors": constant_errors_of(rows),
    }  # fmt: skip
    value: dict[str, Any] = {
        "requests": len(requests),
        "texts": len(served),
        "workers": workers,
        **_coefficients(found),
        "loads": [asdict(each) for each in rows],
        **{name: asdict(each) for name, each in errors.items()},
    }
    tables = [_table(rows), _error_table(*errors.values())]
    if scale is not None:
        whole, scaled = (figures(found, predicted(found, served, workers, each)) for each in (1.0, scale))
        value["scaled"] = {"scale": scale, **asdict(scaled)}
        tables.append(_scaled_table(scale, whole, scaled))
    notes = [_note(found, workers), _left_out(requests, served)]
    return PlanAnswer(value, tables, fit_advice(rows), notes=notes)


def _coefficients(found: EngineFit) -> dict[str, Any]:
    return {
        "slots": found.limits.slots,
        "kv_tokens": found.limits.kv_tokens,
        "step_tokens": found.limits.step_tokens,
        "decode": asdict(found.times.small),
        "decode_from_95_texts": asdict(found.times.large),
        "lone_s": found.times.lone_s,
        "prefill": dict(zip(("fixed_s", "token_s", "square_s"), found.times.prefill, strict=True)),
        "delay_s": found.delay_s,
        "path_s": found.path_s,
    }


def _table(rows: list[ComparedLoad]) -> PlanTable:
    table = [
        (
            f"{row.begin_s:,.0f}",
            f"{row.requests:,}",
            "held out" if row.held_out else "fitted",
            _pair(three, row.measured.tokens_s, row.predicted.tokens_s),
            _pair(seconds, row.measured.ttft_p50_s, row.predicted.ttft_p50_s),
            _pair(seconds, row.measured.ttft_p90_s, row.predicted.ttft_p90_s),
            _pair(seconds, row.measured.tpot_p50_s, row.predicted.tpot_p50_s),
        )
        for row in rows
    ]
    header = ("from, s", "texts", "", "tokens/s", "first p50", "first p90", "token p50")
    return PlanTable(header, table, "Measured > predicted")


def _error_table(medians: FitErrors, worst: FitErrors, constant: FitErrors) -> PlanTable:
    named = (("simulator, median", medians), ("simulator, worst load", worst), ("always the fitted median", constant))
    rows = [(name, *(f"{100 * value:.1f} %" for value in asdict(each).values())) for name, each in named]
    header = ("error of the held-out loads", "tokens/s", "first p50", "first p90", "token p50")
    return PlanTable(header, rows)


def _pair(form: Callable[[float], str], measured: float, predicted: float) -> str:
    return f"{form(measured)} > {form(predicted)}"


def _scaled_table(scale: float, whole: LoadFigures, scaled: LoadFigures) -> PlanTable:
    rows = [
        (name, three(each.tokens_s), seconds(each.ttft_p50_s), seconds(each.ttft_p90_s), seconds(each.tpot_p50_s))
        for name, each in (("as recorded", whole), (f"{scale:g} times as fast", scaled))
    ]
    return PlanTable(("predicted", "tokens/s", "first p50", "first p90", "token p50"), rows)


def _note(found: EngineFit, workers: int) -> str:
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
