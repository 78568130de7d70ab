"""Lanes as the scheduler's policy sees them."""

from __future__ import annotations

from streaming.order import LaneDepth, Priority


def a_lane(name: str, waiting: int = 0, running: int = 0, oldest_s: float = 0.0, added: int = 0) -> LaneDepth:
    """A lane of model `m`."""
    return LaneDepth("m", Priority(name), waiting, running, round(1000 * oldest_s), added)
