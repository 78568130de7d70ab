"""Timing chart of one job: a table with a bar per part of its time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from telemetry.latency import EGRESS_FIRST, PARTS

WIDTH = 40
"""Length of the longest bar in characters."""

HEADER = ("PART", "MS", "", "WHAT IT IS")


def rows(timing: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    """The rows: the parts in order, each bar at its offset; then the overlapping part, the sum, and the latencies."""
    parts, whole = timing["parts_ms"], timing["end_to_end_ms"] or timing["sum_ms"]
    begun = 0.0
    for part in PARTS:
        spent = parts[part.name]
        yield part.name, _ms(spent), _bar(begun, spent or 0.0, whole), _said(timing, part.name, part.meaning)
        begun += spent or 0.0
    beside = sum(parts[part.name] or 0.0 for part in PARTS if part.name not in ("decode", "egress_tail"))
    name = EGRESS_FIRST.name
    yield name, _ms(parts[name]), _bar(beside, parts[name] or 0.0, whole), _said(timing, name, "beside decode")
    yield "sum", _ms(timing["sum_ms"]), "", _groups(timing)
    if timing["end_to_end_ms"] is not None:
        yield "end to end", _ms(timing["end_to_end_ms"]), "", f"received to {timing['until']}".replace("_", " ")
    for key, label in (
        ("time_to_first_token_ms", "TTFT"),
        ("gateway_time_to_first_token_ms", "gateway TTFT"),
        ("time_per_output_token_ms", "TPOT"),
    ):
        if timing[key] is not None:
            yield label, _ms(timing[key]), "", ""


def bounds(timing: dict[str, Any]) -> str:
    """The error bound of the processes' clocks."""
    error = timing["clock_error_ms"]
    return f"clocks known to {error['api']:.3f} ms (API) and {error['worker']:.3f} ms (worker)"


def _groups(timing: dict[str, Any]) -> str:
    return ", ".join(f"{name} {spent:.1f}" for name, spent in timing["groups_ms"].items())


def _said(timing: dict[str, Any], name: str, meaning: str) -> str:
    return str(timing["reasons"].get(name) or meaning)


def _ms(spent: float | None) -> str:
    return "-" if spent is None else f"{spent:.3f}"


def _bar(begun: float, spent: float, whole: float) -> str:
    """A bar; a part that took any time has at least one character."""
    if whole <= 0 or spent <= 0:
        return ""
    start = min(WIDTH - 1, int(WIDTH * max(0.0, begun) / whole))
    return " " * start + "█" * max(1, min(WIDTH - start, round(WIDTH * spent / whole)))
