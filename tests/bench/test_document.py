"""The tables of the docs are those of the results."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.document import PAGES, RIVALS, filled, main
from bench.report import load

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

PAGE = """# A page

<!-- metrics: records -->
old
<!-- end -->

Words.
"""


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
    assert filled(text, ROOT / "bench" / "results") == text


def test_check_says_whether_a_page_is_behind(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    words = ["--page", str(page), "--results", str(tmp_path)]
    assert main(["--check", *words]) == 1 and page.read_text() == PAGE
    assert main(words) == 0 and main(["--check", *words]) == 0
