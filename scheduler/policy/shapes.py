"""Shape router: chooses by load which of a model's pools takes new jobs; pools differ in GPUs per replica (shape).

Few replicas over many GPUs each serve few concurrent jobs best, many small replicas serve many. After ScaleLLM's
router, whose threshold is 64 jobs although its own measurements cross at 16 and at 128: here the threshold is computed
from measurements of the very pools.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

LOAD_WINDOW_S = 2.0
"""Time constant of the smoothed number of concurrent jobs."""
RETURN_SHARE = 0.8
"""Hysteresis: jobs return to the smaller shape below this share of its threshold."""
MIN_DWELL_S = 5.0
"""Between two switches."""

Curve: TypeAlias = Sequence[tuple[float, float]]
"""Measured (concurrent jobs, throughput), by rising jobs; the unit of throughput must be the same for all shapes."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One pool of a model. Shapes are ordered by the load that they serve best."""

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
    is never behind. Raises ValueError if the sweeps have no point.
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
