"""Mean of the newest values of a series. Pure."""

from __future__ import annotations

SMOOTHING = 50
"""Values over which it is smoothed."""


class Smoothed:
    """Mean of the newest values."""

    def __init__(self) -> None:
        self.value, self._count = 0.0, 0

    def note(self, value: float) -> None:
        """Take one more value into account."""
        self._count = min(SMOOTHING, self._count + 1)
        self.value += (value - self.value) / self._count
