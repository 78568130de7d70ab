"""`python -m bench.scale`: the control loop on a simulated clock, decided by the scheduler's own code.

A bursty day beside other rules, a constant noisy load, a slow worker, and two shapes of a pool. Prints a table of each,
writes them to bench/results, and draws the day and the shapes. Exits 1 if a goal is missed. The same seeds give the
same figures on every machine.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from msgspec import structs

from bench import plots, report
from bench.program import PLOTS, BenchProgram, Option, ProgramRun, Testbed
from bench.report import Ratio, Report, columns
from bench.scale import day, shapes
from bench.scale.day import CONTENDERS, CURVE_S, PENSTOCK, RULES, STATIC, Day, Steady, wards
from bench.scale.shapes import FORMS, RAMP

NAME = "scale"
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ScaleSize:
    """How much is simulated."""

    seeds: tuple[int, ...] = (41, 42, 43)
    """Others than those the policy was developed with."""
    hours: float = 24.0
    rate: float = 7.0
    steady_hours: float = 5.0
    hold_s: float = 180.0


QUICK = ScaleSize(seeds=(21,), hours=0.5, rate=2.0, steady_hours=0.5, hold_s=10.0)

DAY_COLUMNS = columns("""
    seed: seed; name: who scales; interactive: interactive within 2 s, % .2; standard: standard within 30 s, % .2;
    p99_s: p99 wait, s .2; worker_hours: worker-hours; share_of_peak: of static, %; most_workers: most workers;
    reversals_per_hour: reversals an hour .2
""")
STEADY_COLUMNS = columns("""
    seed: seed; name: who scales; hours: hours .0; most_in_an_hour: reversals in the worst hour;
    reversals_per_hour: an hour in the mean .2; workers: workers; interactive: interactive within 2 s, % .2;
    worker_hours: worker-hours
""")
HEALTH_COLUMNS = columns("""
    seed: seed; slow: times slower .0; cordoned_after_s: slow one cordoned after, s;
    healthy_cordoned: healthy ones cordoned
""")
SHAPES_COLUMNS = columns("""
    seed: seed; threshold: threshold, jobs at once; least_share: least share of the better shape .3;
    at_clients: at clients; switches: switches, up and down
