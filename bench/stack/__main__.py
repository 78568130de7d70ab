"""`python -m bench.stack`: start the compose deployment as containers, and try what its documentation promises.

It needs an engine that answers (docker/engine), the images (`make images`) and about five minutes; it starts a copy
with names and a port of its own, and removes everything at the end. Exits 1 if any row fails.
"""

from __future__ import annotations

from typing import Any

from bench.program import OUT, BenchProgram, Option, ProgramRun, Testbed
from bench.report import Ratio, columns
from bench.stack.deployment import Stack, StackError
from bench.stack.rows import ERRORS, NotTried, rows

COLUMNS = columns("row: row; figure: figure; verdict: verdict")


def _run(run: ProgramRun) -> int:
    found: list[dict[str, Any]] = []
    with Testbed(run.console, "starting", 1) as bed:
        stack = Stack(bed.folder)
        try:
            for title, play in rows(stack, bed.folder):
                bed.say(title)
                try:
                    found.append({"row": title, "figure": play(stack), "verdict": "pass"})
                except NotTried as error:
                    found.append({"row": title, "figure": str(error), "verdict": "not tried"})
                except ERRORS as error:
                    bed.keep()
                    found.append({"row": title, "figure": str(error)[:120] or type(error).__name__, "verdict": "FAIL"})
                    if len(found) <= 2:
                        break  # nothing runs, or images of another tree
            engine = stack.engine("name").strip()
            images = {each["Config"]["Image"] for each in stack.inspected(*stack.containers().values())}
        finally:
            if not run.args.leave:
                stack.down("--volumes")
    failed = Ratio.none("rows that failed", sum(each["verdict"] == "FAIL" for each in found))
    title = "The compose deployment as containers"
    return run.keep(run.result("stack", title, COLUMNS, found, [failed], engine=engine, images=sorted(images)))


main = BenchProgram("python -m bench.stack", __doc__, _run, StackError, OSError).taking(
    Option("--leave", action="store_true", help="leave the containers for a look"),
    OUT,
)

if __name__ == "__main__":
    main.exit()
