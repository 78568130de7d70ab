"""`penstock tune frontier`: measures a server over concurrency, finds the knee, and says which batch to set."""

from __future__ import annotations

import os
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import click

from bench.energy import EnergyMeter
from cli.options import Where, where_options
from cli.output import DONE, INTERRUPTED, Problem
from cli.progress import ProgressLine
from cli.scale import Period
from cli.tune.load import LoadSource, check, penstock_context, run_until, server_at
from penstock.text import counted
from planner.commands.answers import PlanAnswer, seconds, three
from planner.commands.inputs import WORKLOAD, device_named, model_named, plan_command
from planner.commands.tuning import (
    frontier_json,
    frontier_notes,
    frontier_plot,
    frontier_table,
    power_note,
    settings_lines,
)
from planner.facts.catalogue import PlanError
from planner.goodput import Workload
from planner.tuning import (
    MAX_REPEATS,
    LevelReading,
    SweepLevel,
    SweepPlan,
    frontier_of,
    is_flat,
    is_settled,
    line_of,
    recommend,
    sweep_plan,
    tuning_advice,
)
from telemetry.gpu import GpuReadings

PROBE_CLIENTS = 4
MAX_CLIENTS = 256
MIN_LEVELS = 2
"""Without two concurrencies there is no knee."""
FLAT, BUDGET, FAILURES = "flat", "the budget ended", "too many requests failed"
STOPPED = "it was interrupted"
"""Why a pass ended before its last level."""


@dataclass(frozen=True, slots=True)
class MeasuredSweep:
    """All readings by concurrency, and the concurrencies that are missing, with the cause."""

    readings: Mapping[int, Sequence[LevelReading]]
    left_out: tuple[int, ...] = ()
    cause: str = ""
    interrupted: bool = False


@plan_command("frontier", WORKLOAD)
@where_options(url=False)
@click.option("--url", help="Base URL of another server, such as http://127.0.0.1:8080/v1.")
@click.option("--model", help="Model to ask for [the first that the server names].")
@click.option("--requests", type=int, default=500, show_default=True, help="Requests of a concurrency, at most.")
@click.option("--max", "most", type=int, default=MAX_CLIENTS, show_default=True, help="Highest concurrency.")
@click.option("--repeats", type=int, default=MAX_REPEATS, show_default=True, help="Passes, at most.")
@click.option("--budget", type=Period(needs_unit=True), default="15m", show_default=True, help="Time for all of it.")
@click.option("--card", metavar="NAME", help="Its shape, as `penstock plan` knows it; with --gpu: replicas, too.")
@click.option("--config", type=click.Path(path_type=Path), help="Its own config.json or GGUF instead of --card.")
@click.option("--gpu", metavar="NAME", help="The GPU that it runs on.")
def frontier(
    where: Where,
    model: str | None,
    requests: int,
    workload: Workload,
    most: int,
    repeats: int,
    budget: int,
    card: str | None,
    config: Path | None,
    gpu: str | None,
) -> PlanAnswer:
    """Measure throughput and latency over concurrency, and say which batch to set.

    \b
    Examples:
      penstock tune frontier --requests 60
      penstock tune frontier --workload mine.csv
    """
    if requests < 2 or most < 2 or repeats < 1:
        raise PlanError(
            f"--requests {requests} --max {most} --repeats {repeats}: whole numbers from 2, and --repeats from 1"
        )
    known = None if card is None and config is None else model_named(card, config)
    device = None if gpu is None else device_named(gpu)
    url, server = server_at(where, model)
    context = penstock_context(server)
    lengths, meter = workload.lengths, EnergyMeter.of(server, GpuReadings.open())
    source = LoadSource(server, lengths, meter=meter, timeout_s=budget)
    began = time.monotonic()
    with ProgressLine(sys.stderr, os.environ) as progress:
        plan = planned(source, requests, most, began + budget, workload.requests, progress)
        levels = ", ".join(str(each.clients) for each in plan.levels)
        progress.say(
            f"measuring {server.model} with {levels} requests at once: about {seconds(plan.expected_s)} a pass, up to "
            f"{repeats} passes, at most {budget} s" + (f" ({plan.note})" if plan.note else "")
        )
        sweep = measured(source, plan, repeats, began + budget, progress)
    whole = frontier_of(sweep.readings, Random(1))  # noqa: S311 - a bootstrap
    found = replace(whole, left_out=sweep.left_out, cause=sweep.cause)
    wanted = recommend(found, lengths, known, device, context or 0)
    value = frontier_json(found, wanted, sweep.readings) | {
        "url": url, "model": server.model, "in": lengths.prompt, "out": lengths.answer,
        "workload": workload.name or None, "energy_source": meter.source or None,
        "seconds": time.monotonic() - began,
    }  # fmt: skip
    notes = [*frontier_notes(found, wanted), *power_note(sweep.readings, device, len(meter.read()))]
    if context is not None and not wanted.withheld:
        notes += settings_lines(server.model, wanted)
    exit_code = INTERRUPTED if sweep.interrupted else DONE
    return PlanAnswer(
        value, [frontier_table(found)], tuning_advice(found, wanted), frontier_plot(found), notes, exit_code
    )


