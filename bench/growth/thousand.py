"""On paper: what a thousand machines would need, from the measured unit costs. Pure; nothing of it was ever run.

A machine runs one worker whose engine always has all its slots full. The streams of a worker are spread evenly over the
API processes that share its Redis, so each of its steps becomes one frame for nearly each of them.
"""

from __future__ import annotations

import math

import msgspec

from bench.growth.figures import UnitCosts


class AssumedLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What is assumed."""

    machines: int = 1000
    slots: int = 256
    step_ms: float = 15.0
    tokens: int = 256
    """Of an answer."""
    busy: float = 0.6
    """How far a core may be used."""

    @property
    def steps_per_s(self) -> float:
        """Of one machine."""
        return 1000 / self.step_ms

    @property
    def tokens_per_s(self) -> float:
        """Of one machine."""
        return self.slots * self.steps_per_s

    @property
    def requests_per_s(self) -> float:
        """Of one machine."""
        return self.tokens_per_s / self.tokens


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """Machines that share one Redis primary, and the API processes they need."""

    machines: int
    apis: int
    redis_busy: float
    """Share of the primary's core."""
    api_busy: float


def api_cores(costs: UnitCosts, load: AssumedLoad) -> float:
    """Cores' worth of API work that one machine makes."""
    return (load.tokens_per_s * costs.api_token + load.requests_per_s * costs.api_request) / 1e6


def frames(apis: int, streams: int) -> float:
    """API processes (or partitions) that a step's tokens go to, on average: streams fall on them evenly, at random."""
    return apis * (1 - (1 - 1 / apis) ** streams)


def redis_cores(costs: UnitCosts, load: AssumedLoad, apis: int) -> float:
    """A Redis core's worth of work that one machine makes, with so many API processes beside it."""
    step = costs.redis_step + load.slots * costs.redis_token + frames(apis, load.slots) * costs.redis_frame
    return (load.steps_per_s * step + load.requests_per_s * costs.redis_request) / 1e6


def cell(costs: UnitCosts, load: AssumedLoad) -> Cell:
    """The largest number of machines that one Redis primary bears. Raises ValueError when it does not bear one."""
    found = None
    for machines in range(1, load.machines + 1):
        work = machines * api_cores(costs, load)
        apis = max(1, math.ceil(work / load.busy))
        redis = machines * redis_cores(costs, load, apis)
        if redis > load.busy:
            break
        found = Cell(machines=machines, apis=apis, redis_busy=redis, api_busy=work / apis)
    if found is None:
        raise ValueError("one Redis primary does not bear one such machine")
    return found


def as_markdown(costs: UnitCosts, load: AssumedLoad) -> str:
    """The unit costs, and what follows from them."""
    one = cell(costs, load)
    cells = math.ceil(load.machines / one.machines)
    # In one cluster, the same number of primaries: every worker writes to every partition it has jobs of, and a plain
    # PUBLISH goes to every node.
    partitions = frames(cells, load.slots)
    spread = redis_cores(costs, load, one.apis * cells) + load.steps_per_s * (partitions - 1) * costs.redis_step / 1e6
    unit = [
        ("API, a request", costs.api_request),
        ("API, a token", costs.api_token),
        ("Redis, a request", costs.redis_request),
        ("Redis, an engine step of a worker in one partition", costs.redis_step),
        ("Redis, a token in it", costs.redis_token),
        ("Redis, each API process it goes to", costs.redis_frame),
        ("worker, a token (with the simulated engine)", costs.worker_token),
    ]
    needs = [
        ("assumed of a machine", f"{load.slots} streams, {load.step_ms:g} ms steps, {load.tokens} tokens an answer"),
        ("its tokens and requests per second", f"{load.tokens_per_s:,.0f}, {load.requests_per_s:,.1f}"),
        ("machines that one Redis primary bears", f"{one.machines:,}"),
        ("API processes beside them", f"{one.apis:,}"),
        (f"cores of Redis and API used, at most {load.busy:.0%}", f"{one.redis_busy:.0%} and {one.api_busy:.0%}"),
        (f"for {load.machines:,} machines: cells, each with its own Redis primary and partition", f"{cells:,}"),
        ("API processes in all", f"{cells * one.apis:,}"),
        ("cores for API and Redis in all, replicas aside", f"{cells * (one.apis + 1):,}"),
        (
            "the same as one deployment on a cluster: Redis work of a machine, times that in a cell",
            f"{spread / redis_cores(costs, load, one.apis):.1f}",
        ),
    ]
    lines = ["| unit cost | CPU us |", "| --- | ---: |"]
    lines += [f"| {what} | {value:.1f} |" for what, value in unit]
    lines += ["", "| on paper | |", "| --- | ---: |"]
    lines += [f"| {what} | {value} |" for what, value in needs]
    return "\n".join(lines)
