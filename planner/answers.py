"""Answers of plans: their tables, figures with three digits and a unit, a plot of points, and their inputs for JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from planner.load import PlanInput

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PlanTable:
    """A table of a plan; its header names the units."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""

    @classmethod
    def of(cls, items: Iterable[T], columns: Mapping[str, Callable[[T], str]], title: str = "") -> PlanTable:
        """A row for each item; `columns`: what each column says of it."""
        return cls(list(columns), [[say(item) for say in columns.values()] for item in items], title)


@dataclass(frozen=True, slots=True)
class PlanAnswer:
    """What a plan has found."""

    value: Mapping[str, Any]
    """For --json; `advice` is added."""
    tables: Sequence[PlanTable]
    advice: str
    """A sentence with its reason."""
    plot: str = ""
    notes: Sequence[str] = ()
    exit_code: int = 0


TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))


def seconds(value: float) -> str:
    """A duration: 1.23 s, 12.3 ms, 123 us."""
    size, unit = next(((size, unit) for size, unit in TIMES if value >= size), TIMES[-1])
    return f"{three(value / size)} {unit}"


def known(form: Callable[[float], str], value: float | None) -> str:
    """A value in its form, or a dash where it is not known."""
    return "-" if value is None else form(value)


def gb(size: float) -> str:
    """Bytes as GB of 1e9: 1.2, 123."""
    return three(size / 1e9)


def three(value: float) -> str:
    """A number with three digits, or all before the point."""
    if value == 0:
        return "0"
    whole = len(f"{abs(value):.0f}") if abs(value) >= 1 else 0
    return f"{value:,.{max(0, 3 - whole)}f}" if abs(value) >= 0.01 else f"{value:.2g}"


def inputs_of(given: PlanInput, *names: str, **more: object) -> dict[str, Any]:
    """The model, device, lengths and bits of a plan, for JSON, and others of its inputs; `names`: of its fields."""
    model, device = given.model, given.device
    return {
        "model": model.name,
        "model_source": model.source,
        "model_checked": model.checked or None,
        "parameters": model.weights,
        "gpu": device.name,
        "gpu_source": device.source,
        "gpu_checked": device.checked or None,
        "in": given.lengths.prompt,
        "out": given.lengths.answer,
        **{f"{name}_bits": bits for name, bits in asdict(given.precision).items()},
        **{name: getattr(given, name) for name in names},
        **more,
    }


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
    for point, lx, ly, sign in zip(points, xs, ys, signs or POINT * len(points), strict=True):
        column = round((lx - min(xs)) / ((max(xs) - min(xs)) or 1) * (WIDTH - 1))
        row = HEIGHT - 1 - round((ly - floor) / ((max(ys) - floor) or 1) * (HEIGHT - 1))
        grid[row][column] = MARK if point == marked else sign
    top, bottom = _label(highest), "0" if is_flat else _label(math.exp(floor))
    margin = max(len(top), len(bottom))
    labels = [top, *[""] * (HEIGHT - 2), bottom]
    left, right = _label(math.exp(min(xs))), _label(math.exp(max(xs)))
    title = f"{y} over {x} ({f'{x} logarithmic' if is_flat else 'both logarithmic'})"
    return "\n".join([
        title + (f"; O: {says}" if marked and says else ""),
        *(f"{label:>{margin}} |{''.join(row).rstrip()}" for label, row in zip(labels, grid, strict=True)),
        f"{'':{margin}} +{'-' * WIDTH}",
        f"{'':{margin}}  {left}{right:>{WIDTH - len(left)}}",
    ])  # fmt: skip


def _label(value: float) -> str:
    """Four digits, or all before the point: never an exponent for a large number."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
