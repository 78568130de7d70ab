"""How long readers waited because of a fault: the longest silence each saw across it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from bench.chaos.checker import lives_of
from bench.chaos.history import Event, of_kind


def stalls_ms(events: Sequence[Event]) -> list[float]:
    """For each fault and each reader that had a token before it and one after it: the longest gap between two tokens
    that reaches beyond the fault and begins before the next one."""
    faults = [event["t"] for event in of_kind(events, "fault")]
    found = []
    for life in lives_of(events).values():
        times = [event["t"] for event in life.of("token")]
        for fault, following in zip(faults, [*faults[1:], float("inf")], strict=False):
            if times and times[0] <= fault < times[-1]:
                found.append(_longest(times, fault, following))
    return sorted(found)


def _longest(times: Sequence[float], fault: float, following: float) -> float:
    gaps = itertools.pairwise(times)
    return max((1000 * (after - before) for before, after in gaps if after > fault and before < following), default=0.0)


def percentile(values: Sequence[float], share: float) -> float | None:
    """Of sorted values, by the nearest rank; None without any."""
    if not values:
        return None
    return values[min(len(values) - 1, int(share * len(values)))]
