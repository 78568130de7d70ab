"""Round after round, one system after the other on the same Redis: many callers, then one alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from redis import Redis

from bench.environments import Absent
from bench.jobs.callers import CallerPlan
from bench.jobs.systems import ClientFailed, JobsReading, JobsSystem, Say, ServingJobs, measure
from bench.penstock import start_redis
from bench.processes import Died, Processes

STARTED_S = 3.0
"""Guests do not say when they are ready."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobsOptions:
    """How long, how often, how many at once."""

    rounds: int = 3
    callers: int = 256
    warmup_s: float = 2.0
    seconds: float = 5.0


@dataclass(slots=True)
class JobsReadings:
    """Readings by system, one for each round; and why others could not be had."""

    crowd: dict[str, list[JobsReading]] = field(default_factory=dict)
    alone: dict[str, list[JobsReading]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def fail(self, system: str, why: object) -> None:
        self.failed.setdefault(system, " ".join(str(why).split())[:500])


def prepare(systems: Sequence[JobsSystem], played: JobsReadings, say: Say) -> list[JobsSystem]:
    """Those that can be run here."""
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
    systems: Sequence[JobsSystem],
    options: JobsOptions,
    folder: Path,
    played: JobsReadings,
    say: Say,
    done: Callable[[], None],
) -> None:
    """Every other round goes backwards, so that none always follows the same one. Raises Died for the store."""
    (folder / "store").mkdir()
    with Processes(folder / "store") as store:
        url = start_redis(store)
        for number in range(options.rounds):
            for system in systems if number % 2 == 0 else reversed(systems):
                say(f"round {number + 1}/{options.rounds}: {system.name}")
                place = folder / f"{system.name}-{number + 1}"
                place.mkdir()
                try:
                    _clear(url)
                    with system.serve(place, url) as serving:
                        time.sleep(STARTED_S)
                        _load(system, serving, store, options, played)
                except (Died, ClientFailed, Absent, OSError) as error:
                    played.fail(system.name, error)
                done()


def _load(
    system: JobsSystem, serving: ServingJobs, store: Processes, options: JobsOptions, played: JobsReadings
) -> None:
    alone = CallerPlan(serving.url, 1, options.warmup_s / 2, options.seconds / 2)
    played.alone.setdefault(system.name, []).append(measure(serving, store, alone))
    callers = min(options.callers, system.most_callers)
    crowd = CallerPlan(serving.url, callers, options.warmup_s, options.seconds)
    played.crowd.setdefault(system.name, []).append(measure(serving, store, crowd))


def _clear(url: str) -> None:
    """Nothing of the system before is left."""
    with Redis.from_url(url) as client:
        client.flushall()
