"""The two shows, with real processes: a normal load beside slow connections, and requests that must be refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from bench.connections.abuse import ABUSES, Cost, try_abuse
from bench.connections.figures import ARMS, AT_BARE, AT_PENSTOCK, ConnectionReading
from bench.load.plan import LoadPlan, measure
from bench.penstock import MODEL, Penstock
from bench.processes import Died
from bench.recovery.probe import Probe
from bench.testbed import Testbed

MANY = 1_000_000
"""Requests of a reading: its time is up before."""


@dataclass(frozen=True, slots=True)
class RunSize:
    """How much there is of everything. `seconds`: of each reading; within them whole crowds of slow connections exceed
    `header_timeout_s` together, several times."""

    slow: int
    rounds: int
    streams: int
    seconds: float
    tokens: int
    step_ms: float
    header_timeout_s: float


FULL = RunSize(slow=1000, rounds=9, streams=64, seconds=35, tokens=32, step_ms=5, header_timeout_s=10)
QUICK = RunSize(slow=60, rounds=1, streams=4, seconds=2.5, tokens=8, step_ms=2, header_timeout_s=1)


def turns(number: int) -> tuple[str, ...]:
    """The arms of round `number` (from 0), forwards and backwards in turn, against a steady drift of the machine."""
    return ARMS if number % 2 == 0 else tuple(reversed(ARMS))


def beside_slow(stage: Testbed, size: RunSize) -> dict[str, list[ConnectionReading]]:
    """The same load with and without slow connections, interleaved. Raises Died, LoadFailed, OSError."""
    settings = {
        "sim.step_ms": size.step_ms,
        "sim.slots": 2 * size.streams,
        "api.header_timeout_s": size.header_timeout_s,
    }
    found: dict[str, list[ConnectionReading]] = {arm: [] for arm in ARMS}
    folder = stage.room("slow")
    with Penstock(folder, settings=settings) as penstock:
        bare, control = (penstock.processes.serve(name, "bench.bare_server") for name in ("bare", "control"))
        plan = LoadPlan(
            port=penstock.port,
            model=MODEL,
            streams=size.streams,
            requests=MANY,
            tokens=size.tokens,
            limit_s=size.seconds,
        )
        measure(LoadPlan(port=penstock.port, model=MODEL, streams=size.streams, requests=size.streams, tokens=8))
        for number in range(size.rounds):
            for arm in turns(number):
                stage.say(f"round {number + 1}/{size.rounds}: slow connections {arm}")
                with _slow_clients(arm, penstock, bare, size.slow):
                    found[arm].append(_turn(plan, penstock, control))
                penstock.processes.check()
                stage.done()
    return found


def _turn(plan: LoadPlan, penstock: Penstock, control: int) -> ConnectionReading:
    """One reading, and how long at most the API process stood still meanwhile. Raises LoadFailed, Died."""
    held = sockets_of(penstock.processes.pids()["api-1"])
    with Probe(penstock.port, control) as probe:
        probe.longest_waits()  # from here on
        reading = measure(plan)
        return ConnectionReading(reading, held, *probe.longest_waits())


def abused(stage: Testbed) -> list[Cost]:
    """Each at a process of its own that has served before. Raises Died."""
    costs = []
    for number, abuse in enumerate(ABUSES, 1):
        stage.say(abuse.name)
        folder = stage.room(f"abuse-{number}")
        with Penstock(folder) as penstock:
            measure(LoadPlan(port=penstock.port, model=MODEL, streams=4, requests=40, tokens=8))
            costs.append(try_abuse(abuse, penstock.port, penstock.processes.pids()["api-1"]))
            penstock.processes.check()
        stage.done()
    return costs


@contextmanager
def _slow_clients(arm: str, penstock: Penstock, bare: int, count: int) -> Iterator[None]:
    """So many slow connections where this arm has them, once that process holds them all. Raises Died."""
    places = {AT_PENSTOCK: (penstock.port, "api-1"), AT_BARE: (bare, "bare")}
    if arm not in places:
        yield
        return
    port, name = places[arm]
    argv = [sys.executable, "-m", "bench.connections.slow", str(port), str(count)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            if process.stdout.readline() != b"connected\n":
                raise Died(f"the slow clients ended with {process.wait()}")
            pid = penstock.processes.pids()[name]
            penstock.processes.until(lambda: sockets_of(pid) >= count, f"{name} to hold {count} connections")
            yield
        finally:
            process.kill()


def sockets_of(pid: int) -> int:
    """How many sockets a process holds. Raises OSError."""
    held = 0
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            held += path.readlink().name.startswith("socket:")
    return held


def count_of_turns(size: RunSize) -> int:
    """Steps of both shows, for the bar."""
    return size.rounds * len(ARMS) + len(ABUSES)
