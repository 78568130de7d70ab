"""View of `penstock top`: one overview of the API as tables for a terminal. Pure but for the clock of its caller."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from datetime import datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cli.output import visible
from telemetry.report.words import duration, three

FLOWS = {"flowing": "bold green", "behind": "bold yellow", "stopped": "bold red", "unknown": "bold"}
SEVERITIES = {"error": "red", "warning": "yellow", "note": ""}
NONE = "–"
KEYS = "q leaves, p pauses"
MAX_PROBLEMS = 5
NARROW = 80
"""Columns of a terminal below which the tables leave out what can be seen elsewhere."""

Overview = Mapping[str, Any]


def frame(
    overview: Overview, url: str, *, stale: str = "", paused: bool = False, live: bool = True, width: int = NARROW
) -> RenderableType:
    """One screen.

    Args:
        overview: as GET /admin/overview answers it.
        stale: why there is no newer one; then nothing is said about what is wrong now.
        live: the screen is redrawn, so it says which keys it knows.
        width: columns of the terminal.
    """
    blocks: list[RenderableType] = [_head(overview, url, stale, paused=paused, live=live), Text("")]
    if not stale:
        blocks += _problems(overview["verdict"]["problems"])
    blocks += [
        _rates(overview["rates"], width),
        Text(""),
        _lanes(overview["pools"], width),
        Text(""),
        _workers(overview, width),
    ]
    return Group(*blocks)


def _head(overview: Overview, url: str, stale: str, *, paused: bool, live: bool) -> RenderableType:
    """The verdict, and how fresh it is."""
    verdict = overview["verdict"]
    flow, title = ("unknown", f"Unknown: {stale}.") if stale else (verdict["flow"], verdict["title"])
    state = "data of" if stale or paused else "live" if live else "at"
    line = Text.assemble(
        (visible(title), FLOWS.get(flow, "")), "\n", (f"{url}   {state} {_clock(overview['at'])}", "dim")
    )
    if paused:
        line.append("   paused", "yellow")
    if live:
        line.append(f"   {KEYS}", "dim")
    return line


def _problems(problems: Sequence[Mapping[str, Any]]) -> Iterator[RenderableType]:
    """What is wrong now, the worst first: each with its cause and what to do."""
    for each in problems[:MAX_PROBLEMS]:
        yield Text.assemble(
            (f"{each['severity']}: ", SEVERITIES.get(each["severity"], "")),
            visible(each["title"]),
            (f"\n  cause: {visible(each['cause'])}" if each["cause"] else "", "dim"),
            (f"\n  next:  {visible(each['next_step'])}" if each["next_step"] else "", ""),
        )
    if len(problems) > MAX_PROBLEMS:
        yield Text(f"and {len(problems) - MAX_PROBLEMS} more: penstock console", "dim")
    if problems:
        yield Text("")


def _rates(rates: Mapping[str, Any], width: int) -> RenderableType:
    """Throughput and latencies of the last moments; unknown, not 0, where nothing was measured."""
    latencies = _table("", "p50", "p95", right=(1, 2))
    latencies.add_row("first token", *_pair(rates["first_token_ms"]))
    latencies.add_row("between tokens", *_pair(rates["per_token_ms"]))
    flow = _table("", "", right=(1,))
    if width >= NARROW:
        flow.add_row("", "")  # beside the other table's header
    flow.add_row("tokens per second", _number(rates["tokens_per_s"]))
    flow.add_row("jobs per second", _number(rates["jobs_per_s"]))
    flow.add_row("open streams", str(rates["open_streams"]))
    if rates["failed"]:
        flow.add_row(Text("failed in the last minute", "red"), str(rates["failed"]))
    if width < NARROW:
        return Group(latencies, flow)
    beside = Table.grid(padding=(0, 4, 0, 0))
    beside.add_row(latencies, flow)
    return beside


def _lanes(pools: Sequence[Mapping[str, Any]], width: int) -> RenderableType:
    left_out = {5} if width < NARROW else set()
    table = _table("MODEL", "LANE", "WAITING", "OLDEST", "RUNNING", "WORKERS", right=(2, 3, 4, 5), left_out=left_out)
    for pool in pools:
        model, workers = visible(pool["model"]), f"{pool['ready']} of {pool['want']}"
        for name, lane in pool["lanes"].items():
            oldest = duration(1000 * lane["oldest_s"]) if lane["waiting"] else NONE
            waiting = Text(str(lane["waiting"]), "yellow" if lane["waiting"] else "")
            _add(table, left_out, model, name, waiting, oldest, str(lane["running"]), workers)
            model = workers = ""
    reasons = [Text(f"{visible(pool['model'])}: {visible(pool['reason'])}", "dim") for pool in pools]
    return Group(table, *reasons)


def _workers(overview: Overview, width: int) -> RenderableType:
    left_out = {1, 4} if width < NARROW else set()
    table = _table(
        "PROCESS", "HOST", "STATE", "SLOTS", "", "KV", "STEP", "SINCE", right=(3, 5, 6, 7), left_out=left_out
    )
    steps = {each["id"]: each["step_ms"] for pool in overview["pools"] for each in pool["workers"]}
    for each in overview["processes"]:
        slots = each["slots"] or 0
        behind = f", {each['waiting']} wait" if each.get("waiting") else ""
        used = f"{each['running'] or 0}/{slots}{behind}" if slots else ""
        said = "server away" if each.get("away") and each["state"] == "ready" else each["state"]
        state = Text(visible(said), "" if said == "ready" else "yellow")
        step = steps.get(each["id"]) if each["role"] == "worker" else None
        _add(
            table,
            left_out,
            visible(each["id"]),
            visible(each["host"]),
            state,
            used,
            _bar((each["running"] or 0) / slots if slots else 0.0),
            f"{each['kv_used'] / each['kv_tokens']:.0%}" if each["kv_tokens"] else "",
            duration(step) if step else "",
            duration(1000 * max(0.0, overview["at"] - each["since"])),
        )
    return table


def _table(*names: str, right: tuple[int, ...] = (), left_out: Set[int] = frozenset()) -> Table:
    table = Table(box=None, pad_edge=False, show_header=any(names), header_style="dim")
    for place, name in enumerate(names):
        if place in left_out:
            continue
        table.add_column(name, justify="right" if place in right else "left", no_wrap=True)
    return table


def _add(table: Table, left_out: Set[int], *cells: str | Text) -> None:
    """Add a row without the cells of the columns that are left out."""
    table.add_row(*(cell for place, cell in enumerate(cells) if place not in left_out))


def _bar(share: float, width: int = 12) -> str:
    """How full something is; as text, so that it needs no colour."""
    filled = round(min(1.0, share) * width)
    return "█" * filled + "·" * (width - filled) if share else ""


def _pair(pair: Mapping[str, float] | None) -> tuple[str, str]:
    return (NONE, NONE) if pair is None else (duration(pair["p50"]), duration(pair["p95"]))


def _number(value: float | None) -> str:
    return NONE if value is None else three(value)


def _clock(at: float) -> str:
    """A Unix time as this machine's clock shows it."""
    return f"{datetime.fromtimestamp(at):%H:%M:%S}"
