"""`penstock top`: lanes, workers, latencies and what is wrong now, live in a terminal."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import click
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cli.client import Client
from cli.options import command
from cli.output import Exit, Problem, ended_by_signals, print_json, rich_console, terminal_width, visible
from penstock.text import duration, three

FLOWS = {"flowing": "bold green", "behind": "bold yellow", "stopped": "bold red", "unknown": "bold"}
SEVERITIES = {"error": "red", "warning": "yellow", "note": ""}
NONE = "–"
KEYS = "q leaves, p pauses"
MAX_PROBLEMS = 5
NARROW = 80
"""Columns of a terminal below which the tables leave out what can be seen elsewhere."""

OVERVIEW = "/admin/overview"
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
    blocks += [_rates(overview["rates"], width), Text(""), _lanes(overview["pools"]), Text(""), _workers(overview)]
    return Group(*blocks)


def _head(overview: Overview, url: str, stale: str, *, paused: bool, live: bool) -> RenderableType:
    """The verdict, and how fresh it is."""
    verdict = overview["verdict"]
    flow, title = ("unknown", f"Unknown: {stale}.") if stale else (verdict["flow"], verdict["title"])
    state = "data of" if stale or paused else "live" if live else "at"
    clock = f"{datetime.fromtimestamp(overview['at']):%H:%M:%S}"  # as this machine's clock shows it
    return Text.assemble(
        (visible(title), FLOWS.get(flow, "")),
        ("\n" + f"{url}   {state} {clock}", "dim"),
        ("   paused" if paused else "", "yellow"),
        (f"   {KEYS}" if live else "", "dim"),
    )


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
    for label, name in (("first token", "first_token_ms"), ("between tokens", "per_token_ms")):
        latencies.add_row(label, *(duration((rates[name] or {}).get(rank)) for rank in ("p50", "p95")))
    flow = _table("NOW", "", right=(1,))
    flow.add_row("tokens per second", three(rates["tokens_per_s"]))
    flow.add_row("jobs per second", three(rates["jobs_per_s"]))
    flow.add_row("open streams", str(rates["open_streams"]))
    if rates["failed"]:
        flow.add_row(Text(f"failed in {rates['window_s']:.0f} s", "red"), str(rates["failed"]))
    if width < NARROW:
        return Group(latencies, flow)
    beside = Table.grid(padding=(0, 4, 0, 0))
    beside.add_row(latencies, flow)
    return beside


def _lanes(pools: Sequence[Mapping[str, Any]]) -> RenderableType:
    table = _table("MODEL", "LANE", "WAITING", "OLDEST", "RUNNING", "WORKERS", right=(2, 3, 4, 5))
    for pool in pools:
        model, workers = visible(pool["model"]), f"{pool['ready']} of {pool['want']}"
        for name, lane in pool["lanes"].items():
            oldest = duration(1000 * lane["oldest_s"]) if lane["waiting"] else NONE
            waiting = Text(str(lane["waiting"]), "yellow" if lane["waiting"] else "")
            table.add_row(model, name, waiting, oldest, str(lane["running"]), workers)
            model = workers = ""
    return Group(table, *(Text(f"{visible(pool['model'])}: {visible(pool['reason'])}", "dim") for pool in pools))


def _workers(overview: Overview) -> RenderableType:
    table = _table("PROCESS", "HOST", "STATE", "SLOTS", "", "KV", "STEP", "SINCE", right=(3, 5, 6, 7))
    steps = {each["id"]: each["step_ms"] for pool in overview["pools"] for each in pool["workers"]}
    for each in overview["processes"]:
        slots, running = each["slots"] or 0, each["running"] or 0
        behind = f", {each['waiting']} wait" if each.get("waiting") else ""
        behind += f", {each['swaps']} adapter loads" if each.get("swaps") else ""
        said = "server away" if each.get("away") and each["state"] == "ready" else each["state"]
        step = steps.get(each["id"]) if each["role"] == "worker" else None
        table.add_row(
            visible(each["id"]),
            visible(each["host"]),
            Text(visible(said), "" if said == "ready" else "yellow"),
            f"{running}/{slots}{behind}" if slots else "",
            _bar(running / slots if slots else 0.0),
            f"{each['kv_used'] / each['kv_tokens']:.0%}" if each["kv_tokens"] else "",
            duration(step) if step else "",
            duration(1000 * max(0.0, overview["at"] - each["since"])),
        )
    return table


def _table(*names: str, right: tuple[int, ...] = ()) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for place, name in enumerate(names):
        table.add_column(name, justify="right" if place in right else "left", no_wrap=True)
    return table


def _bar(share: float, width: int = 12) -> str:
    """How full something is; as text, so that it needs no colour."""
    return f"{'█' * round(min(1.0, share) * width):·<{width}}" if share else ""


@contextmanager
def pressing() -> Iterator[Callable[[float], str]]:
    """Yields a function that returns the keys that were pressed, waiting at most so long for the first one; "" if none
    was. Where stdin is no terminal, no key is ever pressed."""
    fds, before = list[int](), list[Any]()
    with contextlib.suppress(termios.error, OSError, ValueError):  # ValueError: a stream without a file
        before = termios.tcgetattr(sys.stdin.fileno())
        tty.setcbreak(sys.stdin.fileno())  # Ctrl-C stays a signal
        fds = [sys.stdin.fileno()]

    def pressed(timeout_s: float) -> str:
        ready, _, _ = select.select(fds, [], [], max(0.0, timeout_s))
        return os.read(fds[0], 64).decode(errors="replace") if ready else ""

    try:
        yield pressed
    finally:
        if fds:
            termios.tcsetattr(fds[0], termios.TCSADRAIN, before)


FORGET_S = 60.0
"""A server that does not answer for so long ends the command."""


@command("top")
@click.option("--once", is_flag=True, help="Print one screen and exit.")
@click.option(
    "--interval", type=click.FloatRange(0.5, 60), default=1.0, show_default=True, help="Seconds between two screens."
)
def top(client: Client, once: bool, interval: float, as_json: bool) -> int:
    """Show live what waits, what the workers do, how fast answers are, and what is wrong now. Needs an admin key.

    With --json, one object for each screen, as GET /admin/overview answers it.

    \b
    Examples:
      penstock top
      penstock top --once
      penstock top --json --interval 10
    """
    if not (once or as_json) and (not sys.stdout.isatty() or os.environ.get("TERM") == "dumb"):
        raise click.UsageError("top needs a terminal: use --once or --json here, or penstock ps --json")
    try:
        if once:
            found = client.get(OVERVIEW)
            if found["rates"]["window_s"] is None:  # rates are between two readings of an API process
                time.sleep(1.1)
                found = client.get(OVERVIEW)
            _print(found, client.url, as_json=as_json)
        while as_json and not once:
            print_json(client.get(OVERVIEW))
            sys.stdout.flush()
            time.sleep(interval)
        if not once:
            _show(client, interval)
    except KeyboardInterrupt:
        return Exit.INTERRUPTED
    return Exit.DONE


def _print(overview: Overview, url: str, *, as_json: bool) -> None:
    if as_json:
        print_json(overview)
    else:
        width = terminal_width(sys.stdout)
        console = rich_console(width if sys.stdout.isatty() else max(100, width))
        console.print(frame(overview, url, live=False, width=console.width))


def _show(client: Client, interval: float) -> None:
    """Redraw the screen until q or Ctrl-C; restores the terminal whatever ends it. Raises Problem."""
    overview, read_at, stale, paused = client.get(OVERVIEW), time.monotonic(), "", False
    with ended_by_signals(), pressing() as keys, Live(console=rich_console(), screen=True, auto_refresh=False) as live:
        while True:
            shown = frame(overview, client.url, stale=stale, paused=paused, width=live.console.width)
            live.update(shown, refresh=True)
            pressed = keys(interval)
            if "q" in pressed:
                return
            paused ^= bool(pressed.count("p") % 2)
            if paused:
                continue
            try:
                overview, read_at, stale = client.get(OVERVIEW), time.monotonic(), ""
            except Problem as problem:
                silent_s = time.monotonic() - read_at
                if problem.exit_code != Exit.UNREACHABLE or silent_s > FORGET_S:
                    raise
                stale = f"the server has not answered for {silent_s:.0f} s"
