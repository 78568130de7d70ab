"""`penstock top`: lanes, workers, latencies and what is wrong now, live in a terminal."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click
from rich.console import Console
from rich.live import Live

from cli.client import Client
from cli.errors import DONE, INTERRUPTED, UNREACHABLE, Problem
from cli.keys import Keys
from cli.options import Command, Where, json_option, where_options
from cli.output import print_json, styled, terminal_width
from cli.top_view import Overview, frame

STALE_S = 3.0
"""An overview that is older than that and the interval says nothing about now."""
FORGET_S = 60.0
"""A server that does not answer for so long ends the command."""


@click.command(cls=Command)
@click.option("--once", is_flag=True, help="Print one screen and exit.")
@click.option(
    "--interval", type=click.FloatRange(0.5, 60), default=1.0, show_default=True, help="Seconds between two screens."
)
@where_options(url=True)
@json_option
def top(once: bool, interval: float, where: Where, as_json: bool) -> int:
    """Show live what waits, what the workers do, how fast answers are, and what is wrong now. Needs an admin key.

    With --json, one object for each screen, as GET /admin/overview answers it.
    """
    if not (once or as_json) and (not sys.stdout.isatty() or os.environ.get("TERM") == "dumb"):
        raise click.UsageError("top needs a terminal: use --once or --json here, or penstock ps --json")
    with Client.find(where) as client:
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
    found: dict[str, Any] = client.get("/admin/overview")
    return found


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


class OverviewReader:
    """Reads overviews in a thread of its own, so that a server that does not answer holds up no screen and no key."""

    def __init__(self, client: Client, interval: float) -> None:
        """Raises Problem, if there is no first overview."""
        self._client, self._interval = client, interval
        self.newest, self.read_at = _read(client), time.monotonic()
        self.problem: Problem | None = None
        """Why there are no newer ones; None while they come, or while an answer is waited for."""
        self._ended = threading.Event()
        threading.Thread(target=self._keep_reading, name="overviews", daemon=True).start()

    def _keep_reading(self) -> None:
        while not self._ended.wait(self._interval):
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

    def end(self) -> None:
        self._ended.set()


def _show(client: Client, interval: float) -> None:
    """Redraw the screen until q or Ctrl-C; restores the terminal whatever ends it. Raises Problem."""
    reader = OverviewReader(client, interval)
    overview, paused = reader.newest, False
    try:
        with _ended_by_term(), Keys() as keys, Live(console=_console(), screen=True, auto_refresh=False) as live:
            while True:
                overview = overview if paused else reader.newest
                width = live.console.width
                live.update(frame(overview, client.url, stale=reader.stale(), paused=paused, width=width), refresh=True)
                pressed = keys.pressed(interval)
                if "q" in pressed:
                    return
                paused ^= bool(pressed.count("p") % 2)
    finally:
        reader.end()


@contextmanager
def _ended_by_term() -> Iterator[None]:
    """Within the block, SIGTERM ends the command like Ctrl-C, which restores the terminal."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _console(width: int | None = None) -> Console:
    """`width`: None for that of the terminal, which may change."""
    colour = styled(sys.stdout, os.environ)
    height = None if width is None else shutil.get_terminal_size().lines  # rich ignores a width alone if TERM=dumb
    return Console(width=width, height=height, color_system="standard" if colour else None, no_color=not colour,
                   highlight=False, emoji=False, markup=False)  # fmt: skip
