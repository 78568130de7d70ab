"""`python -m bench.jobs`: one-token jobs, from the enqueuing to the result, through Penstock and through task queues.

All use the same Redis-compatible server (append-only file, fsync every second), in turn, round after round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from redis import Redis

from bench import plots, program, report
from bench.environments import Failures
from bench.jobs.callers import CallerPlan
from bench.jobs.systems import (
    CHAT,
    JOBS,
    STREAM,
    ClientFailed,
    JobsReading,
    JobsSystem,
    measure,
    systems,
)
from bench.penstock import start_redis
from bench.processes import Died, Processes
from bench.program import OUT, PLOTS, BenchProgram, Option, ProgramRun, Testbed
from bench.report import Ratio, columns
from bench.stats import known_median, over

STARTED_S = 3.0
"""Peers do not say when they are ready."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobsOptions:
    """How long, how often, how many at once."""

    rounds: int = 3
    callers: int = 256
    warmup_s: float = 2.0
    seconds: float = 5.0


@dataclass(slots=True)
class JobsReadings(Failures):
    """Readings by system, one for each round; and why others could not be had."""

    crowd: dict[str, list[JobsReading]] = field(default_factory=dict)
    alone: dict[str, list[JobsReading]] = field(default_factory=dict)


def play(systems: Sequence[JobsSystem], options: JobsOptions, stage: Testbed, played: JobsReadings) -> None:
    """All systems in every round, on one store; what went wrong is noted. Raises Died for the store."""
    with Processes(stage.room("store")) as store:
        url = start_redis(store)

        def load(system: JobsSystem, folder: Path) -> None:
            try:
                _clear(url)
                with system.serve(folder, url) as serving:
                    time.sleep(STARTED_S)
                    alone = CallerPlan(serving.url, 1, options.warmup_s / 2, options.seconds / 2)
                    played.alone.setdefault(system.name, []).append(measure(serving, store, alone))
                    callers = min(options.callers, system.most_callers)
                    crowd = CallerPlan(serving.url, callers, options.warmup_s, options.seconds)
                    played.crowd.setdefault(system.name, []).append(measure(serving, store, crowd))
            finally:
                stage.done()

        played.take_turns(systems, options.rounds, stage, load, Died, ClientFailed)


def _clear(url: str) -> None:
    """Nothing of the system before is left."""
    with Redis.from_url(url) as client:
        client.flushall()


COLUMNS = columns("""
    system: system; jobs_per_s: jobs/s .0; p50_ms: p50 ms .0; p99_ms: p99 ms .0; alone_p50_ms: alone p50 ms .2;
    cpu_ms_per_job: CPU ms/job .3; client_ms_per_job: of it the callers .3; parts: CPU us/job of each other process
""")

RIVALS = ("celery", "arq", "taskiq")
"""A rival's name is the beginning of its rows'."""

Row = dict[str, Any]
RATES, COSTS = "jobs_per_s_of_rounds", "ms_per_job_of_rounds"
"""Keys of what a row was in each round alone; the cost without the callers."""


def rows(crowd: Mapping[str, Sequence[JobsReading]], alone: Mapping[str, Sequence[JobsReading]]) -> list[Row]:
    """One for each system that answered."""
    return [_row(name, readings, alone.get(name, ())) for name, readings in crowd.items()]


def _row(name: str, crowd: Sequence[JobsReading], alone: Sequence[JobsReading]) -> Row:
    client = _mid(crowd, lambda reading: 1000 * reading.client_cpu_s / reading.jobs)
    others = _mid(crowd, lambda reading: 1000 * sum(reading.cpu.values()) / reading.jobs)
    return {
        "system": name,
        "rounds": len(crowd),
        "jobs": sum(reading.jobs for reading in crowd),
        "wrong": [what for reading in (*crowd, *alone) for what in reading.wrong][:3],
        "jobs_per_s": _mid(crowd, lambda reading: reading.jobs / reading.seconds),
        "p50_ms": _mid(crowd, lambda reading: reading.p50_ms),
        "p99_ms": _mid(crowd, lambda reading: reading.p99_ms),
        "alone_p50_ms": _mid(alone, lambda reading: reading.p50_ms),
        "cpu_ms_per_job": None if client is None or others is None else client + others,
        "client_ms_per_job": client,
        "parts": _parts(crowd),
        RATES: [reading.jobs / reading.seconds for reading in crowd if reading.jobs],
        COSTS: [1000 * sum(reading.cpu.values()) / reading.jobs for reading in crowd if reading.jobs],
    }


