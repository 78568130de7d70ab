"""Statistics of a measurement: quantiles by the nearest rank, and medians with a confidence interval."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from math import comb
from statistics import fmean, median

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
        mean=fmean(ordered),
        p50=quantile(ordered, 0.5),
        p99=quantile(ordered, 0.99),
        most=ordered[-1],
    )


def quantile(ordered: Sequence[float], share: float) -> float:
    """Nearest rank: the least value that at least this share of them does not exceed. `ordered` must not be empty.

    The p99 of the load generator and of `order` is this one. The planner's interpolates (planner/search.py).
    """
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


COVERAGE = 0.95
"""The least coverage wanted."""


class MedianInterval(msgspec.Struct, frozen=True, kw_only=True):
    """A median and the interval around it: the `rank`-th smallest and the `rank`-th largest of the values."""

    median: float
    low: float
    high: float
    rank: int
    coverage: float
    """The probability that an interval made this way contains the true median."""


def median_interval(values: Sequence[float], wanted: float = COVERAGE) -> MedianInterval:
    """The narrowest symmetric interval of order statistics that contains the true median with probability `wanted`.

    Each of n independent values lies below the true median with probability 1/2, whatever their distribution is. So the
    number of values below it is binomial (n, 1/2), and the true median lies between the k-th smallest and the k-th
    largest value with probability

        coverage(n, k) = 1 - 2 * sum(C(n, i) for i in 0..k-1) / 2**n

    The interval takes the largest k <= (n + 1) / 2 whose coverage is at least `wanted`. With 9 values that is k = 2:
    the 2nd and the 8th, coverage 96.1 %. Up to 5 values no k covers 95 %: then k is 1 and `coverage` says what is left
    (93.8 % with 5 values, 0 with one). `values` must not be empty.
    """
    ordered, count = sorted(values), len(values)
    ranks = range(1, (count + 1) // 2 + 1)
    rank = max((rank for rank in ranks if coverage_of(count, rank) >= wanted), default=1)
    return MedianInterval(
        median=median(ordered),
        low=ordered[rank - 1],
        high=ordered[-rank],
        rank=rank,
        coverage=coverage_of(count, rank),
    )


def coverage_of(count: int, rank: int) -> float:
    """The probability that the true median lies between the `rank`-th smallest and largest of `count` values."""
    return 1 - 2 * sum(comb(count, below) for below in range(rank)) / float(2**count)


def percentile(ordered: Sequence[float], share: float) -> float | None:
    """The value at rank `share` times the count, from 0; None without values. `ordered` must be sorted.

    The p99 of `chaos` and of `jobs` is this one. It is one rank above `quantile` where `share` times the count is a
    whole number: of 100 values the largest, not the second largest. Committed results and their bounds mean this.
    """
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


def known_median(values: Iterable[float | None]) -> float | None:
    """The median of those that are there; None without any."""
    known = [value for value in values if value is not None]
    return median(known) if known else None


def over(mine: float | None, other: float | None) -> float | None:
    """One figure over another; None where one of them is not there, or the other is 0."""
    return None if mine is None or not other else mine / other
