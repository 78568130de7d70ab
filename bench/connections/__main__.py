"""`python -m bench.connections`: a normal load beside 1,000 slow or silent connections, and requests no server should
take.

How much later the others' answers come, how long the API process stands still when many connections expire at once, and
what each abusive request is answered and costs the process in memory.
"""

from __future__ import annotations

from dataclasses import asdict

from bench import program
from bench.connections.runs import (
    COLUMNS,
    FULL,
    QUICK,
    Row,
    abuse_goals,
    abuse_rows,
    abused,
    beside_slow,
    count_of_turns,
    slow_goals,
    slow_rows,
)
from bench.load.plan import LoadFailed
from bench.processes import Died
from bench.program import OUT, BenchProgram, Option, ProgramRun, Testbed
from bench.report import Ratio

NAME = "connections"
SHOWS = ("slow", "refused")


def _run(run: ProgramRun) -> int:
    names = run.args.shows.split(",")
    program.check_names("show", names, SHOWS)
    size = QUICK if run.args.quick else FULL
    rows: list[Row] = []
    goals: list[Ratio] = []
    with Testbed(run.console, "starting", count_of_turns(size)) as stage:
        if "slow" in names:
            readings = beside_slow(stage, size)
            rows += slow_rows(readings)
            goals += slow_goals(readings)
        if "refused" in names:
            costs = abused(stage)
            rows += abuse_rows(costs)
            goals += abuse_goals(costs)
    found = run.result(
        NAME,
        "What slow and abusive connections cost the others",
        COLUMNS,
        rows,
        goals,
        (
            "A third of the slow connections sends nothing, a third a head and a third a body at a byte a second; one "
            "that is closed connects again. At a bare server they cost this machine the same and Penstock nothing.",
            "Judged are medians over the rounds with their intervals: 99th percentiles, and the longest time that the "
            "API process held everybody up, asked for every 5 ms, less what a bare server beside it took at that "
            "moment.",
            "Memory is the peak of the API process's resident set beyond what it had before that request.",
        ),
        **asdict(size),
    )
    return int(run.keep(found).missed)


main = BenchProgram("penstock bench connections", __doc__, _run, Died, LoadFailed, OSError).taking(
    Option("--shows", default=",".join(SHOWS), help=f"of {', '.join(SHOWS)} (default: all)"),
    Option("--quick", action="store_true", help="few connections, one round"),
    OUT,
)

if __name__ == "__main__":
    main.exit()
