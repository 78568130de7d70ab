"""A job's timing as a table of bars: one row per part, each as long as its share of the whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from telemetry.latency import EGRESS_FIRST, PARTS

WIDTH = 40
"""Characters of the longest bar there can be."""

HEADER = ("PART", "MS", "", "WHAT IT IS")


def rows(timing: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    """The parts in order, each bar where its time lies; then the part beside them, the sum, the latencies."""
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
    """How exactly the clocks of the processes are known."""
    error = timing["clock_error_ms"]
    return f"clocks known to {error['api']:.3f} ms (API) and {error['worker']:.3f} ms (worker)"


def _groups(timing: dict[str, Any]) -> str:
    return ", ".join(f"{name} {spent:.1f}" for name, spent in timing["groups_ms"].items())


def _said(timing: dict[str, Any], name: str, meaning: str) -> str:
    return str(timing["reasons"].get(name) or meaning)


def _ms(spent: float | None) -> str:
    return "-" if spent is None else f"{spent:.3f}"


def _bar(begun: float, spent: float, whole: float) -> str:
    """A part that took any time has at least one mark."""
    if whole <= 0 or spent <= 0:
        return ""
    start = min(WIDTH - 1, int(WIDTH * max(0.0, begun) / whole))
    return " " * start + "█" * max(1, min(WIDTH - start, round(WIDTH * spent / whole)))
