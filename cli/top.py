"""`penstock top`: lanes, workers, latencies and what is wrong now, live in a terminal."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cli.client import Client
from cli.options import command
from cli.output import (
    DONE,
    INTERRUPTED,
    UNREACHABLE,
    Problem,
    ended_by_signals,
    print_json,
    styled,
    terminal_width,
    visible,
)
from penstock.text import duration, three

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
    latencies.add_row("first token", *_pair(rates, "first_token_ms"))
    latencies.add_row("between tokens", *_pair(rates, "per_token_ms"))
    flow = _table("", "", right=(1,))
    if width >= NARROW:
        flow.add_row("", "")  # beside the other table's header
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
        names = visible(each["id"]), visible(each["host"])
        bar, kv = _bar((each["running"] or 0) / slots if slots else 0.0), ""
        if each["kv_tokens"]:
            kv = f"{each['kv_used'] / each['kv_tokens']:.0%}"
        since = duration(1000 * max(0.0, overview["at"] - each["since"]))
        _add(table, left_out, *names, state, used, bar, kv, duration(step) if step else "", since)
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


def _pair(rates: Mapping[str, Any], name: str) -> Iterator[str]:
    return (duration((rates[name] or {}).get(rank)) for rank in ("p50", "p95"))


def _clock(at: float) -> str:
    """A Unix time as this machine's clock shows it."""
    return f"{datetime.fromtimestamp(at):%H:%M:%S}"


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


STALE_S = 3.0
"""An overview that is older than that and the interval says nothing about now."""
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
            _print(_once(client), client.url, as_json=as_json)
        elif as_json:
            _stream(client, interval)
        else:
            _show(client, interval)
    except KeyboardInterrupt:
        return INTERRUPTED
    return DONE


def _read(client: Client) -> Overview:
    return client.get("/admin/overview")


def _once(client: Client) -> Overview:
    """An overview that has rates: these are between two readings of an API process, a second apart."""
    found = _read(client)
    if found["rates"]["window_s"] is None:
        time.sleep(1.1)
        found = _read(client)
    return found


def _print(overview: Overview, url: str, *, as_json: bool) -> None:
    if as_json:
        print_json(overview)
    else:
        width = terminal_width(sys.stdout)
        console = _console(width if sys.stdout.isatty() else max(100, width))
        console.print(frame(overview, url, live=False, width=console.width))


def _stream(client: Client, interval: float) -> None:
    while True:
        print_json(_read(client))
        sys.stdout.flush()
        time.sleep(interval)


class OverviewReader(threading.Thread):
    """Reads overviews in a thread of its own, so that a server that does not answer holds up no screen and no key."""

    def __init__(self, client: Client, interval: float) -> None:
        """Raises Problem, if there is no first overview."""
        super().__init__(name="overviews", daemon=True)
        self._client, self._interval = client, interval
        self.newest, self.read_at = _read(client), time.monotonic()
        self.problem: Problem | None = None
        """Why there are no newer ones; None while they come, or while an answer is waited for."""
        self.ended = threading.Event()

    def run(self) -> None:
        while not self.ended.wait(self._interval):
            try:
                self.newest, self.read_at, self.problem = _read(self._client), time.monotonic(), None
            except Problem as problem:
                self.problem = problem

    def age_s(self) -> float:
        return time.monotonic() - self.read_at

    def stale(self) -> str:
        """Why the newest overview says nothing about now; "" if it does. Raises the problem that lasts."""
        if self.problem is not None and (self.problem.exit_code != UNREACHABLE or self.age_s() > FORGET_S):
            raise self.problem
        late = self.age_s() > STALE_S + self._interval
        return f"the server has not answered for {self.age_s():.0f} s" if late else ""


def _show(client: Client, interval: float) -> None:
    """Redraw the screen until q or Ctrl-C; restores the terminal whatever ends it. Raises Problem."""
    reader = OverviewReader(client, interval)
    reader.start()
    overview, paused = reader.newest, False
    try:
        with ended_by_signals(), pressing() as keys, Live(console=_console(), screen=True, auto_refresh=False) as live:
            while True:
                overview = overview if paused else reader.newest
                width = live.console.width
                live.update(frame(overview, client.url, stale=reader.stale(), paused=paused, width=width), refresh=True)
                pressed = keys(interval)
                if "q" in pressed:
                    return
                paused ^= bool(pressed.count("p") % 2)
    finally:
        reader.ended.set()


def _console(width: int | None = None) -> Console:
    """`width`: None for that of the terminal, which may change."""
    colour = styled(sys.stdout, os.environ)
    height = None if width is None else shutil.get_terminal_size().lines  # rich ignores a width alone if TERM=dumb
    return Console(width=width, height=height, color_system="standard" if colour else None, no_color=not colour,
                   highlight=False, emoji=False, markup=False)  # fmt: skip
