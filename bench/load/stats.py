"""Numbers that stand for many."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """How values lie; all 0 where there are none."""

    count: int = 0
    mean: float = 0.0
    p50: float = 0.0
    p99: float = 0.0
    most: float = 0.0


def spread(values: Sequence[float]) -> Spread:
    """Quantiles by the nearest rank: each is a value that occurred."""
    if not values:
        return Spread()
    ordered = sorted(values)
    return Spread(
        count=len(ordered),
        mean=math.fsum(ordered) / len(ordered),
        p50=quantile(ordered, 0.5),
        p99=quantile(ordered, 0.99),
        most=ordered[-1],
    )


def quantile(ordered: Sequence[float], share: float) -> float:
    """The least value that at least this share of them does not exceed. `ordered` must not be empty."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
