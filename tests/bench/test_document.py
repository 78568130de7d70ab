"""The tables of the docs are those of the results."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from bench.document import PAGES, RIVALS, filled, main
from bench.report import Column, Ratio, Report, load

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

PAGE = """# A page

<!-- results: example -->
old
<!-- end -->

Words.

<!-- results: other-burst -->
<!-- end -->
"""

REPORT = Report(
    name="example", title="t", command="penstock bench example", columns=(Column("x", "x"),), rows=[{"x": 1.0}]
)


def test_marked_parts_are_written_anew_and_the_rest_stays(tmp_path: Path) -> None:
    REPORT.save(tmp_path / "example.json")
    page = filled(PAGE, tmp_path, tmp_path)
    assert "| 1.0 |" in page and "old" not in page and "Words." in page
    assert "Not measured yet: `penstock bench other`." in page
    assert filled(page, tmp_path, tmp_path) == page


def test_a_picture_is_shown_when_it_is_there(tmp_path: Path) -> None:
    page = "<!-- plot: jobs-cpu -->\n<!-- end -->\n"
    assert "Not measured yet" in filled(page, tmp_path, tmp_path / "plots")
    (tmp_path / "plots").mkdir()
    (tmp_path / "plots" / "jobs-cpu.png").touch()
    assert "[![jobs-cpu](plots/jobs-cpu.png)](plots/jobs-cpu.svg)" in filled(page, tmp_path, tmp_path / "plots")


def test_check_says_whether_a_page_is_behind(tmp_path: Path) -> None:
    REPORT.save(tmp_path / "example.json")
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    words = ["--page", str(page), "--results", str(tmp_path)]
    assert main(["--check", *words]) == 1 and page.read_text() == PAGE
    assert main(words) == 0 and main(["--check", *words]) == 0


def test_the_goals_of_a_pages_tables_are_listed_the_missed_ones_first(tmp_path: Path) -> None:
    ratios = (
        Ratio(what="near", value=1.0, at_most=2),
        Ratio(what="far", value=3.0, at_most=2, earlier=(1.5,)),
        Ratio(what="lost", value=0.0, at_most=0),
        Ratio(what="shown", value=7.0),
    )
    msgspec.structs.replace(REPORT, ratios=ratios).save(tmp_path / "example.json")
    page = filled(f"<!-- goals: page -->\n<!-- end -->\n{PAGE}", tmp_path, tmp_path).split("<!-- end -->")[0]
    assert page.splitlines()[1:] == [
        "1 missed, 0 undecided, 1 reached:",
        "",
        "| run | figure | measured | goal | |",
        "| --- | --- | ---: | --- | --- |",
        "| example | far | 3.00 (before: 1.50) | at most 2 | **missed** |",
        "| example | near | 1.00 | at most 2 | reached |",
    ]


def test_what_the_readme_says_of_cost_holds_for_the_results() -> None:
    rows = {(row["system"], row["streams"]): row for row in load(ROOT / "bench/results/gateway.json").rows}
    cost = {key: row["cpu_us_per_token"] for key, row in rows.items()}
    assert all(cost["penstock", 256] < cost[rival, 256] for rival in RIVALS if rival != "penstock")
    fewer = [streams for system, streams in cost if system == "router" and streams <= 64]
    assert fewer and all(cost["router", streams] < cost["penstock", streams] for streams in fewer)
    assert rows["router", 256]["ttft_p50_ms"] < rows["penstock", 256]["ttft_p50_ms"]


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_the_docs_tables_are_those_of_the_results(page: Path) -> None:
    """Else: python -m bench.document."""
    text = (ROOT / page).read_text(encoding="utf-8")
    assert filled(text, ROOT / "bench" / "results", ROOT / "docs" / "plots") == text
