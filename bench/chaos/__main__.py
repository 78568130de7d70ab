"""`python -m bench.chaos`: play the fault matrix and print one row per fault. Exits 1 if any row fails."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from bench import program
from bench.chaos.play import play_all
from bench.chaos.report import as_document, failed_in, merged, table, what_failed
from bench.chaos.rows import ROWS
from bench.chaos.stage import Row
from bench.program import Run
from bench.report import RESULTS, write

LONG = 5


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    return program.play(_parser(), argv, _run)


def _run(run: Run) -> int:
    args = run.args
    out = args.out or RESULTS / ("chaos-busy.json" if args.busy else "chaos.json")
    before = msgspec.json.decode(out.read_bytes()) if args.again or out.exists() else None
    rows = _chosen(",".join(failed_in(before)) if before and args.again else args.rows)
    if args.list:
        for row in rows:
            run.console.print(f"{row.id:6} {row.title}: {row.proves}", markup=False, soft_wrap=True)
        return 0
    folder = Path(tempfile.mkdtemp(prefix="penstock-chaos-"))
    try:
        times = LONG if args.long else 0 if args.short else 1
        with _busy(args.busy):
            outcomes, seconds = asyncio.run(play_all(rows, folder, times, args.jobs, run.console))
    except KeyboardInterrupt:
        run.console.print(f"histories and logs so far: {folder}")
        raise
    run.console.print(table(outcomes, seconds))
    found = as_document(outcomes, seconds, args.busy)
    if not args.short:
        write(out, found if before is None else merged(before, found, whole=not (args.rows or args.again)))
    for outcome in outcomes:
        if outcome.passed:
            shutil.rmtree(outcome.folder)
        else:
            run.console.print(what_failed(outcome), soft_wrap=True, markup=False)
    if all(outcome.passed for outcome in outcomes):
        shutil.rmtree(folder)
        return 0
    return 1


@contextlib.contextmanager
def _busy(count: int) -> Iterator[None]:
    """So many processes that compute nothing, without pause."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def _chosen(names: str | None) -> list[Row]:
    known = {row.id: row for row in ROWS}
    wanted = names.split(",") if names else list(known)
    program.check_names("row", wanted, known)
    return [known[name] for name in wanted]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.chaos", description=__doc__)
    parser.add_argument("--rows", help="only these, e.g. F01,F10 (default: all)")
    parser.add_argument(
        "--again", action="store_true", help="only those that failed in --out; it keeps the others and each failure"
    )
    parser.add_argument("--long", action="store_true", help=f"{LONG} times the trials")
    parser.add_argument("--short", action="store_true", help="a few trials of each row; no figures are written")
    parser.add_argument("--list", action="store_true", help="what each row proves")
    parser.add_argument("--jobs", type=int, default=3, help="rows played at the same time (default: 3)")
    parser.add_argument("--busy", type=int, default=0, metavar="N", help="beside N loops that take all they get")
    parser.add_argument(
        "--out",
        type=Path,
        help="where the figures go, beside every failure that is there (default: chaos.json or chaos-busy.json in "
        "bench/results)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
