"""Plot in characters: points of one or two curves on logarithmic axes, with one of them marked."""

from __future__ import annotations

import math
from collections.abc import Sequence

WIDTH, HEIGHT = 60, 12
POINT, MARK = "*", "O"


def plot(
    points: Sequence[tuple[float, float]],
    x: str,
    y: str,
    marked: tuple[float, float] | None = None,
    says: str = "",
    signs: str = "",
) -> str:
    """The points over a frame of axes; `marked` is drawn as O, and `says` what it is. Values are above 0. `signs`: a
    character for each point instead of a star."""
    xs, ys = [math.log(px) for px, _ in points], [math.log(py) for _, py in points]
    grid = [[" "] * WIDTH for _ in range(HEIGHT)]
    for (px, py), lx, ly, sign in zip(points, xs, ys, signs or POINT * len(points), strict=True):
        column = round((lx - min(xs)) / ((max(xs) - min(xs)) or 1) * (WIDTH - 1))
        row = HEIGHT - 1 - round((ly - min(ys)) / ((max(ys) - min(ys)) or 1) * (HEIGHT - 1))
        grid[row][column] = MARK if (px, py) == marked else sign
    top, bottom = f"{math.exp(max(ys)):,.4g}", f"{math.exp(min(ys)):,.4g}"
    margin = max(len(top), len(bottom))
    labels = [top, *[""] * (HEIGHT - 2), bottom]
    lines = [f"{label:>{margin}} |{''.join(row).rstrip()}" for label, row in zip(labels, grid, strict=True)]
    left, right = f"{math.exp(min(xs)):,.4g}", f"{math.exp(max(xs)):,.4g}"
    axis = f"{'':{margin}} +{'-' * WIDTH}"
    ends = f"{'':{margin}}  {left}{right:>{WIDTH - len(left)}}"
    title = f"{y} over {x} (both logarithmic)" + (f"; O: {says}" if marked and says else "")
    return "\n".join([title, *lines, axis, ends])
