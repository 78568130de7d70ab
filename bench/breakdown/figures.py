"""From timings to a table: the mean time of each part at each concurrency, and what takes most of it.

Means, because means of parts add up to the mean of the whole; the whole is what the client waited.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from bench import plots
from bench.breakdown.ask import AskedWhole, BreakdownLevel
from bench.report import Column, Ratio, Report
from telemetry.latency import EGRESS_FIRST, GROUPS, PARTS, bottleneck

OUTSIDE = "outside"
"""Between the client's clock and the server's first and last stamp: sockets, and what waits in them to be read."""

GATEWAY = (*GROUPS["gateway"], OUTSIDE)
"""What the path costs; the time outside is counted against it too."""

STACK = {"engine": GROUPS["engine"], "gateway": GATEWAY, "queue": GROUPS["queue"]}

COLUMNS = (
    Column("streams", "c"),
    Column("per_second", "req/s"),
    Column("end_to_end", "whole"),
    *(Column(f"{name}_ms", name) for name in STACK),
    Column("share", "share %", 2),
    Column("bottleneck", "bottleneck"),
    Column("ingress", "ingress", 2),
    Column("queue", "lane", 2),
    Column("gate", "gate", 2),
    Column("engine_wait", "wait", 2),
    Column("prefill", "prefill"),
    Column("decode", "decode"),
    Column("egress_tail", "tail", 2),
    Column(OUTSIDE, OUTSIDE, 2),
    Column(EGRESS_FIRST.name, "first", 2),
)

Timed = Sequence[tuple[AskedWhole, Mapping[str, Any]]]
Row = dict[str, Any]


def row_of(level: BreakdownLevel, timed: Timed) -> Row:
    """One concurrency. Times in ms; a timing without its end is left out and counted."""
    known = [(asked, timing) for asked, timing in timed if timing["until"] == "last_sent"]
    row: Row = {"streams": level.streams, "requests": len(level.asked), "wrong": dict(level.wrong)}
    row |= {"asked": len(timed), "timed": len(known)}
    if not known:
        return row
    for name in (*(part.name for part in PARTS), EGRESS_FIRST.name):
        row[name] = _mean(timing["parts_ms"][name] for _, timing in known)
    row[OUTSIDE] = fmean(asked.spent_ms - timing["end_to_end_ms"] for asked, timing in known)
    row["end_to_end"] = fmean(asked.spent_ms for asked, _ in known)
    row |= {f"{name}_ms": sum(row[part] or 0.0 for part in parts) for name, parts in STACK.items()}
    row["share"] = share_of(row)
    row["bottleneck"] = bottleneck({name: row[f"{name}_ms"] for name in STACK})
    row["clock_error"] = max(sum(timing["clock_error_ms"].values()) for _, timing in known)
    row["per_second"] = len(level.asked) / level.seconds if level.seconds else None
    return row


def share_of(row: Row) -> float:
    """The gateway's per cent of the end-to-end time, the queue excluded."""
    rest = row["gateway_ms"] + row["engine_ms"]
    return 100 * row["gateway_ms"] / rest if rest > 0 else 0.0


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def ratios_of(rows: Sequence[Row]) -> tuple[Ratio, ...]:
    """The gateway's share from 64 streams on, and whether it stays."""
    shares = {row["streams"]: row["share"] for row in rows if "share" in row}
    found = [
        Ratio.held(
            "breakdown.share", what=f"gateway share of end-to-end time without queue, c={streams}, %", value=share
        )
        for streams, share in shares.items()
        if streams >= 64
    ]
    if 64 in shares and 256 in shares:
        ratio, grown = shares[256] / shares[64] if shares[64] > 0 else None, shares[256] - shares[64]
        found.append(Ratio.held("breakdown.growth_ratio", what="gateway share at c=256 over that at c=64", value=ratio))
        found.append(Ratio.held("breakdown.growth", what="gateway share, growth from c=64 to 256, points", value=grown))
    return tuple(found)


def notes_of(rows: Sequence[Row], step_ms: float | None, tokens: int) -> list[str]:
    """What a reader has to know."""
    worst = max((row.get("clock_error", 0.0) for row in rows), default=0.0)
    said = [
        "Means over the timed requests, in ms. gateway = ingress + gate + tail + outside (between the client's clock "
        "and the server's first and last stamp); queue = lane + retries + wait (inside the engine); engine = prefill + "
        "decode; the gateway's share leaves the queue out. first (the first token's way out) runs beside decode.",
        f"Clocks of different processes are known to {worst:.2f} ms at worst, for single requests.",
    ]
    if step_ms:
        ideal = step_ms * (tokens - 1)
        late = [f"{row['decode'] - ideal:.1f} at c={row['streams']}" for row in rows if row.get("decode")]
        said.append(
            "The simulated engine steps in the worker's own process: what that process is late stands in decode, "
            f"{', '.join(late)} ms over its {step_ms:g} ms steps."
        )
    for row in rows:
        for what, count in row["wrong"].items():
            said.append(f"c={row['streams']}: {count} x {what}")
        if lost := row["asked"] - row["timed"]:
            said.append(f"c={row['streams']}: {lost} timings without their end were left out.")
    return said


def draw(report: Report, folder: Path) -> list[Path]:
    """The whole by groups, and what the gateway's part is made of; the files written."""
    rows = [row for row in report.rows if "share" in row]
    at = [row["streams"] for row in rows]
    x = plots.Axis(title="concurrent requests")
    whole = {name: [row[f"{name}_ms"] for row in rows] for name in STACK}
    path = {name.replace("_", " "): [max(0.0, row[name] or 0.0) for row in rows] for name in GATEWAY}
    return [
        *plots.bars(
            folder / report.name, "Where a request's time goes", at, whole, x=x, y=plots.Axis(title="ms, mean")
        ),
        *plots.bars(
            folder / f"{report.name}-gateway", "The gateway's part", at, path, x=x, y=plots.Axis(title="ms, mean")
        ),
    ]
