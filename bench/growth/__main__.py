"""`python -m bench.growth`: how Penstock's cost grows with tokens, streams, partitions and API processes."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import msgspec

from bench import plots
from bench.growth.figures import (
    APIS,
    COLUMNS,
    PARTITIONS,
    ROLES,
    STEP_READERS,
    STEP_TOKENS,
    STREAMS,
    TOKENS,
    WORKERS,
    Point,
    Row,
    row,
    step_row,
    step_us,
    unit_costs,
)
from bench.load.plan import LoadFailed, LoadPlan, measure
from bench.penstock import MODEL, Penstock, start_redis
from bench.processes import Died, Processes
from bench.program import OUT, PLOTS, BenchProgram, Option, ProgramRun, Testbed
from bench.report import Report

NAME = "growth"
STEP_MS, PREFILL_MS = 15.0, 25.0
SETTLE_S = 0.5

POINTS = (
    *(Point(series=TOKENS, tokens=tokens) for tokens in (1, 16, 64, 256)),
    *(Point(series=STREAMS, streams=streams) for streams in (1, 4, 16, 64, 256)),
    *(Point(series=PARTITIONS, partitions=partitions) for partitions in (1, 2, 4, 8)),
    *(Point(series=APIS, apis=apis) for apis in (1, 2, 4)),
)
QUICK = (
    *(Point(series=TOKENS, streams=8, tokens=tokens) for tokens in (1, 16)),
    *(Point(series=STREAMS, streams=streams, tokens=16) for streams in (1, 8)),
    *(Point(series=PARTITIONS, streams=8, tokens=16, partitions=partitions) for partitions in (1, 2)),
    *(Point(series=APIS, streams=8, tokens=16, apis=apis) for apis in (1, 2)),
)

STEPS = (
    *((STEP_TOKENS, tokens, 1) for tokens in (1, 64, 256)),
    *((STEP_READERS, 256, readers) for readers in (1, 8, 32)),
)
QUICK_STEPS = ((STEP_TOKENS, 1, 1), (STEP_TOKENS, 16, 1), (STEP_READERS, 16, 1), (STEP_READERS, 16, 4))


def _run(run: ProgramRun) -> int:
    args = run.args
    points, steps = (QUICK, QUICK_STEPS) if args.quick else (POINTS, STEPS)
    rows: list[Row] = []
    with Testbed(run.console, "starting", len(points) + len(steps)) as stage:
        for number, point in enumerate(points):
            stage.say(f"{point.series} = {point.value}")
            folder = stage.room(number)
            rows.append(_measured(point, folder, args.seconds))
            stage.done()
        with Processes(stage.folder) as store:
            url = start_redis(store)
            for series, tokens, readers in steps:
                stage.say(f"{series}: {tokens}, {readers}")
                us = asyncio.run(step_us(store, url, tokens, readers, args.seconds))
                rows.append(step_row(series, tokens, readers, us))
                stage.done()
    notes = (
        "Each row is one run of a Penstock of its own with one worker; the load generator is not counted. The last two "
        f"series are Redis alone, with {WORKERS} workers writing their steps as fast as they can.",
    )
    settings = {"step_ms": STEP_MS, "prefill_ms": PREFILL_MS, "seconds": args.seconds}
    costs = msgspec.to_builtins(unit_costs(rows))
    title = f"How the cost grows, {STEP_MS:g} ms steps"
    run.keep(run.result(NAME, title, COLUMNS, rows, (), notes, **settings, unit_costs_us=costs), draw)
    return 0


def _measured(point: Point, folder: Path, seconds: float) -> Row:
    settings = {
        "sim.step_ms": STEP_MS,
        "sim.prefill_ms": PREFILL_MS,
        "redis.partitions": point.partitions,
        "telemetry.metrics_dir": folder / "metrics",
    }
    (folder / "metrics").mkdir()
    with Penstock(folder, apis=point.apis, settings=settings) as penstock:
        time.sleep(SETTLE_S)
        each_s = (PREFILL_MS + point.tokens * STEP_MS) / 1000
        plan = LoadPlan(
            port=penstock.port,
            model=MODEL,
            streams=point.streams,
            requests=point.streams * max(2, round(seconds / each_s)),
            tokens=point.tokens,
            limit_s=10 * seconds,
            watch=penstock.processes.pids(),
        )
        return row(point, measure(plan))


def draw(found: Report, folder: Path) -> list[Path]:
    """A curve of each role's cost for each series; the files written."""
    titles = {
        TOKENS: ("What a request costs by its length", "tokens of an answer", "us_per_request", "tokens"),
        STREAMS: ("What a token costs by concurrency", "concurrent streams", "us_per_token", None),
        PARTITIONS: ("What a token costs by partitions", "partitions", "us_per_token", None),
        APIS: ("What a token costs by API processes", "API processes", "us_per_token", None),
    }
    drawn: list[Path] = []
    for series, (title, x, total, times) in titles.items():
        rows = [each for each in found.rows if each["series"] == series]
        curves: dict[str, plots.Points] = {"all": [(each["value"], each[total]) for each in rows]}
        for role in ROLES:
            curves[role] = [(each["value"], each[role] * (each[times] if times else 1)) for each in rows]
        y = plots.Axis(title="CPU microseconds per request" if times else "CPU microseconds per token", log=not times)
        drawn += plots.lines(folder / f"growth-{series}", title, curves, x=plots.Axis(title=x, log=True), y=y)
    return drawn


main = BenchProgram("penstock bench growth", __doc__, _run, Died, LoadFailed, OSError).taking(
    Option("--seconds", type=float, default=5.0, help="about so long for each point (default 5)"),
    Option("--quick", action="store_true", help="few small points, no plots"),
    OUT,
    PLOTS,
)

if __name__ == "__main__":
    main.exit()
