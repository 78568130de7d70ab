"""`penstock plan cost`: what a million tokens cost on each of several GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_lowercase
from typing import Any

import click

from cli.plan.command import (
    LEAST,
    MOST,
    PlanAnswer,
    PlanTable,
    bits_options,
    device_named,
    efficiency_option,
    given,
    length_options,
    model_options,
    plan_command,
    plot,
    seconds,
    three,
    tp_option,
)
from planner.cost import CostPoint, DeviceCost, cost_advice, cost_of, cost_points, pareto
from planner.facts.catalogue import PlanError
from planner.facts.device import Accelerator
from planner.facts.model import ModelShape
from planner.load import Precision, RequestLengths

CURRENCY = "USD"
"""Of the prices that are assumed, and so of those that are given beside them."""


def prices_of(texts: tuple[str, ...], names: tuple[str, ...]) -> dict[str, float]:
    """Prices by device of texts such as h200=3.80. Raises PlanError."""
    found: dict[str, float] = {}
    for text in texts:
        name, equals, number = text.partition("=")
        try:
            price = float(number)
        except ValueError:
            price = -1.0
        if not equals or not LEAST <= price <= MOST or name not in names:
            raise PlanError(
                f"--price {text}: write NAME=PRICE for a --gpu that is given ({', '.join(names)}), as {names[0]}=2.50"
            )
        found[name] = price
    return found


@plan_command("cost")
@model_options
@click.option("--gpu", "gpus", metavar="NAME", multiple=True, required=True, help="GPU; give it again for others.")
@click.option("--price", "prices", metavar="NAME=PRICE", multiple=True, help="Of an hour of one such GPU.")
@length_options
@bits_options
@tp_option
@efficiency_option
def cost(
    model: ModelShape,
    gpus: tuple[str, ...],
    prices: tuple[str, ...],
    lengths: RequestLengths,
    precision: Precision,
    tp: int,
    efficiency: float,
) -> PlanAnswer:
    """Compare what a million tokens cost on several GPUs, each at the knee of its throughput.

    A GPU whose price is not given has an assumed one; without any, it says how many times the price of one GPU another
    may cost.
    """
    known, devices = prices_of(prices, gpus), [device_named(name) for name in gpus]
    found = [
        cost_of(model, each, lengths, precision, tp, efficiency, known.get(name, each.price_per_hour))
        for name, each in zip(gpus, devices, strict=True)
    ]
    assumed = [each for name, each in zip(gpus, devices, strict=True) if name not in known]
    value = {
        **{key: each for key, each in given(model, found[0].device, lengths, precision).items() if "gpu" not in key},
        "tp": tp,
        "efficiency": efficiency,
        "gpus": [_as_json(each) for each in found],
    }
    points = cost_points(found)
    kept = pareto(points, _price, _latency)
    value["pareto"] = [
        {
            "gpu": each.name,
            "batch": each.batch,
            "latency_s": each.latency_s,
            "price_per_million_tokens": each.per_million,
        }
        for each in kept
    ]  # fmt: skip
    value["assumed_prices"] = {each.name: each.price_per_hour for each in assumed if each.price_per_hour is not None}
    currency = CURRENCY if value["assumed_prices"] else ""
    value["currency"] = currency or None
    advice, drawn = cost_advice(found, currency), pareto_plot(points, kept)
    return PlanAnswer(value, [_table(found, currency or "price")], advice, drawn, assumed_prices(assumed))


def assumed_prices(devices: Sequence[Accelerator]) -> list[str]:
    """Say which prices of an hour nobody gave."""
    named = [f"{each.name} {each.price_per_hour:.2f}" for each in devices if each.price_per_hour is not None]
    if not named:
        return []
    return [f"Assumed prices, US dollars of an hour on demand in 2025: {', '.join(named)}. Give your own with --price."]


def _price(each: CostPoint) -> float:
    return each.per_million


def _latency(each: CostPoint) -> float:
    return each.latency_s


def pareto_plot(points: Sequence[CostPoint], kept: Sequence[CostPoint]) -> str:
    """Price over latency of all batches: a letter for each GPU, capital where no other batch beats it in both. Without
    prices: ""."""
    if not points:
        return ""
    letters = dict(zip(dict.fromkeys(each.name for each in points), ascii_lowercase, strict=False))
    points = sorted(points, key=kept.__contains__)  # those that are kept are drawn last, over the others
    signs = "".join(letters[each.name].upper() if each in kept else letters[each.name] for each in points)
    drawn = plot([(each.latency_s, each.per_million) for each in points], "latency of a request, s",
                 "price of a million tokens", signs=signs)  # fmt: skip
    names = ", ".join(f"{letter}: {name}" for name, letter in letters.items())
    return f"{drawn}\n{names}; each letter is a batch, doubling; capital: no other is as cheap at less latency"


def _as_json(each: DeviceCost) -> dict[str, Any]:
    return {
        "gpu": each.device.name,
        "gpu_source": each.device.source,
        "price_per_hour": each.price_per_hour,
        "batch_at_knee": each.point.batch,
        "tokens_s": each.point.tokens_s,
        "latency_s": each.point.latency_s,
        "price_per_million_tokens": each.per_million,
        "joules_per_token": each.point.joules_token,
        "limit": each.limit,
    }


def _table(found: list[DeviceCost], money: str) -> PlanTable:
    rows = [
        (
            each.device.name,
            f"{each.point.batch}",
            each.limit,
            three(each.point.tokens_s),
            seconds(each.point.latency_s),
            "-" if each.point.joules_token is None else three(each.point.joules_token),
            "-" if each.price_per_hour is None else three(each.price_per_hour),
            "-" if each.per_million is None else three(each.per_million),
        )
        for each in found
    ]
    header = ("gpu", "batch", "ends at", "tokens/s", "request", "J/token", f"{money}/h", f"{money}/1M tokens")
    return PlanTable(header, rows)
