"""`python -m bench.elastic`: growing, sleeping, waking, losing the leader, a slow worker; live, on this machine.

Prints a table and writes bench/results/elastic.json. Exits 1 if a goal is missed.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from pathlib import Path

from bench import program
from bench.elastic.shows import SHORT, SHOWS, ElasticSize
from bench.program import BenchProgram, Option, ProgramRun, Testbed
from bench.report import RESULTS, columns

COLUMNS = columns("""
    show: show; what: what; value: measured .2; unit: unit
""")


def _run(run: ProgramRun) -> int:
    args, rows, goals, size = run.args, [], [], SHORT if run.args.short else ElasticSize()
    names = args.shows.split(",")
    program.check_names("show", names, SHOWS)
    with Testbed(run.console, "starting", len(names)) as stage:
        for name in names:  # one after the other: they are measured in seconds, and the machine is one
            stage.say(name)
            shown = asyncio.run(SHOWS[name](stage.room(name), size))
            stage.done()
            rows += [{"show": name, **row} for row in shown.rows]
            goals += shown.goals
        if any(goal.verdict == "missed" for goal in goals):
            stage.keep()  # the histories are wanted too
    found = run.result(
        "elastic",
        "Live: pools of real processes that grow, sleep, wake and change their leader",
        COLUMNS,
        rows,
        goals,
        (
            "Simulated engine: 8 slots a worker; 20 ms a step. Times include starting a Python process.",
            "step runs with scheduler.cover = 0: by default workers are kept ready for rushes like one just seen.",
        ),
        **asdict(size),
    )
    return run.tell(found, args.out or (None if args.short else RESULTS / found.file))


main = BenchProgram("python -m bench.elastic", __doc__, _run).taking(
    Option("--shows", default=",".join(SHOWS), help=f"which (default: {','.join(SHOWS)})"),
    Option("--short", action="store_true", help="smaller, for a first look"),
    Option("--out", type=Path, help="where the figures go (default: bench/results/elastic.json)"),
)

if __name__ == "__main__":
    main.exit()
