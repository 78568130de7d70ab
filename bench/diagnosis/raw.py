"""Raw records of a diagnosis: the lines of requests and the figures that follow from them, without the report's code.

Times are milliseconds; a percentile is the smallest value that so many of all values do not exceed (nearest rank).
"""

from __future__ import annotations

import contextlib
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from telemetry.report.figures import GroupFigures

Line = dict[str, Any]
ENDS = {
    "ingress": "accepted_us",
    "queue": "started_us",
    "retries": "claimed_us",
    "gate": "released_us",
    "engine_wait": "scheduled_us",
    "prefill": "first_us",
    "decode": "last_us",
    "egress_tail": "last_sent_us",
}
"""The parts of a request's time, each with the stamp that ends it."""
SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}


def raw(records: Path, since: float = 0.0, until: float = float("inf")) -> list[Line]:
    """The lines of requests that ended in a window of Unix seconds, each with the stamps of its delivery."""
    rows: list[Line] = []
    for path in records.glob("*.jsonl"):
        for line in path.read_bytes().splitlines():
            with contextlib.suppress(ValueError):
                rows.append(json.loads(line))
    sent = {row["id"]: row for row in rows if row["kind"] == "delivery"}
    ended = [row for row in rows if row["kind"] == "request" and since <= row["ended_us"] / 1e6 < until]
    return [sent.get(row["id"], {}) | row for row in ended]


def raw_figures(rows: Sequence[Line]) -> dict[str, float]:
    """Percentiles of waits, first tokens, time per token and whole time, and the sum of each part."""
    done = [row for row in rows if row["state"] == "completed"]
    times = {
        "wait": [_wait_us(row) for row in rows if row.get("accepted_us")],
        "ttft": [(row.get("first_sent_us") or row["first_us"]) - _begin(row) for row in done],
        "itl": [(row["last_us"] - row["first_us"]) / (_own(row) - 1) for row in done if _own(row) > 1],
        "e2e": [(row.get("last_sent_us") or row["last_us"]) - _begin(row) for row in done],
    }
    found: dict[str, float] = {}
    for name, values in times.items():
        ordered = sorted(max(0, value) / 1000 for value in values)
        for word, share in SHARES.items() if ordered else ():
            found[f"{name} {word}"] = ordered[max(0, math.ceil(share * len(ordered)) - 1)]
    parts: Counter[str] = Counter()
    for row in done:
        since = _begin(row)
        for part, stamp in ENDS.items():
            if end := row.get(stamp, 0):
                parts[part] += max(0, end - since)
                since = end
    return found | {part: spent / 1000 for part, spent in parts.items()}


def differing(figures: GroupFigures, rows: Sequence[Line]) -> list[str]:
    """Which of these figures the report has otherwise."""
    expected, given = raw_figures(rows), _reported(figures)
    return [
        name
        for name in {**expected, **given}
        if not math.isclose(expected.get(name, 0.0), given.get(name, 0.0), rel_tol=1e-9, abs_tol=1e-9)
    ]


def _reported(figures: GroupFigures) -> Mapping[str, float]:
    kinds = {"wait": figures.wait, "ttft": figures.ttft, "itl": figures.itl, "e2e": figures.e2e}
    found = {f"{name} {word}": getattr(each, word) for name, each in kinds.items() if each for word in SHARES}
    return found | dict(figures.parts)


def _begin(row: Line) -> int:
    return int(row.get("received_us") or row["accepted_us"])


def _wait_us(row: Line) -> int:
    return int((row.get("started_us") or row.get("claimed_us") or row["ended_us"]) - row["accepted_us"])


def _own(row: Line) -> float:
    return float(row.get("completion_tokens", 0) - row.get("continued_tokens", 0)) / (row.get("choices") or 1)
