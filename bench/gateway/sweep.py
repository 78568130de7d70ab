"""Comparisons of gateways: every system at every concurrency in a closed loop, and all streams at once in bursts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from bench import plots
from bench.gateway.figures import BURST_COLUMNS, COLUMNS, FLOOR, PENSTOCK, Goals, Row, rows
from bench.gateway.run import GatewayOptions, GatewayReadings, play
from bench.gateway.systems import GatewaySystem, ServingGateway
from bench.load.plan import LoadPlan
from bench.load.scripted import ClockError, clock_error
from bench.processes import Processes
from bench.report import Ratio, Report
from bench.testbed import Testbed

NAME, RIVALS = "gateway", "gateway-rivals"
"""The whole comparison; only the systems that the goals speak of, in many rounds."""
VARIANT = "penstock-"
COST = "CPU microseconds per token, all processes"


def sweep(
    systems: Sequence[GatewaySystem], options: GatewayOptions, command: str, console: Console, *, name: str = NAME
) -> Report:
    """Raises LoadFailed, Died: without a clock nothing can be said."""
    played, names = GatewayReadings(), [system.name for system in systems]
    total = options.rounds * len(systems) * len(options.levels)
    console.print(f"{total} measurements, about {options.minutes(len(systems))} minutes")
    with Testbed(console, "preparing", total) as stage:
        ready = played.prepared(systems, stage.say)
        stage.say("checking the clock")
        with Processes(stage.folder) as processes:
            clock = clock_error(processes)

        plan, engine = options.plan, options.engine
        play(ready, options.rounds, options.levels, plan, engine, stage.folder, played, stage.say, stage.done)
        if played.failed:
            stage.keep()
    found = rows(played.readings, names)
    return Report(
        name=options.name(name),
        title=f"Gateways before one simulated engine: {options.step_ms:g} ms steps, {options.tokens} tokens a request",
        command=command,
        settings=msgspec.to_builtins(options) | {"systems": {system.name: system.title for system in systems}},
        columns=COLUMNS,
        rows=found,
        ratios=(*Goals(found, names).of_sweep(options.step_ms), clock_ratio(clock)),
        notes=(*notes(systems, played, found), clock_note(clock)),
    )


def clock_ratio(clock: ClockError) -> Ratio:
    what = "clock error of the load generator against a scripted server, ms (TTFT, ITL: the worse median)"
    return Ratio.held("load.clock", what=what, value=clock.worst)


def clock_note(clock: ClockError) -> str:
    return (
        f"Clock error: TTFT {clock.ttft:+.2f} ms, ITL {clock.itl:+.3f} ms (medians), ITL p99 +{clock.itl_p99:.2f} ms, "
        "which holds what else this machine did in that second."
    )


def notes(systems: Sequence[GatewaySystem], played: GatewayReadings, found: Sequence[Row]) -> list[str]:
    """What the table does not say."""
    said = [f"{system.name}: {system.title}." for system in systems]
    said += [f"{name} FAILED: {why}" for name, why in played.failed.items()]
    for row in found:
        if row["wrong"]:
            what = "; ".join(f"{count} x {wrong}" for wrong, count in list(row["wrong"].items())[:3])
            said.append(f"{row['system']} at c={row['streams']}: {what}")
        if row["cut_short"]:
            said.append(f"{row['system']} at c={row['streams']}: time was up after {row['requests']} requests.")
    most = max((row["load_cpu"] for row in found), default=0.0)
    said.append(f"The load generator used at most {100 * most:.0f} % of one core; its CPU time is not counted.")
    return said


def draw(report: Report, folder: Path) -> list[Path]:
    """Cost and first-token time over concurrency, and the cost of Penstock's own variants; the files written."""
    names = list(dict.fromkeys(row["system"] for row in report.rows))
    others = [name for name in names if not name.startswith(VARIANT)]
    own = [name for name in names if name == FLOOR or name.startswith(PENSTOCK)]
    cost, wait = "cpu_us_per_token", "ttft_p99_ms"
    return [
        *_lines(report, folder / "gateway-cpu", "What a token costs", others, cost, COST),
        *_lines(report, folder / "gateway-ttft", "Slowest first tokens", others, wait, "TTFT p99, ms"),
        *_lines(report, folder / "gateway-durability", "What durability costs", own, cost, COST),
    ]


def _lines(report: Report, stem: Path, title: str, names: Sequence[str], key: str, unit: str) -> list[Path]:
    """One figure over concurrency, a curve for each system."""
    series = {name: [(row["streams"], row.get(key)) for row in report.rows if row["system"] == name] for name in names}
    streams = plots.Axis(title="concurrent streams", log=True)
    return plots.lines(stem, title, series, x=streams, y=plots.Axis(title=unit, log=True)) if series else []


BURST = "gateway-burst"


def burst(systems: Sequence[GatewaySystem], options: GatewayOptions, command: str, console: Console) -> Report:
    """Raises LoadFailed, Died."""
    played, names = GatewayReadings(), [system.name for system in systems]
    with Testbed(console, "preparing", options.rounds * len(systems)) as stage:
        ready = played.prepared(systems, stage.say)
        stage.say("checking the clock")
        with Processes(stage.folder) as processes:
            clock = clock_error(processes)

        def plan(serving: ServingGateway, streams: int) -> LoadPlan:
            return serving.plan(streams, options.bursts, options.burst_tokens, options.limit_s, together=True)

        levels, engine = [options.burst_streams], options.burst_engine
        play(ready, options.rounds, levels, plan, engine, stage.folder, played, stage.say, stage.done)
        if played.failed:
            stage.keep()
    found = rows(played.readings, names)
    return Report(
        name=options.name(BURST),
        title=f"{options.burst_streams} requests at once, {options.burst_ms:g} ms steps and prefill",
        command=command,
        settings=msgspec.to_builtins(options) | {"systems": {system.name: system.title for system in systems}},
        columns=BURST_COLUMNS,
        rows=found,
        ratios=(*Goals(found, names).of_burst(), clock_ratio(clock)),
        notes=(*notes(systems, played, found), clock_note(clock)),
    )
