"""`python -m bench.jobs`: one-token jobs, from the enqueuing to the result, through Penstock and through task queues.

All use the same Redis-compatible server (append-only file, fsync every second), in turn, round after round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from bench import plots, program, report
from bench.jobs.run import COLUMNS, JobsOptions, JobsReadings, play, ratios, rows
from bench.jobs.systems import JobsSystem, systems
from bench.processes import Died
from bench.program import OUT, PLOTS, BenchProgram, Option, ProgramRun
from bench.testbed import Testbed

NAME = "jobs"


def _run(run: ProgramRun) -> int:
    args, known = run.args, {system.name: system for system in systems(report.cores())}
    wanted = args.systems.split(",") if args.systems else list(known)
    program.check_names("system", wanted, known)
    options = JobsOptions(rounds=args.rounds, callers=args.callers, seconds=args.seconds)
    found = measured([known[name] for name in known if name in wanted], options, run.command, run.console)
    run.tell(found, args.out / found.file, draw)
    return 0 if len(found.rows) == len(wanted) else 1


def measured(chosen: Sequence[JobsSystem], options: JobsOptions, command: str, console: Console) -> report.Report:
    """Raises Died when there is no store."""
    played = JobsReadings()
    with Testbed(console, "preparing", options.rounds * len(chosen)) as stage:
        ready = played.prepared(chosen, stage.say)
        play(ready, options, stage.folder, played, stage.say, stage.done)
        if played.failed:
            stage.keep()
    found = rows(
        {system.name: played.crowd[system.name] for system in chosen if system.name in played.crowd}, played.alone
    )
    return report.Report(
        name=NAME,
        title=f"One-token jobs from enqueuing to result, {options.callers} callers",
        command=command,
        settings={**asdict(options), "systems": {system.name: system.title for system in chosen}},
        columns=COLUMNS,
        rows=found,
        ratios=tuple(ratios(found)),
        notes=_notes(chosen, played, found),
    )


def _notes(chosen: Sequence[JobsSystem], played: JobsReadings, found: Sequence[dict[str, object]]) -> tuple[str, ...]:
    said = [f"{system.name}: {system.title}." for system in chosen]
    said += [f"{name} FAILED: {why}" for name, why in played.failed.items()]
    said += [f"{row['system']} had wrong answers: {row['wrong']}" for row in found if row["wrong"]]
    return tuple(said)


def draw(found: report.Report, folder: Path) -> list[Path]:
    """CPU per job, the callers' share and the rest; the files written."""
    names = [row["system"].replace("-", "\n") for row in found.rows]
    client = [row["client_ms_per_job"] or 0.0 for row in found.rows]
    rest = [(row["cpu_ms_per_job"] or 0.0) - own for row, own in zip(found.rows, client, strict=True)]
    y = plots.Axis(title="CPU ms per job")
    parts = {"workers, Redis, API": rest, "callers": client}
    drawn = plots.bars(folder / "jobs-cpu", "What a one-token job costs", names, parts, x=plots.Axis(title=""), y=y)
    rates = {"jobs per second": [row["jobs_per_s"] or 0.0 for row in found.rows]}
    y = plots.Axis(title="jobs per second")
    return drawn + plots.bars(
        folder / "jobs-rate", "One-token jobs, from enqueuing to result", names, rates, x=plots.Axis(title=""), y=y
    )


main = BenchProgram("penstock bench jobs", __doc__, _run, Died, OSError).taking(
    Option("--systems", help="only these, separated by commas"),
    Option("--rounds", type=int, default=3, help="through all systems (default 3); medians are shown"),
    Option("--callers", type=int, default=256, help="at the same time (default 256)"),
    Option("--seconds", type=float, default=5.0, help="of each measurement (default 5)"),
    OUT,
    PLOTS,
)

if __name__ == "__main__":
    main.exit()
