"""Snapshot of one model's lanes and workers at one moment, its pool shapes, and the limits of its scaling.

Counters (`added`, `served`, `steps`...) only grow; the policy derives rates from two snapshots.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import TypeAlias

from streaming.fleet.process import Process
from streaming.order import LaneDepth, WaitingDeadline


@dataclass(frozen=True)
class Snapshot:
    """One model's lanes and workers at one moment."""

    model: str
    lanes: tuple[LaneDepth, ...] = ()
    """Highest first."""
    workers: tuple[Process, ...] = ()
    """As each last reported itself."""
    elsewhere: int = 0
    """Jobs that workers of the model's other shapes have reported."""
    due: tuple[WaitingDeadline, ...] = ()
    """The nearest deadlines."""

    @cached_property
    def waiting(self) -> int:
        return sum(lane.waiting for lane in self.lanes)

    @cached_property
    def running(self) -> int:
        return sum(lane.running for lane in self.lanes)

    @cached_property
    def oldest_s(self) -> float:
        return max((lane.oldest_s for lane in self.lanes), default=0.0)

    @cached_property
    def ready(self) -> tuple[Process, ...]:
        """Workers that take jobs; draining ones do not count."""
        return tuple(worker for worker in self.workers if worker.state == "ready")

    @cached_property
    def away(self) -> tuple[str, ...]:
        """The servers that all ready workers wait for; none if one of them can take jobs, or if none is ready."""
        ready = self.ready
        return ready[0].away if ready and all(worker.away for worker in ready) else ()

    @cached_property
    def starting(self) -> int:
        return sum(worker.state == "starting" for worker in self.workers)


LOAD_WINDOW_S = 2.0
"""Time constant of the smoothed number of concurrent jobs."""
RETURN_SHARE = 0.8
"""Hysteresis: jobs return to the smaller shape below this share of its threshold."""
MIN_DWELL_S = 5.0
"""Seconds between two switches of the shape."""

Curve: TypeAlias = Sequence[tuple[float, float]]
"""Measured (concurrent jobs, throughput), by rising jobs; the unit of throughput must be the same for all shapes."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One pool of a model. Shapes are ordered by the load that they serve best: few replicas over many GPUs each serve
    few concurrent jobs best, many small replicas serve many."""

    name: str
    upto: float = math.inf
    """Threshold: from this many concurrent jobs on the next shape is better."""


@dataclass(frozen=True, slots=True)
class ShapeChoice:
    """The shape that new jobs should go to."""

    shape: str
    load: float
    """Concurrent jobs, smoothed."""
    at: float
    since: float
    """Time of the last switch."""


def threshold(few: Curve, many: Curve) -> float:
    """The number of jobs from which on `many` is never slower than `few`; infinite if it is at the end of the sweep.

    c* = min{c : many(c') >= few(c') for all measured c' >= c}, with straight lines between measured points; 1 if `many`
    is never behind. After ScaleLLM's router, whose threshold is fixed. Raises ValueError if the sweeps have no point.
    """
    if not few or not many:
        raise ValueError("a sweep has no point")
    places = sorted({jobs for jobs, _ in (*few, *many)})
    ahead = [throughput(many, jobs) - throughput(few, jobs) for jobs in places]
    behind = [number for number, more in enumerate(ahead) if more < 0]
    if not behind:
        return 1.0
    last = behind[-1]
    if last == len(places) - 1:
        return math.inf
    # The lines cross between the last point where it is slower and the next one.
    share = -ahead[last] / (ahead[last + 1] - ahead[last])
    return places[last] + share * (places[last + 1] - places[last])


def throughput(curve: Curve, jobs: float) -> float:
    """Throughput by linear interpolation; constant above the last point, proportional to jobs below the first."""
    if jobs <= curve[0][0]:
        return curve[0][1] * jobs / curve[0][0]
    for (c1, t1), (c2, t2) in pairwise(curve):
        if jobs <= c2:
            return t1 + (t2 - t1) * (jobs - c1) / (c2 - c1)
    return curve[-1][1]


