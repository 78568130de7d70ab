"""What slow and abusive connections cost, as rows and as figures that are held against their goals. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bench.connections.abuse import Cost
from bench.interval import median_interval
from bench.load.plan import Reading
from bench.report import Column, Ratio

ALONE, AT_PENSTOCK, AT_BARE = "none", "at Penstock", "at a bare server"
ARMS = (ALONE, AT_PENSTOCK, AT_BARE)
"""Where the slow connections are while Penstock is measured."""
BOUND = 1.1
MAX_MEMORY_MIB = 5.0

COLUMNS = (
    Column("what", "what"),
    Column("requests", "requests", 0),
    Column("ttft_p99", "TTFT p99 ms"),
    Column("e2e_p99", "request p99 ms"),
    Column("errors", "errors", 0),
    Column("status", "answer", 0),
    Column("memory_mib", "peak memory MiB"),
    Column("seconds", "s"),
)

Row = dict[str, object]
Readings = Mapping[str, Sequence[Reading]]
"""By arm, in the order of the rounds."""


def slow_rows(readings: Readings) -> list[Row]:
    """Each turn of each arm."""
    return [
        {
            "what": f"slow connections {arm}, turn {number}",
            "requests": reading.requests,
            "ttft_p99": reading.ttft.p99,
            "e2e_p99": reading.e2e.p99,
            "errors": reading.errors,
            "seconds": reading.seconds,
        }
        for arm in ARMS
        for number, reading in enumerate(readings[arm], 1)
    ]


def slow_goals(readings: Readings) -> list[Ratio]:
    """The 99th percentiles beside slow connections over those without; at a bare server for comparison."""
    goals = []
    for arm in (AT_PENSTOCK, AT_BARE):
        for what, name in (("TTFT", "ttft"), ("request", "e2e")):
            pairs = zip(readings[arm], readings[ALONE], strict=True)
            ratios = [getattr(slow, name).p99 / getattr(alone, name).p99 for slow, alone in pairs]
            found = median_interval(ratios)
            goals.append(
                Ratio(
                    what=f"p99 of {what}, slow connections {arm} over none",
                    value=found.median,
                    interval=(found.low, found.high),
                    at_most=BOUND if arm == AT_PENSTOCK else None,
                )
            )
    errors = sum(reading.errors for each in readings.values() for reading in each)
    return [*goals, Ratio(what="requests beside slow connections that failed", value=errors, at_most=0, digits=0)]


def abuse_rows(costs: Sequence[Cost]) -> list[Row]:
    return [
        {"what": cost.name, "status": cost.status, "memory_mib": cost.memory_mib, "seconds": cost.seconds}
        for cost in costs
    ]


def abuse_goals(costs: Sequence[Cost]) -> list[Ratio]:
    """Every one is refused with a 4xx, and none costs much memory."""
    taken = sum(not 400 <= cost.status < 500 for cost in costs)
    worst = max((cost.memory_mib for cost in costs), default=None)
    return [
        Ratio(what="abusive requests that were not answered with a 4xx", value=taken, at_most=0, digits=0),
        Ratio(what="most memory one of them cost, MiB", value=worst, at_most=MAX_MEMORY_MIB),
    ]
