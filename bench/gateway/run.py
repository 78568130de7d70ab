"""One system after another, round after round: each is started, loaded at every level, and ended before the next."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.environments import Absent, Failures
from bench.gateway.systems import GatewaySystem, Say, ServingGateway
from bench.load.plan import LoadFailed, LoadPlan, StreamReading, measure
from bench.processes import Died
from workers.engines.sim.settings import SimSettings

OVERHEAD_S = 4.0
"""Of one measurement: starting, warming up, reading what came back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayOptions:
    """As the command line says it, filled up."""

    quick: bool
    levels: tuple[int, ...]
    rounds: int
    requests_per_stream: int
    tokens: int
    step_ms: float
    prefill_ms: float
    limit_s: float
    """For one measurement to begin its requests; what runs then may take as long again."""
    burst_streams: int = 64
    burst_ms: float = 5.0
    """Step and prefill of the burst."""
    bursts: int = 20
    """In each round."""
    burst_tokens: int = 32
    idle_streams: int = 10_000
    idle_rest_s: float = 20.0
    """How long they are watched doing nothing."""
    idle_keep_alive_s: float = 10.0
    """The default of [api] keep_alive_s."""

    @property
    def engine(self) -> SimSettings:
        """A slot for every stream, so that nothing queues."""
        return SimSettings(step_ms=self.step_ms, prefill_ms=self.prefill_ms, slots=max(256, *self.levels))

    @property
    def burst_engine(self) -> SimSettings:
        return SimSettings(step_ms=self.burst_ms, prefill_ms=self.burst_ms, slots=max(256, self.burst_streams))

    def plan(self, serving: ServingGateway, streams: int) -> LoadPlan:
        """So many streams in a closed loop."""
        return serving.plan(streams, self.requests_per_stream, self.tokens, self.limit_s)

    def minutes(self, systems: int) -> int:
        """About how long a sweep takes, if every system keeps up with the engine."""
        answer_s = (self.prefill_ms + self.step_ms * self.tokens) / 1e3
        measurements = self.rounds * systems * len(self.levels)
        return round(measurements * (self.requests_per_stream * answer_s + OVERHEAD_S) / 60) + 1

    def name(self, mode: str) -> str:
        """Of the results file: a quick run does not take the place of a full one."""
        return f"{mode}-quick" if self.quick else mode


SETTLE_S = 0.5
"""Between starting and loading: what a start leaves to do is not counted against a stream."""

PlanAt = Callable[[ServingGateway, int], LoadPlan]
"""The plan for so many streams."""


@dataclass(slots=True)
class GatewayReadings(Failures):
    """What was seen: readings by (system, streams), one for each round, and what could not be measured."""

    readings: dict[tuple[str, int], list[StreamReading]] = field(default_factory=dict)

    def note(self, system: str, streams: int, reading: StreamReading) -> None:
        self.readings.setdefault((system, streams), []).append(reading)


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
