"""`python -m bench.elastic`: growing, sleeping, waking, losing the leader, a slow worker; live, on this machine.

Prints a table and writes bench/results/elastic.json. `--shows day` plays a compressed day of 20 minutes live and on the
simulator, and writes bench/results/elastic-day.json. Exits 1 if a goal is missed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from bench import program
from bench.elastic import day
from bench.elastic.shows import SHORT, SHOWS, ElasticSize
from bench.program import PLOTS, BenchProgram, Option, ProgramRun, Testbed
from bench.report import RESULTS, columns

DAY = "day"
DAY_COLUMNS = columns("""
    what: what; live: live .3; simulated: simulated .3; apart: apart .2; unit: unit
""")
DAY_NOTES = (
    "Both have the same requests at the same seconds. The simulation knows the settings, and how long a start takes.",
    "Worker-hours: from the start of a process to its end. Apart: in per cent of the live ones; shares in points.",
)
COLUMNS = columns("""
    show: show; what: what; value: measured .2; unit: unit
""")


def _run(run: ProgramRun) -> int:
    names = run.args.shows.split(",")
    program.check_names("show", names, (*SHOWS, DAY))
    missed = 0
    if others := [name for name in names if name != DAY]:
        missed |= _run_shows(run, others)
    if DAY in names:
        missed |= _run_day(run)
    return missed


def _run_day(run: ProgramRun) -> int:
    """A figure of its own: it takes longer than all others."""
    args, size = run.args, day.SHORT_DAY if run.args.short else day.DaySize()
    with Testbed(run.console, "starting", 1) as stage:
        real, start_s, faults = asyncio.run(day.live(stage.room(DAY), size, stage.say))
        stage.done()
    load = day.rows_of(size)
    model = day.simulated(load, size.seconds, start_s)
    rows = day.compared(real, model, start_s, faults)
    rows[0] |= {"curves": day.curves(real, model, load, size.seconds), "seconds": size.seconds}
    found = run.result(
        "elastic-day",
        f"A day compressed to {size.seconds:g} s: live on real processes, and simulated",
        DAY_COLUMNS,
        rows,
        day.goals_of(real, model, faults),
        DAY_NOTES,
        **asdict(size),
        **day.SETTINGS,
        **day.MODEL_SETTINGS,
    )
    path = args.out.with_name(found.file) if args.out else None if args.short else RESULTS / found.file
    return run.tell(found, path, None if args.short else day.draw)


def _run_shows(run: ProgramRun, names: Sequence[str]) -> int:
    args, rows, goals, size = run.args, [], [], SHORT if run.args.short else ElasticSize()
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
            "Simulated engine: 8 slots a worker, a wide one 16; 20 ms a step. Times include starting a Python process.",
            "step runs with scheduler.cover = 0: by default workers are kept ready for rushes like one just seen.",
        ),
        **asdict(size),
    )
    return run.tell(found, args.out or (None if args.short else RESULTS / found.file))


main = BenchProgram("python -m bench.elastic", __doc__, _run).taking(
    Option("--shows", default=",".join(SHOWS), help=f"which (default: {','.join(SHOWS)}); also: {DAY}"),
    Option("--short", action="store_true", help="smaller, for a first look"),
    Option("--out", type=Path, help="where the figures go (default: bench/results/elastic.json)"),
    PLOTS,
)

if __name__ == "__main__":
    main.exit()