def planned(
    source: LoadSource, requests: int, most: int, until: float, protocol: int, progress: ProgressLine
) -> SweepPlan:
    """Probe the server, and plan a sweep for the rest of the budget. Raises Problem if it does not answer in time, and
    PlanError if the shortest pass takes longer than what is left."""

    def probed(count: int, name: str) -> float:
        progress.phase(f"{name}: {counted(count, 'request')} at once")
        found = run_until(until, source.probe(count))
        if found is None:
            raise Problem("the budget ended before the server had answered the probes", next_step="a larger --budget")
        return found

    clients = min(PROBE_CLIENTS, most)
    probed(1, "warming up")
    line = line_of(probed(1, "probing"), clients, probed(clients, "probing"))
    return sweep_plan(line, requests, most, until - time.monotonic(), protocol)


def measured(source: LoadSource, plan: SweepPlan, repeats: int, until: float, progress: ProgressLine) -> MeasuredSweep:
    """Pass over the levels until the knee is sure, `repeats` are done, or the next pass would take too long.

    The first pass ends where throughput is flat; later ones repeat its levels. A level whose requests fail, or that
    still runs when the budget ends, ends the measurement; what was measured before counts, if it is two levels or more.
    Raises Problem otherwise. Ctrl-C ends it like the budget.
    """
    found: defaultdict[int, list[LevelReading]] = defaultdict(list)
    levels, left_out, cause = plan.levels, plan.left_out, BUDGET
    for number in range(repeats):
        began = time.monotonic()
        try:
            ended = _pass(source, levels, found, until, progress, f"pass {number + 1}")
        except KeyboardInterrupt:
            if len(found) < MIN_LEVELS:
                progress.say(f"interrupted before {MIN_LEVELS} concurrencies were measured: there is no frontier yet")
                raise
            ended = STOPPED
        if number == 0:
            missing = tuple(level.clients for level in levels if level.clients not in found)
            left_out = () if ended == FLAT else (*missing, *plan.left_out)
            cause = ended or BUDGET
        levels = tuple(level for level in levels if level.clients in found)
        rates = {each: [one.tokens_s for one in ones] for each, ones in found.items()}
        is_late = 2 * time.monotonic() - began > until
        if ended in (BUDGET, FAILURES, STOPPED) or is_late or is_settled(rates, Random(1)):  # noqa: S311 - a bootstrap
            break
    return MeasuredSweep(dict(found), left_out, cause if left_out else "", interrupted=ended == STOPPED)


def _pass(
    source: LoadSource,
    levels: Sequence[SweepLevel],
    found: defaultdict[int, list[LevelReading]],
    until: float,
    progress: ProgressLine,
    name: str,
) -> str:
    """Measure each level once more, into `found`; why the pass ended before the last of them, or "". Raises Problem if
    it ended before two were measured."""
    for at, level in enumerate(levels):
        began, said = time.monotonic(), ""

        def told(done: int, total: int, at: int = at, clients: int = level.clients, began: float = began) -> None:
            nonlocal said
            rate = f", {three(done / (time.monotonic() - began))} requests/s" if done else ""
            said = f"{clients} at once: {done} of {total} requests{rate}"
            progress.amount(name, at, len(levels), said)

        try:
            reading = run_until(until, source.level(level, told))
        except KeyboardInterrupt:
            progress.say(f"  {said}")
            raise
        if reading is None:
            if len(found) < MIN_LEVELS:
                raise Problem(
                    f"the budget ended before {MIN_LEVELS} concurrencies were measured",
                    next_step="a larger --budget, or fewer --requests",
                )
            return BUDGET
        try:
            check(reading)
        except Problem as problem:
            if len(found) < MIN_LEVELS:
                raise
            progress.say(f"  {level.clients} at once: {problem.message} ({problem.cause}); the measurement ends here")
            return FAILURES
        found[level.clients].append(reading)
        progress.say(f"  {level.clients} at once: {three(reading.tokens_s)} tokens/s")
        if len(found[1]) == 1 and is_flat({each: ones[0].tokens_s for each, ones in found.items()}):
            return FLAT
    return ""
