"""`penstock plan search`: every parallelism of a model on several GPUs, and the best of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import click

from cli.plan.command import (
    PlanAnswer,
    PlanTable,
    inputs_of,
    plan_command,
    plot,
    search_options,
    seconds,
    slo_options,
    three,
)
from cli.plan.cost import assumed_prices
from planner.cost import pareto, per_million
from planner.facts.catalogue import PlanError
from planner.search import LatencySlo, PlanOutcome, SearchInput, SearchWatch, best, quantile, search_advice
from planner.search import search as tried

SHOWN = 12
"""Rows of the table; --json has all."""


@plan_command("search", shown="searching", watched=True)
@search_options()
@click.option("--rate", type=float, help="Requests a second of all GPUs; then latencies are those at this rate.")
@click.option("--price", type=float, help="Of an hour of one such GPU.")
@slo_options
def search(
    given: SearchInput, rate: float | None, price: float | None, slo: LatencySlo, watch: SearchWatch
) -> PlanAnswer:
    """Try every parallelism (dp, pp, tp, experts, attention-dp) on several GPUs, and name the best."""
    if rate is not None and rate <= 0:
        raise PlanError(f"--rate {rate:g}: requests a second are above 0")
    if price is not None and not price > 0:
        raise PlanError(f"--price {price:g}: a price of an hour is above 0")
    given, gpus = replace(given, rate=rate, slo=slo), given.gpus
    assumed = [given.device] if price is None else []
    price = given.device.price_per_hour if price is None else price
    found = tried(given, watch)
    top = best(found)
    value = {
        **inputs_of(given),
        "rate": rate,
        "latency_optimal": top.latency.plan.name,
        "throughput_optimal": top.throughput.plan.name,
        "energy_optimal": top.energy.plan.name,
        "price_per_hour": price,
        "pareto": [each.plan.name for each in cheapest(found, gpus, price)],
        "plans": [as_json(each) | _cost_json(each, gpus, price) for each in found],
    }
    rows = [_row(each, marks_of(each, found)) for each in found[:SHOWN]]
    header = ["plan", "best", "alone", "first token", "per token", "backlog tok/s", "J/token", "mfu", "mbu"]
    if rate is not None:
        header += ["p95 first", "p95 token", "kept"]
    drawn = _plot(found, gpus, price) if len(found) > 1 else ""
    advice, notes = search_advice(given, found), _notes(given.efficiency, found) + assumed_prices(assumed)
    return PlanAnswer(value, [PlanTable(header, rows)], advice, drawn, notes)


def cost_of(each: PlanOutcome, gpus: int, price: float | None) -> float:
    """Of a million tokens: GPU-hours, or with a price of an hour of one GPU their price."""
    return per_million(gpus * (price or 1.0), each.backlog.tokens_s)


def cheapest(found: list[PlanOutcome], gpus: int, price: float | None) -> list[PlanOutcome]:
    """The plans that no other beats in both cost and the latency of a lone request, the quickest first."""
    return pareto(found, lambda each: cost_of(each, gpus, price), lambda each: each.alone_s)


def _cost_json(each: PlanOutcome, gpus: int, price: float | None) -> dict[str, float | None]:
    return {
        "gpu_hours_per_million_tokens": cost_of(each, gpus, None),
        "price_per_million_tokens": None if price is None else cost_of(each, gpus, price),
    }


def _plot(found: list[PlanOutcome], gpus: int, price: float | None) -> str:
    kept = cheapest(found, gpus, price)
    found = sorted(found, key=kept.__contains__)  # those that are kept are drawn last, over the others
    points = [(each.alone_s, cost_of(each, gpus, price)) for each in found]
    signs = "".join("P" if each in kept else "." for each in found)
    y = "GPU-hours of a million tokens" if price is None else "price of a million tokens"
    names = ", ".join(each.plan.name for each in kept)
    drawn = plot(points, "latency of a lone request, s", y, signs=signs)
    return f"{drawn}\nP: no other is as cheap at less latency: {names}"


def marks_of(outcome: PlanOutcome, found: list[PlanOutcome]) -> str:
    """What a plan is best for."""
    top = best(found)
    marks = [name for name in ("latency", "throughput", "energy") if getattr(top, name) is outcome]
    return ", ".join(marks) or "-"


def as_json(each: PlanOutcome) -> dict[str, Any]:
    """One plan with its figures."""
    plan = each.plan
    found = {
        "plan": plan.name, "dp": plan.dp, "pp": plan.pp, "tp": plan.tp, "ep": plan.ep,
        "attention_dp": plan.attention_dp, "kv_tokens_per_replica": each.kv_tokens,
        "alone_s": each.alone_s, "alone_ttft_s": each.alone_ttft_s, "alone_tpot_s": each.alone_tpot_s,
        "tokens_s": each.backlog.tokens_s, "joules_per_token": each.backlog.joules_token,
        "mfu": each.backlog.mfu, "mbu": each.backlog.mbu,
    }  # fmt: skip
    if each.at_rate is not None and each.kept is not None:
        for name, values in (("ttft", each.at_rate.ttfts_s), ("tpot", each.at_rate.tpots_s)):
            found |= {f"{name}_{rank}_s": quantile(values, share) for rank, share in (("p50", 0.5), ("p95", 0.95))}
        found |= {"kept_both": each.kept.both, "kept_ttft": each.kept.ttft, "kept_tpot": each.kept.tpot}
    return found


def _row(each: PlanOutcome, marks: str) -> list[str]:
    row = [
        each.plan.name,
        marks,
        seconds(each.alone_s),
        seconds(each.alone_ttft_s),
        seconds(each.alone_tpot_s),
        three(each.backlog.tokens_s),
        three(each.backlog.joules_token),
        f"{each.backlog.mfu:.2f}",
        f"{each.backlog.mbu:.2f}",
    ]
    if each.at_rate is not None and each.kept is not None:
        row += [seconds(quantile(each.at_rate.ttfts_s, 0.95)), seconds(quantile(each.at_rate.tpots_s, 0.95))]
        row.append(f"{100 * each.kept.both:.0f} %")
    return row


def _notes(efficiency: float, found: list[PlanOutcome]) -> list[str]:
    more = f" {len(found) - SHOWN} more plans are in --json." if len(found) > SHOWN else ""
    return [f"Simulated at {efficiency:g} of the roofline.{more}"]
