"""CPU per token of this tree over that of another commit: both deployed at once, loaded in turn, judged by an interval.

Each round starts both trees anew, because the memory layout and hash seed of one start make a process a few percent
cheaper or dearer for as long as it lives. Each tree has a store server of its own (the same binary), and the processes
and settings of system `penstock` in the comparison of gateways. The load generator and the program that starts the
processes are this tree's for both; the simulated engine is part of each tree's worker.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
from rich.console import Console

from bench.gateway import trees
from bench.gateway.figures import COLUMNS, Readings, rows
from bench.gateway.run import SETTLE_S, GatewayOptions, GatewayReadings
from bench.gateway.sweep import notes
from bench.gateway.systems import GatewaySystem, PenstockGateway, ServingGateway
from bench.load.plan import StreamReading, measure
from bench.report import Ratio, Report
from bench.stats import median_interval
from bench.testbed import Testbed

NAME = "gateway-base"
THIS, BASE = "this", "base"
TURNS = (THIS, BASE, BASE, THIS)
"""Who is loaded when, within a level of a round: a drift of the machine that is steady over four turns cancels out."""
LEVELS = (1, 16, 256)
MIN_ROUNDS = 9
"""For a verdict: the interval of the median is then the 2nd to the 8th ratio, and one odd round on either side does not
decide."""

SHOWN = ("system", "streams", "requests", "tokens_per_s", "cpu_us_per_token", "cpu_ms_per_request", "errors", "parts")
BASE_COLUMNS = tuple(column for column in COLUMNS if column.key in SHOWN)


def turns(number: int) -> tuple[str, ...]:
    """The order within round `number` (from 0): ABBA and BAAB in turn."""
    return TURNS if number % 2 == 0 else tuple(BASE if name == THIS else THIS for name in TURNS)


def compare(ref: str, bound: float, options: GatewayOptions, command: str, console: Console) -> Report:
    """Raises WrongArguments, LoadFailed, Died: a comparison that lacks a round is not judged."""
    played, total = GatewayReadings(), options.rounds * len(options.levels) * len(TURNS)
    with (
        TemporaryDirectory(prefix="penstock-trees-") as copies,
        Testbed(console, "copying both trees", total) as stage,
    ):
        this = trees.copy_of_this(Path(copies, THIS))
        base = trees.export(ref, Path(copies, BASE))
        systems = [PenstockGateway(THIS, tree=this.path), PenstockGateway(BASE, tree=base.path)]
        for number in range(options.rounds):
            _round(systems, number, options, stage, played)
    versions = {THIS: this.version, BASE: base.version}
    return report(played, versions, bound, options, command)


def _round(
    systems: Sequence[GatewaySystem],
    number: int,
    options: GatewayOptions,
    stage: Testbed,
    played: GatewayReadings,
) -> None:
    title = f"round {number + 1}/{options.rounds}"
    stage.say(f"{title}: starting both trees")
    with ExitStack() as stack:
        serving: dict[str, ServingGateway] = {}
        for system in systems if number % 2 == 0 else reversed(systems):
            folder = stage.room(f"{system.name}-{number + 1}")
            serving[system.name] = stack.enter_context(system.serve(folder, options.engine))
        time.sleep(SETTLE_S)
        for streams in options.levels:
            for name in turns(number):
                stage.say(f"{title}: {name}, c={streams}")
                played.note(name, streams, measure(options.plan(serving[name], streams)))
                stage.done()
                serving[name].check()


def report(
    played: GatewayReadings, versions: Mapping[str, str], bound: float, options: GatewayOptions, command: str
) -> Report:
    """The verdict: one ratio for each level, judged where there were rounds enough."""
    readings = played.readings
    found = sorted(rows(readings, [THIS, BASE]), key=lambda row: int(row["streams"]))
    for row in found:
        row["rounds"] = options.rounds  # and not turns
    judged = options.rounds >= MIN_ROUNDS
    ratios = [of_level(readings, streams, versions[BASE], bound if judged else None) for streams in options.levels]
    failed = sum(reading.errors for (name, _), each in readings.items() for reading in each if name == THIS)
    return Report(
        name=options.name(NAME),
        title=f"CPU of all processes: this tree ({versions[THIS]}) and {versions[BASE]}, {options.step_ms:g} ms steps",
        command=command,
        settings=msgspec.to_builtins(options) | {"versions": dict(versions), "bound": bound},
        columns=BASE_COLUMNS,
        rows=found,
        ratios=(*ratios, Ratio(what="failed requests of this tree", value=float(failed), at_most=0, digits=0)),
        notes=(_how_to_read(options.rounds), *notes((), played, found)),
    )


def of_level(readings: Readings, streams: int, base: str, bound: float | None) -> Ratio:
    """The median over the rounds of this/base, with its interval; without value if a round has no token of one tree."""
    what = f"c={streams}: CPU per token, this tree / {base}"
    mine, theirs = (per_round(readings[name, streams]) for name in (THIS, BASE))
    ratios = tuple(a / b for a, b in zip(mine, theirs, strict=True) if a is not None and b is not None)
    if len(ratios) < len(mine):
        return Ratio(what=what, value=None, at_most=bound, digits=3)
    found = median_interval(ratios)
    interval = (found.low, found.high)
    return Ratio(what=what, value=found.median, at_most=bound, digits=3, rounds=ratios, interval=interval)


def per_round(readings: Sequence[StreamReading]) -> list[float | None]:
    """CPU microseconds per token of each round, over both its turns; None for a round without a token."""
    pairs = zip(readings[::2], readings[1::2], strict=True)
    return [_us_per_token(first, second) for first, second in pairs]


def _us_per_token(*readings: StreamReading) -> float | None:
    tokens = sum(reading.tokens for reading in readings)
    cpu_s = sum(sum(reading.cpu.values()) for reading in readings)
    return 1e6 * cpu_s / tokens if tokens else None


def _how_to_read(rounds: int) -> str:
    interval = median_interval(range(rounds))
    said = (
        f"Each ratio is the median of {rounds} rounds. In brackets: numbers {interval.rank} and "
        f"{rounds + 1 - interval.rank} of the rounds' ratios in ascending order, an interval that contains the true "
        f"median with probability {100 * interval.coverage:.1f} %."
    )
    if rounds < MIN_ROUNDS:
        return f"{said} With fewer than {MIN_ROUNDS} rounds nothing is judged."
    return f"{said} A bound is missed when the whole interval lies above it, undecided when the interval contains it."
