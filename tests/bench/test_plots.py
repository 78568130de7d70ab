"""Plots are files that open, the same for the same figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import plots
from bench.plots import Axis

pytestmark = pytest.mark.slow


def test_curves_are_written_in_both_forms(tmp_path: Path) -> None:
    series = {"ours": [(1, 10.0), (64, 12.0)], "theirs": [(1, 20.0), (64, None)]}
    x, y = Axis(title="concurrent requests", log=True), Axis(title="CPU per token, µs", log=True)
    png, svg = plots.lines(tmp_path / "plots" / "cost", "Cost", series, x=x, y=y)
    assert png.read_bytes().startswith(b"\x89PNG") and b"<svg" in svg.read_bytes()
    again = plots.lines(tmp_path / "again", "Cost", series, x=x, y=y)
    assert again[1].read_bytes() == svg.read_bytes()


def test_bars_are_written_in_both_forms(tmp_path: Path) -> None:
    files = plots.bars(tmp_path / "parts", "Parts", {"ours": 10.0, "theirs": 20.0}, Axis(title="ms"))
    assert [path.suffix for path in files] == [".png", ".svg"] and all(path.stat().st_size > 1000 for path in files)


def test_curves_of_many_points_may_go_without_marks(tmp_path: Path) -> None:
    series = {"ours": [(at, at % 5) for at in range(50)], "theirs": [(at, 2) for at in range(50)]}
    x, y = Axis(title="hours"), Axis(title="workers")
    plain = plots.lines(tmp_path / "plain", "Day", series, x=x, y=y, marked=False)
    marked = plots.lines(tmp_path / "marked", "Day", series, x=x, y=y)
    assert plain[1].stat().st_size < marked[1].stat().st_size
