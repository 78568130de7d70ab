"""Curves and bars, each as PNG and as SVG, in one look: units on the axes, colours everybody can tell apart.

Needs matplotlib (`pip install 'penstock[bench]'`). Without it `missing` says so; tables and JSON are made all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PLOTS = Path("docs/plots")

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
"""Okabe and Ito's, which people with any kind of colour vision can tell apart; darkest pairs first."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES = ("-", (0, (5, 2)), "-.", ":", (0, (3, 1, 1, 1)), "--")
"""Nothing is told by colour alone."""

STYLE: Any = {
    "figure.figsize": (8.0, 4.8),
    "figure.dpi": 120,
    "font.size": 10.5,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#d9d9d9",
    "grid.linewidth": 0.7,
    "lines.linewidth": 1.8,
    "lines.markersize": 5.5,
    "legend.frameon": False,
    "svg.hashsalt": "penstock",
    "svg.fonttype": "none",
}

Points = Sequence[tuple[float, float | None]]
"""x and y; None where there is no figure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """What stands along an axis, with its unit."""

    title: str
    log: bool = False


def missing() -> str:
    """Why there can be no plots here; "" if there can."""
    return "" if find_spec("matplotlib") else "no plots: they need matplotlib (pip install 'penstock[bench]')"


def lines(stem: Path, title: str, series: Mapping[str, Points], *, x: Axis, y: Axis, marked: bool = True) -> list[Path]:
    """A curve for each series, with its measured points if they are `marked`.

    Returns the files written: none without matplotlib.
    """

    def draw(axes: Axes) -> None:
        for number, (name, points) in enumerate(series.items()):
            known = [(at, value) for at, value in points if value is not None]
            kind, looks = ("marker", MARKERS) if marked else ("linestyle", DASHES)
            look: dict[str, Any] = {"color": COLOURS[number % len(COLOURS)], kind: looks[number % len(looks)]}
            axes.plot([at for at, _ in known], [value for _, value in known], label=name, **look)
        if x.log:
            places = sorted({at for points in series.values() for at, _ in points})
            axes.set_xscale("log", base=2)
            axes.set_xticks(places, [f"{place:g}" for place in places])
            axes.minorticks_off()
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))

    return _drawn(stem, title, x, y, draw)


def bars(stem: Path, title: str, heights: Mapping[str, float], y: Axis) -> list[Path]:
    """A bar for each name. Returns the files written."""

    def draw(axes: Axes) -> None:
        axes.bar(list(heights), list(heights.values()), width=0.68, color=COLOURS[0])
        axes.grid(visible=False, axis="x")

    return _drawn(stem, title, Axis(title=""), y, draw)


def _drawn(stem: Path, title: str, x: Axis, y: Axis, draw: Callable[[Axes], None]) -> list[Path]:
    if missing():
        return []
    from matplotlib import rc_context  # noqa: PLC0415 - an extra, and half a second
    from matplotlib.figure import Figure  # noqa: PLC0415

    stem.parent.mkdir(parents=True, exist_ok=True)
    with rc_context(STYLE):
        figure = Figure()
        axes = figure.subplots()
        draw(axes)
        axes.set_title(title, pad=12)
        axes.set(xlabel=x.title, ylabel=y.title)
        if y.log:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")
        else:
            axes.set_ylim(bottom=0)
        figure.savefig(stem.with_suffix(".png"), bbox_inches="tight")
        # Without a date the same figures make the same file.
        figure.savefig(stem.with_suffix(".svg"), bbox_inches="tight", metadata={"Date": None})
    return [stem.with_suffix(".png"), stem.with_suffix(".svg")]
