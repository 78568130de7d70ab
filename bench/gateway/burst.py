"""The worst moment: all streams ask at once, of an engine with short steps. How late are the first tokens?"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from rich.console import Console

from bench.gateway.figures import BURST_COLUMNS, Goals, rows
from bench.gateway.run import GatewayOptions, GatewayReadings, play, prepare
from bench.gateway.stage import GatewayTestbed
from bench.gateway.sweep import clock_note, clock_ratio, notes
from bench.gateway.systems import GatewaySystem, ServingGateway
from bench.load.plan import LoadPlan
from bench.load.scripted import clock_error
from bench.processes import Processes
from bench.report import Report

NAME = "gateway-burst"


def burst(systems: Sequence[GatewaySystem], options: GatewayOptions, command: str, console: Console) -> Report:
    """Raises LoadFailed, Died."""
    played, names = GatewayReadings(), [system.name for system in systems]
    with GatewayTestbed(console, "preparing", options.rounds * len(systems)) as stage:
        ready = prepare(systems, played, stage.say)
        stage.say("checking the clock")
        with Processes(stage.folder) as processes:
            clock = clock_error(processes)

        def plan(serving: ServingGateway, streams: int) -> LoadPlan:
            return LoadPlan(
                port=serving.port,
                model=serving.model,
                headers=dict(serving.headers),
                streams=streams,
                requests=streams * options.bursts,
                tokens=options.burst_tokens,
                together=True,
                limit_s=options.limit_s,
                watch=serving.watch,
            )

        levels, engine = [options.burst_streams], options.burst_engine
        play(ready, options.rounds, levels, plan, engine, stage.folder, played, stage.say, stage.done)
        if played.failed:
            stage.keep()
    found = rows(played.readings, names)
    return Report(
        name=options.name(NAME),
        title=f"{options.burst_streams} requests at once, {options.burst_ms:g} ms steps and prefill",
        command=command,
        settings=msgspec.to_builtins(options) | {"systems": {system.name: system.title for system in systems}},
        columns=BURST_COLUMNS,
        rows=found,
        ratios=(*Goals(found, names).of_burst(), clock_ratio(clock)),
        notes=(*notes(systems, played, found), clock_note(clock)),
    )
