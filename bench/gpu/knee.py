"""Where a larger batch stops being worth it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

GAIN = 0.10
"""A doubled batch that gives less more throughput is not worth its latency."""


def knee(rows: list[dict[str, Any]], gain: float = GAIN) -> int | None:
    """The first batch whose double gives less than `gain` more throughput; None if each gives more."""
    for row, double in pairwise(rows):
        if double["tokens_per_s"] / row["tokens_per_s"] - 1 < gain:
            return int(row["batch"])
    return None
