"""Token cost: the price of a million tokens at the knee of a device's throughput, to compare devices.

SLM-Pareto compares small and large devices by price / (3600 * tokens a second at the knee).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeAlias, TypeVar

from planner.facts.device import Accelerator
from planner.facts.model import ModelShape
from planner.frontier import FrontierPoint, modelled
from planner.knee import GAIN
from planner.load import Precision, RequestLengths
from planner.roofline import RooflineInput

Limit: TypeAlias = Literal["knee", "memory"]
"""What ends a batch's growth: twice it gains less than a tenth, or it does not fit."""


@dataclass(frozen=True, slots=True)
class DeviceCost:
    """One device (or `tp` of them) at its knee."""

    device: Accelerator
    point: FrontierPoint
    limit: Limit
    price_per_hour: float | None
    """Of all `tp` devices."""
    points: tuple[FrontierPoint, ...] = ()
    """Batches that fit, doubling, and the largest."""

    @property
    def per_million(self) -> float | None:
        """The price of a million tokens of answers."""
        return None if self.price_per_hour is None else per_million(self.price_per_hour, self.point.tokens_s)


def per_million(price_per_hour: float, tokens_per_s: float) -> float:
    """The price of a million tokens, in the currency of the price."""
    return 1e6 * price_per_hour / (3600 * tokens_per_s)


def knee_of(points: Sequence[FrontierPoint], gain: float = GAIN) -> tuple[FrontierPoint, Limit]:
    """The first of rising batches where doubling gains less than `gain`; else the last, which memory limits. A step
    that is less than a doubling has to gain its part, on a logarithmic scale."""
    for point, more in pairwise(points):
        if more.tokens_s / point.tokens_s < (1 + gain) ** math.log2(more.batch / point.batch):
            return point, "knee"
    return points[-1], "memory"


def cost_of(
    model: ModelShape,
    device: Accelerator,
    lengths: RequestLengths,
    precision: Precision,
    tp: int,
    efficiency: float,
    price: float | None,
) -> DeviceCost:
    """The cost on one kind of device, `price` per hour and device. Raises PlanError if the model does not fit."""
    points = modelled(RooflineInput(model, device, precision, tp=tp), lengths, efficiency)
    return DeviceCost(device, *knee_of(points), None if price is None else price * tp, tuple(points))


@dataclass(frozen=True, slots=True)
class CostPoint:
    """One batch on one device: how long a request takes, and what a million tokens cost."""

    name: str
    """Of the device."""
    batch: int
    latency_s: float
    per_million: float


def cost_points(found: Sequence[DeviceCost]) -> list[CostPoint]:
    """Every batch on every device whose price is known."""
    return [
        CostPoint(each.device.name, point.batch, point.latency_s, per_million(each.price_per_hour, point.tokens_s))
        for each in found
        if each.price_per_hour is not None
        for point in each.points
    ]


T = TypeVar("T")


def pareto(points: Iterable[T], cost: Callable[[T], float], latency: Callable[[T], float]) -> list[T]:
    """By rising latency, those that no other beats: none costs as little at less latency."""
    kept: list[T] = []
    for point in sorted(points, key=lambda each: (latency(each), cost(each))):
        if not kept or cost(point) < cost(kept[-1]):
            kept.append(point)
    return kept


def cost_advice(found: Sequence[DeviceCost]) -> str:
    """Which device to take, and why."""
    priced = [each for each in found if each.per_million is not None]
    if len(priced) == len(found):
        best = min(priced, key=lambda each: each.per_million or 0.0)
        others = [each for each in priced if each is not best]
        beside = ", ".join(
            f"{(each.per_million or 0) / (best.per_million or 1):.2f} x on {each.device.name}" for each in others
        )
        return (
            f"{best.device.name} is the cheapest: {best.per_million:.3g} for a million tokens at a batch of "
            f"{best.point.batch}" + (f", beside {beside}." if beside else ".")
        )
    slow, *faster = sorted(found, key=lambda each: each.point.tokens_s)
    if not faster:
        return (
            f"{slow.device.name} yields {3600 * slow.point.tokens_s / 1e6:.3g} million tokens an hour at a batch of "
            f"{slow.point.batch}; give --price {slow.device.name}=PRICE for the price of a million."
        )
    ratios = ", ".join(
        f"{each.device.name} may cost up to {each.point.tokens_s / slow.point.tokens_s:.1f} x" for each in faster
    )
    return f"Beside the price of an hour of {slow.device.name}, {ratios}: so many times more tokens it yields."
