"""`python -m bench.recovery`: kill the only worker of `penstock up` at default settings, and compare with a bare start.

How long its reader hears nothing; and that a worker that is only stopped keeps its job.
"""

from __future__ import annotations

import asyncio

from bench.http import RequestRefused
from bench.processes import Died
from bench.program import OUT, BenchProgram, Option, ProgramRun, Testbed, count
from bench.recovery.restart import STOPPED_S, TOKENS, of_rounds, one_round
from bench.report import Column

COLUMNS = (Column("show", "what was killed"), Column("what", "figure"), Column("value", "value", 1))
NOTE = (
    "A bare start is that of a worker process with the simulated engine, from its creation until it is ready, on a "
    "server of its own with nothing else beside it."
)


def _run(run: ProgramRun) -> int:
    rounds = []
    with Testbed(run.console, "starting", run.args.rounds) as stage:
        for number in range(run.args.rounds):
            stage.say("the only worker killed")
            rounds.append(asyncio.run(one_round(stage.room("up", number))))
            stage.done()
    rows, goals = of_rounds(rounds)
    settings = {"rounds": run.args.rounds, "tokens": TOKENS, "stopped_s": STOPPED_S}
    title = "What readers notice of a kill of the only worker"
    return run.keep(run.result("recovery-up", title, COLUMNS, rows, goals, [NOTE], **settings))


main = BenchProgram("penstock bench recovery", __doc__, _run, Died, RequestRefused, OSError, TimeoutError).taking(
    Option("--rounds", type=count, default=8, help="each is a `penstock up` of its own (default 8)"), OUT
)

if __name__ == "__main__":
    main.exit()
