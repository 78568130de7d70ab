"""Plot in characters: points of one or two curves on logarithmic axes, with one of them marked."""

from __future__ import annotations

import math
from collections.abc import Sequence

WIDTH, HEIGHT = 60, 12
POINT, MARK = "*", "O"
FLAT = 1.25
"""Values whose largest is less than so many times the least are shown from zero on: they hardly differ."""


def plot(
    points: Sequence[tuple[float, float]],
    x: str,
    y: str,
    marked: tuple[float, float] | None = None,
    says: str = "",
    signs: str = "",
) -> str:
    """The points over a frame of axes, which are logarithmic; values of `y` that hardly differ are shown from zero on.

    `marked` is drawn as O, and `says` what it is. Values are above 0. `signs`: a character for each point instead of a
    star.
    """
    highest = max(py for _, py in points)
    is_flat = highest < FLAT * min(py for _, py in points)
    xs, ys = [math.log(px) for px, _ in points], [py if is_flat else math.log(py) for _, py in points]
    floor = 0.0 if is_flat else min(ys)
    grid = [[" "] * WIDTH for _ in range(HEIGHT)]
    for (px, py), lx, ly, sign in zip(points, xs, ys, signs or POINT * len(points), strict=True):
        column = round((lx - min(xs)) / ((max(xs) - min(xs)) or 1) * (WIDTH - 1))
        row = HEIGHT - 1 - round((ly - floor) / ((max(ys) - floor) or 1) * (HEIGHT - 1))
        grid[row][column] = MARK if (px, py) == marked else sign
    top, bottom = _label(highest), "0" if is_flat else _label(math.exp(floor))
    margin = max(len(top), len(bottom))
    labels = [top, *[""] * (HEIGHT - 2), bottom]
    lines = [f"{label:>{margin}} |{''.join(row).rstrip()}" for label, row in zip(labels, grid, strict=True)]
    left, right = _label(math.exp(min(xs))), _label(math.exp(max(xs)))
    axis = f"{'':{margin}} +{'-' * WIDTH}"
    ends = f"{'':{margin}}  {left}{right:>{WIDTH - len(left)}}"
    title = f"{y} over {x} ({f'{x} logarithmic' if is_flat else 'both logarithmic'})" + (
        f"; O: {says}" if marked and says else ""
    )
    return "\n".join([title, *lines, axis, ends])


def _label(value: float) -> str:
    """Four digits, or all before the point: never an exponent for a large number."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
