"""Cold-start estimator: measures the time from ordering a worker until it is ready."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

NEWEST_WEIGHT = 0.3
"""Weight of the newest start in the moving average."""
ORDER_TIMEOUT_S = 3600.0
"""An order older than this is dropped."""


@dataclass(frozen=True, slots=True)
class Starts:
    """Workers ordered and not ready yet, and the moving average of past starts."""

    ordered: tuple[float, ...] = ()
    """Times of the open orders, oldest first."""
    known: frozenset[str] | None = None
    """Workers seen ready; None before the first snapshot."""
    cold_s: float | None = None
    """Moving average of recent starts in seconds; None: none was seen yet."""

    def wake_s(self, assumed_s: float, now: float) -> float:
        """Estimated seconds until the next worker is ready; a whole cold start if none is ordered."""
        cold_s = assumed_s if self.cold_s is None else self.cold_s
        return max(0.0, cold_s - (now - self.ordered[0])) if self.ordered else cold_s


def seen(starts: Starts, ready: Iterable[str], now: float) -> Starts:
    """Match workers that are ready for the first time with the oldest orders."""
    ready = frozenset(ready)
    if starts.known is None:
        return replace(starts, known=ready)
    ordered = [when for when in starts.ordered if now - when < ORDER_TIMEOUT_S]
    cold_s = starts.cold_s
    for _ in range(min(len(ready - starts.known), len(ordered))):
        took = now - ordered.pop(0)
        cold_s = took if cold_s is None else (1 - NEWEST_WEIGHT) * cold_s + NEWEST_WEIGHT * took
    return Starts(tuple(ordered), ready | starts.known if len(starts.known) < 1000 else ready, cold_s)


def ordered(starts: Starts, change: int, now: float) -> Starts:
    """Order `change` more workers, or cancel the newest orders if it is negative."""
    if change >= 0:
        return replace(starts, ordered=(*starts.ordered, *[now] * change))
    return replace(starts, ordered=starts.ordered[: max(0, len(starts.ordered) + change)])
