"""What slow and abusive connections cost, as rows and as figures that are held against their goals. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from bench.connections.abuse import Cost
from bench.load.plan import StreamReading
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
    return [*goals, Ratio(what="requests beside slow connections that failed", value=errors, at_most=0, digits=0)]


def _over_alone(what: str, turns: Turns, arm: str, figure: Callable[[StreamReading], float], goal: str | None) -> Ratio:
    pairs = zip(turns[arm], turns[ALONE], strict=True)
    return _median_of(what, [figure(slow.reading) / figure(alone.reading) for slow, alone in pairs], goal)


def _median_of(what: str, values: Sequence[float], goal: str | None) -> Ratio:
    found = median_interval(values)
    if found.coverage < COVERAGE:
        goal = None  # too few rounds
    if not math.isfinite(found.high):
        return Ratio.held(goal, what=what, value=None)
    return Ratio.held(goal, what=what, value=found.median, interval=(found.low, found.high))


def abuse_rows(costs: Sequence[Cost]) -> list[Row]:
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


def abuse_goals(costs: Sequence[Cost]) -> list[Ratio]:
    """Every one is refused with a 4xx, and none costs much memory."""
    taken = sum(not 400 <= cost.status < 500 for cost in costs)
    worst = max((cost.memory_mib for cost in costs), default=None)
    return [
        Ratio(what="abusive requests that were not answered with a 4xx", value=taken, at_most=0, digits=0),
        Ratio.held("connections.memory", what="most memory one of them cost, MiB", value=worst),
    ]
