"""`python -m bench.chaos`: play the fault matrix and print one row per fault. Exits 1 if any row fails."""

from __future__ import annotations

import argparse
import asyncio
import shutil
import signal
import sys
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
from rich.console import Console

from bench.chaos.play import play_all
from bench.chaos.report import as_document, failed_in, merged, table, what_failed
from bench.chaos.rows import ROWS
from bench.chaos.stage import Outcome, Row
from bench.report import as_json

Played: TypeAlias = tuple[list[Outcome], float]

LONG = 5
WIDTH = 150
"""Narrower, the table cannot be read; a log has no width of its own."""


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.chaos", description=__doc__)
    parser.add_argument("--rows", help="only these, e.g. F01,F10 (default: all)")
    parser.add_argument("--again", action="store_true", help="only those that failed in --out; it keeps the others")
    parser.add_argument("--long", action="store_true", help=f"{LONG} times the trials")
    parser.add_argument("--jobs", type=int, default=3, help="rows played at the same time (default: 3)")
    parser.add_argument("--out", type=Path, default=Path("bench/results/chaos.json"), help="where the figures go")
    args = parser.parse_args(argv)
    console = Console()
    console = Console(width=max(console.width, WIDTH))
    before = msgspec.json.decode(args.out.read_bytes()) if args.again else None
    try:
        rows = _chosen(args.rows if before is None else ",".join(failed_in(before)))
    except KeyError as error:
        console.print(f"error: no row {error}; there are {', '.join(row.id for row in ROWS)}")
        return 2
    folder = Path(tempfile.mkdtemp(prefix="penstock-chaos-"))
    times = LONG if args.long else 1
    try:
        outcomes, seconds = asyncio.run(_until_stopped(play_all(rows, folder, times, args.jobs, console)))
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.print(f"stopped; histories and logs so far: {folder}")
        return 130
    console.print(table(outcomes, seconds))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    found = as_document(outcomes, seconds)
    args.out.write_bytes(as_json(found if before is None else merged(before, found)))
    for outcome in outcomes:
        if outcome.passed:
            shutil.rmtree(outcome.folder)
        else:
            console.print(what_failed(outcome), soft_wrap=True, markup=False)
    if all(outcome.passed for outcome in outcomes):
        shutil.rmtree(folder)
        return 0
    return 1


async def _until_stopped(playing: Coroutine[Any, Any, Played]) -> Played:
    """SIGTERM ends the rows as Ctrl-C does, so that no process of theirs is left behind."""
    task = asyncio.ensure_future(playing)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await task


def _chosen(names: str | None) -> list[Row]:
    known = {row.id: row for row in ROWS}
    return [known[name] for name in names.split(",")] if names else list(ROWS)


if __name__ == "__main__":
    sys.exit(main())
