"""Priority of a job: the lane of its model that it waits in."""

from __future__ import annotations

from enum import StrEnum


class Priority(StrEnum):
    """The lanes of a model, highest first."""

    INTERACTIVE = "interactive"
    STANDARD = "standard"
    BATCH = "batch"

    @property
    def rank(self) -> int:
        """0 is the highest lane."""
        return RANKS[self]


RANKS = {priority: rank for rank, priority in enumerate(Priority)}

HIGHER = {lane: tuple(above for above in Priority if above.rank < lane.rank) for lane in Priority}
"""The lanes above each lane, highest first."""
