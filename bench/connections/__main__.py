"""`python -m bench.connections`: a normal load beside 1,000 slow or silent connections, and requests no server should
take.

How much later the others' answers come, how long the API process stands still when many connections expire at once, and
what each abusive request is answered and costs the process in memory.
"""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from bench import program
from bench.connections.abuse import ABUSES, AbuseCost, try_abuse
from bench.load.plan import LoadFailed, LoadPlan, StreamReading, measure
from bench.penstock import MODEL, Penstock
from bench.processes import Died
from bench.program import OUT, BenchProgram, Option, ProgramRun, Testbed
from bench.recovery.probe import Probe
from bench.report import Ratio, columns
from bench.stats import COVERAGE, finite, median_interval

ALONE, AT_PENSTOCK, AT_BARE = "none", "at Penstock", "at a bare server"
ARMS = (ALONE, AT_PENSTOCK, AT_BARE)
"""Where the slow connections are while Penstock is measured."""

COLUMNS = columns("""
    what: what; held: sockets of the API process .0; requests: requests .0; ttft_p99: TTFT p99 ms;
    e2e_p99: request p99 ms; e2e_most: longest ms; hold_up_ms: API process held up, ms; control_ms: bare server, ms;
    own_ms: API process's own, ms; errors: errors .0; status: answer .0; code: error; memory_mib: peak memory MiB;
    seconds: s
""")

Row = dict[str, object]


@dataclass(frozen=True, slots=True)
class ConnectionReading:
    """One reading of an arm. Waits are those of a small question that is asked all the time, the longest each; infinity
    where it had no answer."""

    reading: StreamReading
    held: int
    """Sockets of the API process when it began."""
    api_ms: float
    control_ms: float
    """Of a bare server beside it, which has no other connections."""
    own_ms: float
    """Of the API process, less what the bare server waited at that moment."""


Turns = Mapping[str, Sequence[ConnectionReading]]
"""By arm, in the order of the rounds."""


def slow_rows(turns: Turns) -> list[Row]:
    """Each turn of each arm."""
    return [
        {
            "what": f"slow connections {arm}, turn {number}",
            "held": turn.held,
            "requests": turn.reading.requests,
            "ttft_p99": turn.reading.ttft.p99,
            "e2e_p99": turn.reading.e2e.p99,
            "e2e_most": turn.reading.e2e.most,
            "hold_up_ms": finite(turn.api_ms),
            "control_ms": finite(turn.control_ms),
            "own_ms": finite(turn.own_ms),
            "errors": turn.reading.errors,
            "seconds": turn.reading.seconds,
        }
        for arm in ARMS
        for number, turn in enumerate(turns[arm], 1)
    ]


def slow_goals(turns: Turns) -> list[Ratio]:
    """The 99th percentiles beside slow connections over those without, how much longer the longest request takes, and
    how long the API process stands still; at a bare server for comparison. With too few rounds for an interval they are
    not judged."""
    goals = []
    for arm in (AT_PENSTOCK, AT_BARE):
        slowed, held_up = ("connections.slowed", "connections.held_up") if arm == AT_PENSTOCK else (None, None)
        where = f"slow connections {arm}"
        goals += [
            _over_alone(f"p99 of TTFT, {where} over none", turns, arm, lambda reading: reading.ttft.p99, slowed),
            _over_alone(f"p99 of request, {where} over none", turns, arm, lambda reading: reading.e2e.p99, slowed),
            _over_alone(f"longest request, {where} over none", turns, arm, lambda reading: reading.e2e.most, None),
            _median_of(f"API process held up, {where}, ms", [turn.own_ms for turn in turns[arm]], held_up),
        ]
    errors = sum(turn.reading.errors for each in turns.values() for turn in each)
    return [*goals, Ratio.none("requests beside slow connections that failed", errors)]


def _over_alone(what: str, turns: Turns, arm: str, figure: Callable[[StreamReading], float], goal: str | None) -> Ratio:
    pairs = zip(turns[arm], turns[ALONE], strict=True)
    return _median_of(what, [figure(slow.reading) / figure(alone.reading) for slow, alone in pairs], goal)


def _median_of(what: str, values: Sequence[float], goal: str | None) -> Ratio:
    found = median_interval(values)
    if found.coverage < COVERAGE:
        goal = None  # too few rounds
    if not math.isfinite(found.high):
        return Ratio.held(goal, what, None)
    return Ratio.held(goal, what, found.median, interval=(found.low, found.high))


def abuse_rows(costs: Sequence[AbuseCost]) -> list[Row]:
    return [
        {
            "what": cost.name,
            "status": cost.status,
            "code": cost.code,
            "memory_mib": cost.memory_mib,
            "seconds": cost.seconds,
        }
        for cost in costs
    ]


def abuse_goals(costs: Sequence[AbuseCost]) -> list[Ratio]:
    """Every one is refused with a 4xx, and none costs much memory."""
    taken = sum(not 400 <= cost.status < 500 for cost in costs)
    worst = max((cost.memory_mib for cost in costs), default=None)
    return [
        Ratio.none("abusive requests that were not answered with a 4xx", taken),
        Ratio.held("connections.memory", "most memory one of them cost, MiB", worst),
    ]


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


def abused(stage: Testbed) -> list[AbuseCost]:
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


NAME = "connections"
SHOWS = ("slow", "refused")


def _run(run: ProgramRun) -> int:
    names = run.args.shows.split(",")
    program.check_names("show", names, SHOWS)
    size = QUICK if run.args.quick else FULL
    rows: list[Row] = []
    goals: list[Ratio] = []
    with Testbed(run.console, "starting", count_of_turns(size)) as stage:
        if "slow" in names:
            readings = beside_slow(stage, size)
            rows += slow_rows(readings)
            goals += slow_goals(readings)
        if "refused" in names:
            costs = abused(stage)
            rows += abuse_rows(costs)
            goals += abuse_goals(costs)
    found = run.result(
        NAME,
        "What slow and abusive connections cost the others",
        COLUMNS,
        rows,
        goals,
        (
            "A third of the slow connections sends nothing, a third a head and a third a body at a byte a second; one "
            "that is closed connects again. At a bare server they cost this machine the same and Penstock nothing.",
            "Judged are medians over the rounds with their intervals: 99th percentiles, and the longest time that the "
            "API process held everybody up, asked for every 5 ms, less what a bare server beside it took at that "
            "moment.",
            "Memory is the peak of the API process's resident set beyond what it had before that request.",
        ),
        **asdict(size),
    )
    return int(run.keep(found).missed)


main = BenchProgram("penstock bench connections", __doc__, _run, Died, LoadFailed, OSError).taking(
    Option("--shows", default=",".join(SHOWS), help=f"of {', '.join(SHOWS)} (default: all)"),
    Option("--quick", action="store_true", help="few connections, one round"),
    OUT,
)

if __name__ == "__main__":
    main.exit()
