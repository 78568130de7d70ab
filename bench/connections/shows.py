"""The two shows, with real processes: a normal load beside slow connections, and abusive requests one at a time."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from bench.connections.abuse import ABUSES, Cost, try_abuse
from bench.connections.figures import ARMS, AT_BARE, AT_PENSTOCK
from bench.gateway.stage import Stage
from bench.load.child import measure
from bench.load.plan import Plan, Reading
from bench.penstock import MODEL, Penstock
from bench.processes import Died, free_port


@dataclass(frozen=True, slots=True)
class Size:
    """How much there is of everything."""

    slow: int
    rounds: int
    streams: int
    requests: int
    tokens: int
    step_ms: float


FULL = Size(slow=1000, rounds=9, streams=16, requests=1600, tokens=32, step_ms=5)
QUICK = Size(slow=60, rounds=1, streams=4, requests=40, tokens=8, step_ms=2)


def turns(number: int) -> tuple[str, ...]:
    """The arms of round `number` (from 0), forwards and backwards in turn, against a steady drift of the machine."""
    return ARMS if number % 2 == 0 else tuple(reversed(ARMS))


def beside_slow(stage: Stage, size: Size) -> dict[str, list[Reading]]:
    """The same load with and without slow connections, interleaved. Raises Died, LoadFailed."""
    settings = {"sim.step_ms": size.step_ms, "sim.slots": 2 * size.streams}
    readings: dict[str, list[Reading]] = {arm: [] for arm in ARMS}
    folder = stage.folder / "slow"
    folder.mkdir()
    with Penstock(folder, settings=settings) as penstock:
        bare = free_port()
        penstock.processes.start("control", [sys.executable, "-m", "bench.recovery.control", str(bare)])
        penstock.processes.wait_port(bare)
        plan = Plan(
            port=penstock.port,
            model=MODEL,
            streams=size.streams,
            requests=size.requests,
            tokens=size.tokens,
        )
        measure(plan)  # what is only done once is done now
        for number in range(size.rounds):
            for arm in turns(number):
                stage.say(f"round {number + 1}/{size.rounds}: slow connections {arm}")
                with _crowd({AT_PENSTOCK: penstock.port, AT_BARE: bare}.get(arm), size.slow):
                    readings[arm].append(measure(plan))
                penstock.processes.check()
                stage.done()
    return readings


def abused(stage: Stage) -> list[Cost]:
    """Each at a process of its own that has served before. Raises Died."""
    costs = []
    for number, abuse in enumerate(ABUSES, 1):
        stage.say(abuse.name)
        folder = stage.folder / f"abuse-{number}"
        folder.mkdir()
        with Penstock(folder) as penstock:
            measure(Plan(port=penstock.port, model=MODEL, streams=4, requests=40, tokens=8))
            costs.append(try_abuse(abuse, penstock.port, penstock.processes.pids()["api-1"]))
            penstock.processes.check()
        stage.done()
    return costs


@contextmanager
def _crowd(port: int | None, count: int) -> Iterator[None]:
    """So many slow connections to that port; none without a port. Raises Died."""
    if port is None:
        yield
        return
    argv = [sys.executable, "-m", "bench.connections.slow", str(port), str(count)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            if process.stdout.readline() != b"connected\n":
                raise Died(f"the slow clients ended with {process.wait()}")
            yield
        finally:
            process.kill()


def count_of_turns(size: Size) -> int:
    """Steps of both shows, for the bar."""
    return size.rounds * len(ARMS) + len(ABUSES)