def _mid(readings: Sequence[JobsReading], figure: Callable[[JobsReading], float | None]) -> float | None:
    return known_median(figure(reading) for reading in readings if reading.jobs)


def _parts(readings: Sequence[JobsReading]) -> str:
    names = sorted({name for reading in readings for name in reading.cpu})
    each = {name: _mid(readings, partial(_us_per_job, name)) for name in names}
    return ", ".join(f"{name} {value:.0f}" for name, value in each.items() if value is not None)


def _us_per_job(name: str, reading: JobsReading) -> float:
    return 1e6 * reading.cpu.get(name, 0.0) / reading.jobs


Best = Callable[[Iterable[float]], float]


def ratios(found: Sequence[Row]) -> list[Ratio]:
    """Penstock against the best of each rival's rows; only of systems that were measured. First without the callers: a
    client of a task queue costs more than one of HTTP, and both share the machine with what they call."""
    names = [row["system"] for row in found]
    ours, judged = [name for name in names if name in (CHAT, STREAM)], []
    for rival in RIVALS if ours else ():
        theirs = [name for name in names if name.startswith(rival)]
        cpu = f"CPU per job without the callers, {rival}'s / Penstock's, one request each"
        rate, put = (f"Penstock's jobs/s, {form} / {rival}'s" for form in ("one request each", "put and wait"))
        compared = (
            (f"jobs.{rival}_cpu", cpu, COSTS, min, theirs, ours),
            (f"jobs.{rival}", rate, RATES, max, ours, theirs),
            (f"jobs.{rival}_put", put, RATES, max, [name for name in names if name == JOBS], theirs),
        )
        judged += [_compared(found, *each) for each in compared if each[-2] and each[-1]]
    if STREAM in names:
        alone = next(row["alone_p50_ms"] for row in found if row["system"] == STREAM)
        judged.append(Ratio.held("jobs.alone", "one request alone: request to first token, p50 ms", alone))
    return judged


def _compared(
    found: Sequence[Row], goal: str, what: str, key: str, best: Best, ours: Sequence[str], theirs: Sequence[str]
) -> Ratio:
    """The best of our rows over the best of theirs: the median of the rounds; that of the medians, where a row lacks a
    round."""
    one, other = ([row[key] for row in found if row["system"] in names] for names in (ours, theirs))
    if len({len(row) for row in (*one, *other)}) == 1:
        of_each_round = zip(zip(*one, strict=True), zip(*other, strict=True), strict=True)
        rounds = [best(mine) / best(its) for mine, its in of_each_round]
        return Ratio.held(goal, what, median(rounds), rounds=rounds)
    mine, its = (best(median(row) for row in rows if row) for rows in (one, other))
    return Ratio.held(goal, what, over(mine, its))


def _run(run: ProgramRun) -> int:
    args, known = run.args, {system.name: system for system in systems(report.cores())}
    wanted = args.systems.split(",") if args.systems else list(known)
    program.check_names("system", wanted, known)
    options = JobsOptions(rounds=args.rounds, callers=args.callers, seconds=args.seconds)
    chosen = [known[name] for name in known if name in wanted]
    played = JobsReadings()
    with Testbed(run.console, "preparing", options.rounds * len(chosen)) as stage:
        ready = played.prepared(chosen, stage.say)
        play(ready, options, stage, played)
        if played.failed:
            stage.keep()
    found = rows(
        {system.name: played.crowd[system.name] for system in chosen if system.name in played.crowd}, played.alone
    )
    title = f"One-token jobs from enqueuing to result, {options.callers} callers"
    settings = {**asdict(options), "systems": {system.name: system.title for system in chosen}}
    notes = _notes(chosen, played, found)
    run.keep(run.result("jobs", title, COLUMNS, found, ratios(found), notes, **settings), draw)
    return 0 if len(found) == len(wanted) else 1


def _notes(chosen: Sequence[JobsSystem], played: JobsReadings, found: Sequence[dict[str, object]]) -> tuple[str, ...]:
    said = [f"{system.name}: {system.title}." for system in chosen]
    said += [f"{name} FAILED: {why}" for name, why in played.failed.items()]
    said += [f"{row['system']} had wrong answers: {row['wrong']}" for row in found if row["wrong"]]
    return tuple(said)


def draw(found: report.Report, folder: Path) -> list[Path]:
    """Jobs per second; the files written."""
    rates = {row["system"].replace("-", "\n"): row["jobs_per_s"] or 0.0 for row in found.rows}
    title = "One-token jobs, from enqueuing to result"
    return plots.bars(folder / "jobs-rate", title, rates, plots.Axis(title="jobs per second"))


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
