"""How long it takes from deciding on a worker to having it: measured, with everything that lies between."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

WEIGHT = 0.3
"""Of the newest start in the estimate."""
FORGOTTEN_S = 3600.0
"""A worker ordered so long ago is not going to come."""


@dataclass(frozen=True, slots=True)
class Starts:
    """Workers ordered and not there yet, and what the others took."""

    ordered: tuple[float, ...] = ()
    """When, oldest first."""
    known: frozenset[str] | None = None
    """Workers seen ready; None before the first look."""
    cold_s: float | None = None
    """Mean of recent starts; None: none was seen yet."""

    def wake_s(self, assumed_s: float, now: float) -> float:
        """Until the next worker is ready, as far as starts have taken so long; a whole start if none is ordered."""
        cold_s = assumed_s if self.cold_s is None else self.cold_s
        return max(0.0, cold_s - (now - self.ordered[0])) if self.ordered else cold_s


def seen(starts: Starts, ready: Iterable[str], now: float) -> Starts:
    """Workers that are ready for the first time end the wait for the longest ordered ones."""
    ready = frozenset(ready)
    if starts.known is None:
        return replace(starts, known=ready)
    ordered = [when for when in starts.ordered if now - when < FORGOTTEN_S]
    cold_s = starts.cold_s
    for _ in range(min(len(ready - starts.known), len(ordered))):
        took = now - ordered.pop(0)
        cold_s = took if cold_s is None else (1 - WEIGHT) * cold_s + WEIGHT * took
    return Starts(tuple(ordered), ready | starts.known if len(starts.known) < 1000 else ready, cold_s)


def ordered(starts: Starts, change: int, now: float) -> Starts:
    """`change` workers more are wanted now, or fewer: those ordered last are then not waited for."""
    if change >= 0:
        return replace(starts, ordered=(*starts.ordered, *[now] * change))
    return replace(starts, ordered=starts.ordered[: max(0, len(starts.ordered) + change)])