""")


def _run(run: ProgramRun) -> int:
    args, size = run.args, QUICK if run.args.quick else ScaleSize()
    reports = reported(simulated(size, args.jobs), size)
    if args.quick:  # too short to be judged
        reports = [structs.replace(each, ratios=()) for each in reports]
    folder, missed = args.out or (None if args.quick else report.RESULTS), 0
    for each in reports:
        missed |= run.tell(each, folder / each.file if folder else None)
    if folder:
        run.console.print(plots.missing() or "", *(f"{path}" for path in draw(reports, args.plots)), sep="\n")
    return missed


# --- the work --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ScaleTask:
    """One simulation, for this process or another."""

    show: str
    words: str
    run: Callable[..., Row]
    given: tuple[Any, ...]

    def done(self) -> Row:
        return self.run(*self.given)


def tasks(size: ScaleSize) -> Iterator[ScaleTask]:
    """Everything, the longest first."""
    for seed in size.seeds:
        that = Day(seed, size.hours, size.rate)
        for name in CONTENDERS:
            yield ScaleTask("day", f"day {seed}: {name}", day.played, (name, that))
    for seed in size.seeds:
        yield ScaleTask("shapes", f"two shapes {seed}", shapes.compared, (seed, size.hold_s))
        for name in (PENSTOCK, "keda"):
            yield ScaleTask(
                "steady", f"constant load {seed}: {name}", day.steadied, (name, Steady(seed, hours=size.steady_hours))
            )
    for ward in wards(size.seeds):
        yield ScaleTask("health", f"health {ward.seed}", day.watched, (ward,))


def simulated(size: ScaleSize, jobs: int) -> Mapping[str, list[Row]]:
    """The rows of each show, in the order of the tasks whoever ended first."""
    todo, rows = list(tasks(size)), dict[int, Row]()
    with Testbed(report.console(), "simulating", len(todo)) as stage:
        for number, row in _rows(todo, jobs, stage.say):
            rows[number] = row
            stage.done()
    found = defaultdict[str, list[Row]](list)
    for number, task in enumerate(todo):
        found[task.show].append(rows[number])
    return found


def _rows(todo: Sequence[ScaleTask], jobs: int, say: Callable[[str], None]) -> Iterator[tuple[int, Row]]:
    if jobs == 1:
        for number, task in enumerate(todo):
            say(task.words)
            yield number, task.done()
        return
    with ProcessPoolExecutor(jobs) as pool:
        running: dict[Future[Row], int] = {pool.submit(task.done): number for number, task in enumerate(todo)}
        for future in as_completed(running):
            say(todo[running[future]].words)
            yield running[future], future.result()


# --- what came of it -------------------------------------------------------------------------------------------------


def reported(found: Mapping[str, list[Row]], size: ScaleSize) -> list[Report]:
    """A report for each show, with its goals."""
    settings, command = asdict(size), "penstock bench scale"
    return [
        Report(
            name=NAME,
            title=f"A bursty day, {size.hours:g} h simulated, {size.rate:g} requests a second in the mean",
            command=command,
            settings={**settings, "curve_s": CURVE_S, "slots": day.ENGINE.shape.slots},
            columns=DAY_COLUMNS,
            rows=_curves_of_one_seed(found["day"], size.seeds[0]),
            ratios=tuple(_day_goals(found["day"])),
            notes=RULES,
        ),
        Report(
            name=f"{NAME}-steady",
            title="A load that is constant but for its noise",
            command=command,
            settings=settings,
            columns=STEADY_COLUMNS,
            rows=found["steady"],
            ratios=tuple(_steady_goals(found["steady"])),
            notes=("Gaps between requests have a coefficient of variation of 1.5, lengths are Zipf's.",),
        ),
        Report(
            name=f"{NAME}-health",
            title="Six busy workers, of which one becomes slow after an hour, or none",
            command=command,
            settings=settings,
            columns=HEALTH_COLUMNS,
            rows=found["health"],
            ratios=tuple(_health_goals(found["health"])),
        ),
        Report(
            name=f"{NAME}-shapes",
            title=f"One big replica, four small ones, or what the scheduler says: 1 to {RAMP[-1]} clients and back",
            command=command,
            settings=settings,
            columns=SHAPES_COLUMNS,
            rows=found["shapes"],
            ratios=tuple(_shapes_goals(found["shapes"])),
            notes=(
                f"Each level is held for {size.hold_s:g} s with the switch in it; while both shapes have jobs each has "
                "half of the GPUs. The threshold is read from a sweep of both.",
            ),
        ),
    ]


def _curves_of_one_seed(rows: Iterable[Row], seed: int) -> list[Row]:
    """One is enough for a picture."""
    curves = ("workers", "jobs")
    return [row if row["seed"] == seed else {k: v for k, v in row.items() if k not in curves} for row in rows]


def _day_goals(rows: Sequence[Row]) -> Iterator[Ratio]:
    for row in rows:
        if row["name"] == PENSTOCK:
            words = f"seed {row['seed']}: interactive begun within 2 s, %"
            yield Ratio.held("scale.begun", words, row["interactive"])
            words = f"seed {row['seed']}: worker-hours of those of {STATIC}, %"
            yield Ratio.held("scale.hours", words, row["share_of_peak"], digits=1)


def _steady_goals(rows: Sequence[Row]) -> Iterator[Ratio]:
    for row in rows:
        if row["name"] == PENSTOCK:
            words = f"seed {row['seed']}: reversals in the worst hour"
            yield Ratio.held("scale.reversals", words, row["most_in_an_hour"], digits=0)


def _health_goals(rows: Sequence[Row]) -> Iterator[Ratio]:
    for row in rows:
        if row["slow"] > 1:
            words = f"seed {row['seed']}: {row['slow']:g} times slower, cordoned after, s"
            yield Ratio.held("scale.cordoned", words, row["cordoned_after_s"], digits=0)
    yield Ratio.none("healthy workers cordoned", sum(row["healthy_cordoned"] for row in rows))


def _shapes_goals(rows: Sequence[Row]) -> Iterator[Ratio]:
    for row in rows:
        words = f"seed {row['seed']}: least share of the better shape at any level"
        yield Ratio.held("scale.shape_share", words, row["least_share"])
        words = f"seed {row['seed']}: switches at a crossing"
        yield Ratio.held("scale.switches", words, row["most_switches"], digits=0)


def draw(reports: Sequence[Report], folder: Path) -> list[Path]:
    """Workers and load over the day, and throughput of the shapes; the files written."""
    by_name = {each.name: each for each in reports}
    whole = by_name[NAME]
    rows = [row for row in whole.rows if "workers" in row]
    step_h, slots = whole.settings["curve_s"] / 3600, whole.settings["slots"]
    curves: dict[str, plots.Points] = {
        row["name"]: [(n * step_h, workers) for n, workers in enumerate(row["workers"])] for row in rows
    }
    load = next(row["jobs"] for row in rows if row["name"] == STATIC)
    curves["load: jobs there / slots"] = [(n * step_h, jobs / slots) for n, jobs in enumerate(load)]
    drawn = plots.lines(
        folder / "scale-day",
        f"A bursty day (seed {rows[0]['seed']})",
        curves,
        x=plots.Axis(title="hours"),
        y=plots.Axis(title="workers"),
        marked=False,
    )
    levels = by_name[f"{NAME}-shapes"].rows[0]["levels"]
    up, down = levels[: len(RAMP)], levels[len(RAMP) - 1 :]
    curves = {form: [(level["clients"], level[form]) for level in up] for form in FORMS}
    curves["dynamic, up"] = [(level["clients"], level["dynamic"]) for level in up]
    curves["dynamic, down"] = [(level["clients"], level["dynamic"]) for level in down]
    x, y = plots.Axis(title="clients at once"), plots.Axis(title="tokens a second")
    return drawn + plots.lines(folder / "scale-shapes", "Two shapes of a pool", curves, x=x, y=y)


main = BenchProgram("penstock bench scale", __doc__, _run).taking(
    Option("--quick", action="store_true", help="half an hour instead of a day; nothing is judged or written"),
    Option("--jobs", type=int, default=report.cores(), help="processes (default: one for each core)"),
    Option("--out", type=Path, help=f"folder of the JSON files (default {report.RESULTS})"),
    PLOTS,
)

if __name__ == "__main__":
    main.exit()
