"""`python -m bench.chaos`: play the fault matrix and print one row per fault. Exits 1 if any row fails."""

from __future__ import annotations

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
from bench.chaos.report import as_document, failed_in, merged, small, table, what_failed
from bench.chaos.rows import ROWS
from bench.chaos.stage import FaultRow, play_all
from bench.program import BenchProgram, Option, ProgramRun, WrongArguments, count
from bench.report import RESULTS, write

LONG = 5


def _run(run: ProgramRun) -> int:
    args = run.args
    out = args.out or RESULTS / ("chaos-busy.json" if args.busy else "chaos.json")
    if args.again and (args.rows or not out.exists()):
        raise WrongArguments(f"--again repeats what failed in {out}: it needs that file, and takes no --rows")
    if args.long and args.short:
        raise WrongArguments("--long and --short say the opposite: leave one out")
    before = msgspec.json.decode(out.read_bytes()) if out.exists() else None
    names = failed_in(before) if before and args.again else args.rows.split(",") if args.rows else None
    if names == []:
        run.console.print(f"no row failed in {out}")
        return 0
    rows = _chosen(names)
    if args.list:
        for row in rows:
            run.console.print(f"{row.id:6} {row.title}: {row.proves}", markup=False, soft_wrap=True)
        return 0
    folder = Path(tempfile.mkdtemp(prefix="penstock-chaos-"))
    try:
        times = 0 if args.short else LONG if args.long else 1
        with _busy(args.busy):
            outcomes, seconds = asyncio.run(play_all(rows, folder, times, args.jobs, run.console))
    except KeyboardInterrupt:
        run.console.print(f"histories and logs so far: {folder}")
        raise
    run.console.print(table(outcomes, seconds))
    found = as_document(outcomes, seconds, args.busy)
    if not args.short:
        whole = not (args.rows or args.again)
        write(out, small(found if before is None else merged(before, found, whole=whole)))
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
def _busy(wanted: int) -> Iterator[None]:
    """So many processes that compute nothing, without pause."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(wanted)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def _chosen(names: Sequence[str] | None) -> list[FaultRow]:
    """All, if none are named. Raises WrongArguments for a name that no row has."""
    known = {row.id: row for row in ROWS}
    program.check_names("row", names or (), known)
    return [known[name] for name in names or known]


main = BenchProgram("python -m bench.chaos", __doc__, _run).taking(
    Option("--rows", help="only these, e.g. F01,F10 (default: all)"),
    Option(
        "--again", action="store_true", help="only those that failed in --out; it keeps the others and each failure"
    ),
    Option("--long", action="store_true", help=f"{LONG} times the trials"),
    Option("--short", action="store_true", help="a few trials of each row; no figures are written"),
    Option("--list", action="store_true", help="what each row proves"),
    Option("--jobs", type=count, default=3, help="rows played at the same time (default: 3)"),
    Option("--busy", type=int, default=0, metavar="N", help="beside N loops that take all they get"),
    Option(
        "--out",
        type=Path,
        help="where the figures go, beside every failure that is there (default: chaos.json or chaos-busy.json in "
        "bench/results)",
    ),
)

if __name__ == "__main__":
    main.exit()
