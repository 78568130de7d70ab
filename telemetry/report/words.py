"""Numbers of a report as text: times, counts and shares in few characters."""

from __future__ import annotations

MINUTE_MS, HOUR_MS = 60_000, 3_600_000


def duration(ms: float | None) -> str:
    """Milliseconds as text with three digits and a unit: "0.42 ms", "17.3 ms", "2.50 s", "3.4 min", "2.1 h"."""
    if ms is None:
        return "–"
    if ms < 0:
        return f"-{duration(-ms)}"
    for limit, unit, name in ((1000, 1, "ms"), (MINUTE_MS, 1000, "s"), (HOUR_MS, MINUTE_MS, "min")):
        if ms < limit:
            return f"{three(ms / unit)} {name}"
    return f"{three(ms / HOUR_MS)} h"


def shared(ms: float) -> str:
    """The cost of sharing as text; a negative one is none: the fit expected more than was seen."""
    return duration(ms) if ms >= 0 else "– (faster than fitted)"


def three(value: float | None) -> str:
    """A number with about three digits."""
    if value is None:
        return "–"
    if value >= 1000:
        return f"{value:,.0f}"
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:.{digits}f}"


def percent(share: float) -> str:
    """A share of 1 as percent."""
    return f"{100 * share:.1f} %" if share < 0.1 else f"{100 * share:.0f} %"
