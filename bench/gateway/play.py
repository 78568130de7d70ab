"""One system after another, round after round: each is started, loaded at every level, and ended before the next."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.environments import Absent
from bench.gateway.system import GatewaySystem, Say, ServingGateway
from bench.load.child import LoadFailed, measure
from bench.load.plan import LoadPlan, StreamReading
from bench.processes import Died
from workers.engines.sim.settings import SimSettings

SETTLE_S = 0.5
"""Between starting and loading: what a start leaves to do is not counted against a stream."""

PlanAt = Callable[[ServingGateway, int], LoadPlan]
"""The plan for so many streams."""


@dataclass(slots=True)
class GatewayReadings:
    """What was seen: readings by (system, streams), one for each round, and what could not be measured."""

    readings: dict[tuple[str, int], list[StreamReading]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def note(self, system: str, streams: int, reading: StreamReading) -> None:
        self.readings.setdefault((system, streams), []).append(reading)

    def fail(self, system: str, why: object) -> None:
        self.failed.setdefault(system, " ".join(str(why).split())[:500])


def prepare(systems: Sequence[GatewaySystem], played: GatewayReadings, say: Say) -> list[GatewaySystem]:
    """Those that can be run here; why the others cannot is noted."""
    ready = []
    for system in systems:
        try:
            system.prepare(say)
        except Absent as error:
            played.fail(system.name, f"cannot be installed: {error}")
        else:
            ready.append(system)
    return ready


def play(
    systems: Sequence[GatewaySystem],
    rounds: int,
    levels: Iterable[int],
    plan_at: PlanAt,
    engine: SimSettings,
    folder: Path,
    played: GatewayReadings,
    say: Say,
    done: Callable[[], None],
) -> None:
    """Every other round goes through the systems backwards, so that none always follows the same one."""
    for number in range(rounds):
        for system in systems if number % 2 == 0 else reversed(systems):
            say(f"round {number + 1}/{rounds}: {system.name}")
            place = folder / f"{system.name}-{number + 1}"
            place.mkdir(parents=True)
            try:
                with system.serve(place, engine) as serving:
                    _load(system, serving, levels, plan_at, played, say, done)
            except (Died, LoadFailed, Absent, OSError) as error:
                played.fail(system.name, error)


def _load(
    system: GatewaySystem,
    serving: ServingGateway,
    levels: Iterable[int],
    plan_at: PlanAt,
    played: GatewayReadings,
    say: Say,
    done: Callable[[], None],
) -> None:
    time.sleep(SETTLE_S)
    for streams in levels:
        say(f"{system.name}, c={streams}")
        played.note(system.name, streams, measure(plan_at(serving, streams)))
        done()
        serving.check()
