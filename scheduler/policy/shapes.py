"""Pools of different shape for one model: few replicas spread over many GPUs for few jobs at once, many small replicas
for many. Which of them new jobs go to, and from how many jobs on.

After ScaleLLM's router. Its threshold is 64 jobs, though its own measurements cross at 16 and at 128: here it is read
from a sweep of the very pools.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

LOAD_S = 2.0
"""Time constant of the number of jobs at once."""
BACK = 0.8
"""Share of a threshold below which jobs go back to the smaller shape."""
DWELL_S = 5.0
"""Between two switches, at the least."""

Curve: TypeAlias = Sequence[tuple[float, float]]
"""(jobs at once, throughput) as measured, in any unit but the same for all shapes; by rising jobs."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One pool of a model; they are kept in the order of the load they are for."""

    name: str
    upto: float = math.inf
    """Jobs at once from which on the next shape is better."""


@dataclass(frozen=True, slots=True)
class ShapeChoice:
    """Where new jobs go."""

    shape: str
    load: float
    """Jobs at once, smoothed."""
    at: float
    since: float
    """When the last switch was."""


def threshold(few: Curve, many: Curve) -> float:
    """The number of jobs from which on `many` is never behind `few`; infinite if it always is, at the end of the sweep.

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
    # Between the last place where it is behind and the next one the lines cross.
    share = -ahead[last] / (ahead[last + 1] - ahead[last])
    return places[last] + share * (places[last + 1] - places[last])


def throughput(curve: Curve, jobs: float) -> float:
    """On the line between the measured neighbours; above the last as there, below the first in proportion to jobs."""
    if jobs <= curve[0][0]:
        return curve[0][1] * jobs / curve[0][0]
    for (c1, t1), (c2, t2) in pairwise(curve):
        if jobs <= c2:
            return t1 + (t2 - t1) * (jobs - c1) / (c2 - c1)
    return curve[-1][1]


def calibrated(sweeps: Sequence[tuple[str, Curve]]) -> tuple[Shape, ...]:
    """Shapes with their thresholds, from the sweep of each; given in the order of the load they are for."""
    thresholds = [threshold(few, many) for (_, few), (_, many) in pairwise(sweeps)]
    return tuple(Shape(name, upto) for (name, _), upto in zip(sweeps, [*thresholds, math.inf], strict=True))


def route(before: ShapeChoice | None, shapes: Sequence[Shape], jobs: float, now: float) -> ShapeChoice:
    """Where new jobs go at `now`, with `jobs` running or waiting."""
    if before is None:
        return ShapeChoice(_fitting(shapes, jobs).name, jobs, now, now)
    load = before.load + (1 - math.exp(-(now - before.at) / LOAD_S)) * (jobs - before.load)
    stay = ShapeChoice(before.shape, load, now, before.since)
    place = next((number for number, shape in enumerate(shapes) if shape.name == before.shape), None)
    if place is None:  # the shapes are not those of before
        return ShapeChoice(_fitting(shapes, load).name, load, now, now)
    if now - before.since < DWELL_S:
        return stay
    back = shapes[place - 1].upto * BACK if place else -math.inf
    if load >= shapes[place].upto or load < back:
        return ShapeChoice(_fitting(shapes, load).name, load, now, now)
    return stay


def takers(
    names: Sequence[str], aim: str, before: Sequence[str], ready: Mapping[str, int], wanted: int
) -> tuple[str, ...]:
    """The shapes that take new jobs, when they should go to `aim`, which wants so many workers.

    Those that took them `before` go on until `aim` has the workers it wants; what it has meanwhile takes them too. Then
    it alone does, as long as it has one that is ready. While any worker is ready, one of a shape named here is.
    """
    if ready.get(aim) and (tuple(before) == (aim,) or ready[aim] >= wanted):
        return (aim,)
    there = tuple(name for name in names if ready.get(name))
    return tuple(name for name in there if name == aim or name in before) or there or (aim,)


def _fitting(shapes: Sequence[Shape], jobs: float) -> Shape:
    return next((shape for shape in shapes if jobs < shape.upto), shapes[-1])
