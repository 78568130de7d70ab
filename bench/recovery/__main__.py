"""`python -m bench.recovery`: kill a worker with hundreds of jobs, and an API process with thousands of readers.

How long readers hear nothing, and until all of them have gone on.
With --up ROUNDS: kill the only worker of `penstock up` at default settings instead, and compare with a bare start.
"""

from __future__ import annotations

import asyncio

from bench import program
from bench.http import RequestRefused
from bench.processes import Died
from bench.program import OUT, BenchProgram, Option, ProgramRun, Testbed, count
from bench.recovery.restart import STOPPED_S, TOKENS, of_rounds, one_round
from bench.recovery.shows import COLUMNS, FULL, LEASE_S, QUICK, api_killed, worker_killed

SHOWS = {"worker": worker_killed, "api": api_killed}


def _run(run: ProgramRun) -> int:
    return _restart(run) if run.args.up else _kills(run)


def _restart(run: ProgramRun) -> int:
    rounds = []
    with Testbed(run.console, "starting", run.args.up) as stage:
        for number in range(run.args.up):
            stage.say("the only worker killed")
            rounds.append(asyncio.run(one_round(stage.room("up", number))))
            stage.done()
    found, title = of_rounds(rounds), "What readers notice of a kill of the only worker"
    note = (
        "A bare start is that of a worker process with the simulated engine, from its creation until it is ready, on a "
        "server of its own with nothing else beside it."
    )
    settings = {"rounds": run.args.up, "tokens": TOKENS, "stopped_s": STOPPED_S}
    return run.keep(run.result("recovery-up", title, COLUMNS, found.rows, found.goals, [note], **settings))


def _kills(run: ProgramRun) -> int:
    names = run.args.shows.split(",")
    program.check_names("show", names, SHOWS)
    size, seen = QUICK if run.args.quick else FULL, []
    with Testbed(run.console, "starting", len(names)) as stage:
        for name in names:
            stage.say(f"{name} killed")
            seen.append(asyncio.run(SHOWS[name](stage.room(name), size)))
            stage.done()
    return run.keep(
        run.result(
            "recovery",
            "What readers notice of a kill",
            COLUMNS,
            [row for each in seen for row in each.rows],
            [goal for each in seen for goal in each.goals],
            lease_s=LEASE_S,
            jobs=size.jobs,
            tokens=size.tokens,
            readers=size.readers,
        )
    )


main = BenchProgram("penstock bench recovery", __doc__, _run, Died, RequestRefused, OSError, TimeoutError).taking(
    Option("--shows", default=",".join(SHOWS), help=f"of {', '.join(SHOWS)} (default: all)"),
    Option("--up", type=count, metavar="ROUNDS", help="the only worker of `penstock up`, so many times"),
    Option("--quick", action="store_true", help="few readers"),
    OUT,
)

if __name__ == "__main__":
    main.exit()
