"""Plots are files that open, the same for the same figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import plots
from bench.breakdown.__main__ import draw as draw_breakdown
from bench.elastic.day import draw as draw_elastic_day
from bench.frontier.__main__ import draw as draw_frontier
from bench.gateway.sweep import draw as draw_gateway
from bench.gpu.__main__ import draw as draw_gpu
from bench.gpu.served_figures import draw as draw_gpu_served
from bench.growth.__main__ import draw as draw_growth
from bench.jobs.__main__ import draw as draw_jobs
from bench.order.gate import draw as draw_order_gate
from bench.order.replay import draw as draw_order_replay
from bench.plots import Axis
from bench.report import load
from bench.scale.__main__ import draw as draw_scale
from bench.table1.__main__ import draw as draw_table1

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
DRAWS = {
    "gateway": draw_gateway,
    "jobs": draw_jobs,
    "breakdown": draw_breakdown,
    "elastic-day": draw_elastic_day,
    "frontier": draw_frontier,
    "gpu-frontier": draw_gpu,
    "gpu-served": draw_gpu_served,
    "growth": draw_growth,
    "table1": draw_table1,
    "order-gate": draw_order_gate,
    "order-replay": draw_order_replay,
}


def test_curves_are_written_in_both_forms(tmp_path: Path) -> None:
    series = {"ours": [(1, 10.0), (64, 12.0)], "theirs": [(1, 20.0), (64, None)]}
    x, y = Axis(title="concurrent requests", log=True), Axis(title="CPU per token, µs", log=True)
    png, svg = plots.lines(tmp_path / "plots" / "cost", "Cost", series, x=x, y=y, levels={"goal": 5.0})
    assert png.read_bytes().startswith(b"\x89PNG") and b"<svg" in svg.read_bytes()
    again = plots.lines(tmp_path / "again", "Cost", series, x=x, y=y, levels={"goal": 5.0})
    assert again[1].read_bytes() == svg.read_bytes()


def test_stacked_bars_are_written_in_both_forms(tmp_path: Path) -> None:
    parts = {"engine": [10.0, 20.0], "gateway": [1.0, 2.0]}
    files = plots.bars(
        tmp_path / "parts", "Parts", [1, 64], parts, x=Axis(title="concurrent requests"), y=Axis(title="ms")
    )
    assert [path.suffix for path in files] == [".png", ".svg"] and all(path.stat().st_size > 1000 for path in files)


def test_curves_of_many_points_may_go_without_marks(tmp_path: Path) -> None:
    series = {"ours": [(at, at % 5) for at in range(50)], "theirs": [(at, 2) for at in range(50)]}
    x, y = Axis(title="hours"), Axis(title="workers")
    plain = plots.lines(tmp_path / "plain", "Day", series, x=x, y=y, marked=False)
    marked = plots.lines(tmp_path / "marked", "Day", series, x=x, y=y)
    assert plain[1].stat().st_size < marked[1].stat().st_size


def test_the_plots_of_the_docs_show_the_results(tmp_path: Path) -> None:
    """The same figures make the same file, so an old plot beside new results is found."""
    results, shown = ROOT / "bench" / "results", ROOT / "docs" / "plots"
    for name, draw in DRAWS.items():
        draw(load(results / f"{name}.json"), tmp_path)
    draw_scale([load(results / f"{name}.json") for name in ("scale", "scale-shapes")], tmp_path)
    drawn = {path.name: path.read_bytes() for path in tmp_path.glob("*.svg")}
    assert drawn.keys() == {path.name for path in shown.glob("*.svg")} and len(drawn) == 24
    assert [name for name, svg in drawn.items() if svg != (shown / name).read_bytes()] == []
