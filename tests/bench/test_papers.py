"""`bench papers`: what docs/planning.md says of papers is what the planner says."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from bench.papers.__main__ import main, ratios, row
from bench.papers.comparisons import COMPARISONS, Comparison, apex_example, apex_search, lamina, lserve, scalellm
from bench.papers.comparisons import slm_pareto as slm
from bench.report import load

RESULTS = Path(__file__).parents[2] / "bench" / "results" / "papers.json"
QUICK = (slm, scalellm, apex_example, lserve, lamina)


def test_the_results_are_those_of_this_planner() -> None:
    """All comparisons but the slow one; a planner that changed needs a new run."""
    assert {*QUICK, apex_search} == set(COMPARISONS)
    rows = {(each["paper"], each["case"], each["unit"]): each for each in load(RESULTS).rows}
    for compared in QUICK:
        for each in compared():
            assert msgspec.to_builtins(row(each)) == rows[each.paper, each.case, each.unit]


def test_golden_figures_and_orders_hold() -> None:
    found = [each for compared in (slm, scalellm, apex_example) for each in compared()]
    assert [each.verdict for each in ratios(found)] == ["reached"] * 3


def test_a_ratio_is_one_within_a_range() -> None:
    for planner, ratio in ((1.0, 0.5), (2.0, 1.0), (3.0, 1.0), (5.0, 1.25)):
        assert Comparison("paper", "case", "x", (2.0, 4.0), planner).ratio == pytest.approx(ratio)
    assert Comparison("paper", "case", "x", (2.0,), None).ratio is None


def test_a_wrong_figure_is_counted() -> None:
    """A batch that is not the paper's is a figure that must not be."""
    found = [Comparison("SLM-Pareto", "Table 1, opt-13b", "requests at once", (16.0,), 32.0),
             Comparison("ScaleLLM", "Table 1, 4 at once", "ms a token", (10.0,), 12.0)]  # fmt: skip
    assert [each.verdict for each in ratios(found)] == ["missed", "reached", "missed"]


def test_it_is_a_program(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "published" in capsys.readouterr().out
