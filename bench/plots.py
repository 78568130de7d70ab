"""Curves and bars, each as PNG and as SVG, in one look: units on the axes, colours everybody can tell apart.

Needs matplotlib (`pip install 'penstock[bench]'`). Without it `missing` says so; tables and JSON are made all the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PLOTS = Path("docs/plots")

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
"""Okabe and Ito's, which people with any kind of colour vision can tell apart; darkest pairs first."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES = ("-", (0, (5, 2)), "-.", ":", (0, (3, 1, 1, 1)), "--")
"""Nothing is told by colour alone."""

STYLE: Mapping[str, Any] = {
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


def lines(
    stem: Path,
    title: str,
    series: Mapping[str, Points],
    *,
    x: Axis,
    y: Axis,
    marked: bool = True,
) -> list[Path]:
    """A curve for each series, with its measured points if they are `marked`.

    Returns the files written: none without matplotlib.
    """
    if missing():
        return []
    with _style() as pyplot:
        figure, axes = pyplot.subplots()
        for number, (name, points) in enumerate(series.items()):
            known = [(at, value) for at, value in points if value is not None]
            look: dict[str, Any] = {"color": COLOURS[number % len(COLOURS)]}
            look |= (
                {"marker": MARKERS[number % len(MARKERS)]} if marked else {"linestyle": DASHES[number % len(DASHES)]}
            )
            axes.plot([at for at, _ in known], [value for _, value in known], label=name, **look)
        _axes(axes, title, x, y, sorted({at for points in series.values() for at, _ in points}))
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
        written = _save(figure, stem)
        pyplot.close(figure)  # pyplot keeps every open figure
        return written


def bars(stem: Path, title: str, heights: Mapping[str, float], y: Axis) -> list[Path]:
    """A bar for each name. Returns the files written."""
    if missing():
        return []
    with _style() as pyplot:
        figure, axes = pyplot.subplots()
        axes.bar(list(heights), list(heights.values()), width=0.68, color=COLOURS[0])
        _axes(axes, title, Axis(title=""), y, ())
        axes.grid(visible=False, axis="x")
        written = _save(figure, stem)
        pyplot.close(figure)  # pyplot keeps every open figure
        return written


def _style() -> Any:
    import matplotlib  # noqa: PLC0415 - an extra, and half a second

    matplotlib.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    return _Styled(pyplot)


class _Styled:
    """pyplot within our style."""

    def __init__(self, pyplot: Any) -> None:
        self._pyplot, self._context = pyplot, pyplot.rc_context(STYLE)

    def __enter__(self) -> Any:
        self._context.__enter__()
        return self._pyplot

    def __exit__(self, *error: object) -> None:
        self._context.__exit__(*error)


def _axes(axes: Axes, title: str, x: Axis, y: Axis, ticks: Iterable[float]) -> None:
    axes.set_title(title, pad=12)
    axes.set_xlabel(x.title)
    axes.set_ylabel(y.title)
    if x.log:
        axes.set_xscale("log", base=2)
        places = list(ticks)
        axes.set_xticks(places, [f"{place:g}" for place in places])
        axes.minorticks_off()
    if y.log:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
    else:
        axes.set_ylim(bottom=0)


def _save(figure: Figure, stem: Path) -> list[Path]:
    stem.parent.mkdir(parents=True, exist_ok=True)
    written = [stem.with_suffix(".png"), stem.with_suffix(".svg")]
    for path in written:
        # Without a date the same figures make the same file.
        metadata = {"Date": None} if path.suffix == ".svg" else {}
        figure.savefig(path, bbox_inches="tight", metadata=metadata)
    return written