def calibrated(sweeps: Sequence[tuple[str, Curve]]) -> tuple[Shape, ...]:
    """Shapes with their thresholds, computed from the curve of each; `sweeps` is ordered by load."""
    thresholds = [threshold(few, many) for (_, few), (_, many) in pairwise(sweeps)]
    return tuple(Shape(name, upto) for (name, _), upto in zip(sweeps, [*thresholds, math.inf], strict=True))


def route(before: ShapeChoice | None, shapes: Sequence[Shape], jobs: float, now: float) -> ShapeChoice:
    """Choose the shape for new jobs at `now`, with `jobs` running or waiting."""
    if before is None:
        return ShapeChoice(_fitting(shapes, jobs).name, jobs, now, now)
    load = before.load + (1 - math.exp(-(now - before.at) / LOAD_WINDOW_S)) * (jobs - before.load)
    stay = ShapeChoice(before.shape, load, now, before.since)
    place = next((number for number, shape in enumerate(shapes) if shape.name == before.shape), None)
    if place is None:  # the shapes are not those of before
        return ShapeChoice(_fitting(shapes, load).name, load, now, now)
    if now - before.since < MIN_DWELL_S:
        return stay
    back = shapes[place - 1].upto * RETURN_SHARE if place else -math.inf
    if load >= shapes[place].upto or load < back:
        return ShapeChoice(_fitting(shapes, load).name, load, now, now)
    return stay


def takers(
    names: Sequence[str], aim: str, before: Sequence[str], ready: Mapping[str, int], wanted: int
) -> tuple[str, ...]:
    """The shapes that take new jobs during a switch to `aim`, which wants `wanted` workers.

    The shapes in `before` keep taking jobs, beside the ready workers of `aim`, until `aim` has the workers it wants.
    Then `aim` alone takes them, while it has a ready worker. If any worker is ready, the result names a ready shape.
    """
    if ready.get(aim) and (tuple(before) == (aim,) or ready[aim] >= wanted):
        return (aim,)
    there = tuple(name for name in names if ready.get(name))
    return tuple(name for name in there if name == aim or name in before) or there or (aim,)


def _fitting(shapes: Sequence[Shape], jobs: float) -> Shape:
    return next((shape for shape in shapes if jobs < shape.upto), shapes[-1])


TARGETS: Mapping[str, float] = {"interactive": 2.0, "standard": 30.0, "batch": 3600.0}
"""Seconds a job of each lane may wait before it is begun."""


@dataclass(frozen=True, slots=True)
class ScalingLimits:
    """See [scheduler] and [models.<name>] in docs/configuration.md."""

    min: int = 1
    max: int = 1
    targets: Mapping[str, float] = field(default_factory=lambda: TARGETS)
    """Queue-time targets in seconds by lane; a lane that is missing has no target."""
    idle_s: float = 60.0
    """How long a worker must have been unneeded, at least, before it is removed."""
    sleep_s: float = 300.0
    """How long there must have been no job before the last worker is removed; only with min 0."""
    cold_start_s: float = 10.0
    """Assumed time from the decision to add a worker until it is ready; used until it has been measured."""
    cover: float = 0.99
    """Share of recent bursts that the pool should have met in time."""
    cost: float = 0.0
    """Cost of one worker for an hour, in any unit."""
    budget: float | None = None
    """Maximum cost of all workers for an hour."""
    pinned: int | None = None
    """Manual override of the number of workers."""
    paused: bool = False
    """Keep the current number of workers."""
    shapes: tuple[Shape, ...] = ()
    """The model's pools, by rising load, if it has several."""
    pools: Mapping[str, ScalingLimits] = field(default_factory=dict)
    """The limits of each of these pools."""

    @property
    def ceiling(self) -> int:
        """The maximum, reduced to what the budget pays for."""
        if self.budget is None or not self.cost:
            return self.max
        return min(self.max, int(self.budget / self.cost))

    def clamp(self, workers: int) -> int:
        """The nearest allowed number; the budget takes precedence over the minimum."""
        return min(max(self.min, workers), self.ceiling)
