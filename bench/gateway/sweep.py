"""Comparisons of gateways: every system at every concurrency in a closed loop."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from bench import plots
from bench.environments import Failures
from bench.gateway.engine import MODEL
from bench.gateway.figures import COLUMNS, Goals, Row, rows
from bench.gateway.systems import GatewaySystem, ServingGateway
from bench.load.plan import LoadFailed, LoadPlan, StreamReading, measure
from bench.load.scripted import clock_error
from bench.processes import Died, Processes
from bench.program import ProgramRun, Testbed
from bench.report import Ratio, Report
from workers.engines.sim.settings import SimSettings

OVERHEAD_S = 4.0
"""Of one measurement: starting, warming up, reading what came back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayOptions:
    """As the command line says it, filled up."""

    levels: tuple[int, ...]
    rounds: int
    requests_per_stream: int
    tokens: int
    step_ms: float
    prefill_ms: float
    limit_s: float
    """For one measurement to begin its requests; what runs then may take as long again."""

    @property
    def engine(self) -> SimSettings:
        """A slot for every stream, so that nothing queues."""
        return SimSettings(step_ms=self.step_ms, prefill_ms=self.prefill_ms, slots=max(256, *self.levels))

    def plan(self, serving: ServingGateway, streams: int) -> LoadPlan:
        """So many streams in a closed loop."""
        return LoadPlan(
            port=serving.port, model=MODEL, streams=streams, requests=streams * self.requests_per_stream,
            tokens=self.tokens, limit_s=self.limit_s, watch=serving.watch,
        )  # fmt: skip

    def minutes(self, systems: int) -> int:
        """About how long a sweep takes, if every system keeps up with the engine."""
        answer_s = (self.prefill_ms + self.step_ms * self.tokens) / 1e3
        measurements = self.rounds * systems * len(self.levels)
        return round(measurements * (self.requests_per_stream * answer_s + OVERHEAD_S) / 60) + 1


SETTLE_S = 0.5
"""Between starting and loading: what a start leaves to do is not counted against a stream."""


@dataclass(slots=True)
class GatewayReadings(Failures):
    """What was seen: readings by (system, streams), one for each round, and what could not be measured."""

    readings: dict[tuple[str, int], list[StreamReading]] = field(default_factory=dict)

    def note(self, system: str, streams: int, reading: StreamReading) -> None:
        self.readings.setdefault((system, streams), []).append(reading)


def play(systems: Sequence[GatewaySystem], options: GatewayOptions, stage: Testbed, played: GatewayReadings) -> None:
    """All systems at all levels in every round; what went wrong is noted."""

    def load(system: GatewaySystem, folder: Path) -> None:
        with system.serve(folder, options.engine) as serving:
            time.sleep(SETTLE_S)
            for streams in options.levels:
                stage.say(f"{system.name}, c={streams}")
                played.note(system.name, streams, measure(options.plan(serving, streams)))
                stage.done()
                serving.check()

    played.take_turns(systems, options.rounds, stage, load, Died, LoadFailed)


NAME, RIVALS, IN_FRONT = "gateway", "gateway-rivals", "gateway-upstream"
"""The whole comparison; the systems of the goals alone, in many rounds; systems in front of a server."""
VARIANT = "penstock-"
COST = "CPU microseconds per token, all processes"


def compare(run: ProgramRun, name: str, systems: Sequence[GatewaySystem], options: GatewayOptions) -> None:
    """Measure, show and keep. Raises LoadFailed, Died: without a clock nothing can be said."""
    played, names = GatewayReadings(), [system.name for system in systems]
    total = options.rounds * len(systems) * len(options.levels)
    run.console.print(f"{total} measurements, about {options.minutes(len(systems))} minutes")
    with Testbed(run.console, "preparing", total) as stage:
        ready = played.prepared(systems, stage.say)
        stage.say("checking the clock")
        with Processes(stage.folder) as processes:
            clock = clock_error(processes)
        play(ready, options, stage, played)
        if played.failed:
            stage.keep()
    found = rows(played.readings, names)
    goals = Goals(found, names)
    ratios = goals.of_upstream() if name == IN_FRONT else goals.of_sweep(options.step_ms)
    what = "clock error of the load generator against a scripted server, ms (TTFT, ITL: the worse median)"
    title = f"Gateways before one simulated engine: {options.step_ms:g} ms steps, {options.tokens} tokens a request"
    settings = msgspec.to_builtins(options) | {"systems": {system.name: system.title for system in systems}}
    ratios.append(Ratio.held("load.clock", what, clock))
    said = notes(systems, played, found)
    run.keep(run.result(name, title, COLUMNS, found, ratios, said, **settings), draw if name == NAME else None)


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
    """Cost and first-token time over concurrency; the files written."""
    names = list(dict.fromkeys(row["system"] for row in report.rows))
    others = [name for name in names if not name.startswith(VARIANT)]
    return [
        *_lines(report, folder / "gateway-cpu", "What a token costs", others, "cpu_us_per_token", COST),
        *_lines(report, folder / "gateway-ttft", "Slowest first tokens", others, "ttft_p99_ms", "TTFT p99, ms"),
    ]


def _lines(report: Report, stem: Path, title: str, names: Sequence[str], key: str, unit: str) -> list[Path]:
    """One figure over concurrency, a curve for each system."""
    series = {name: [(row["streams"], row.get(key)) for row in report.rows if row["system"] == name] for name in names}
    streams = plots.Axis(title="concurrent streams", log=True)
    return plots.lines(stem, title, series, x=streams, y=plots.Axis(title=unit, log=True)) if series else []
