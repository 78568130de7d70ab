"""`python -m bench.elastic`: growing, sleeping, waking, losing the leader, a slow worker; live, on this machine.

Prints a table and writes bench/results/elastic.json. Exits 1 if a goal is missed.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from bench import program
from bench.elastic.shows import SHORT, SHOWS, ElasticSize
from bench.program import BenchProgram, Option, ProgramRun
from bench.report import RESULTS, Report, columns

COLUMNS = columns("""
    show: show; what: what; value: measured .2; unit: unit
""")


def _run(run: ProgramRun) -> int:
    args, names = run.args, run.args.shows.split(",")
    program.check_names("show", names, SHOWS)
    folder = Path(tempfile.mkdtemp(prefix="penstock-elastic-"))
    found = asyncio.run(play(names, folder, SHORT if args.short else ElasticSize(), run))
    run.tell(found, args.out or (None if args.short else RESULTS / found.file))
    if not found.missed:
        shutil.rmtree(folder)
        return 0
    run.console.print(f"logs and histories: {folder}")
    return 1


async def play(names: Sequence[str], folder: Path, size: ElasticSize, run: ProgramRun) -> Report:
    """One after the other: they are measured in seconds, and the machine is one."""
    rows, goals = [], []
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=run.console, transient=True) as progress:
        for name in names:
            task = progress.add_task(name, total=None)
            shown = await SHOWS[name](folder / name, size)
            progress.update(task, total=1, completed=1)
            rows += [{"show": name, **row} for row in shown.rows]
            goals += shown.goals
    return Report(
        name="elastic",
        title="Live: pools of real processes that grow, sleep, wake and change their leader",
        command=run.command,
        settings={name: getattr(size, name) for name in size.__dataclass_fields__},
        columns=COLUMNS,
        rows=rows,
        ratios=tuple(goals),
        notes=(
            "Simulated engine: 8 slots a worker, a wide one 16; 20 ms a step. Times include starting a Python process.",
            "step runs with scheduler.cover = 0: by default workers are kept ready for rushes like one just seen.",
        ),
    )


main = BenchProgram("python -m bench.elastic", __doc__, _run).taking(
    Option("--shows", default=",".join(SHOWS), help=f"which, in this order (default: {','.join(SHOWS)})"),
    Option("--short", action="store_true", help="smaller, for a first look"),
    Option("--out", type=Path, help="where the figures go (default: bench/results/elastic.json)"),
)

if __name__ == "__main__":
    main.exit()
