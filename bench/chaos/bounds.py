"""Bounds of the fault rows beyond the invariants, from bench/goals.toml, which says of each when and why it was set."""

from __future__ import annotations

from bench.report import goals


def bound(name: str) -> float:
    """The value of a goal. Raises KeyError."""
    return goals()[name].bound
