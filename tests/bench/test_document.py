"""The tables of the docs are those of the results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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


def rows_of(name: str) -> dict[tuple[str, int], dict[str, Any]]:
    return {(row["system"], row["streams"]): row for row in load(ROOT / f"bench/results/{name}.json").rows}


def test_what_the_readme_says_of_cost_holds_for_the_results() -> None:
    rows = rows_of("gateway")
    cost = {key: row["cpu_us_per_token"] for key, row in rows.items()}
    assert all(cost["penstock", 256] < cost[rival, 256] for rival in RIVALS if rival != "penstock")
    fewer = [streams for system, streams in cost if system == "router" and streams <= 64]
    assert fewer and all(cost["router", streams] < cost["penstock", streams] for streams in fewer)
    assert rows["router", 256]["ttft_p50_ms"] < rows["penstock", 256]["ttft_p50_ms"]


def test_the_readme_says_what_penstock_costs_in_front_of_a_server() -> None:
    rows, said = rows_of("gateway-upstream"), (ROOT / "README.md").read_text(encoding="utf-8")
    ours, router = (
        {streams: row for (system, streams), row in rows.items() if system == name}
        for name in ("penstock-upstream", "router")
    )
    assert sorted(ours) == [1, 256]
    assert all(router[streams]["cpu_us_per_token"] < ours[streams]["cpu_us_per_token"] for streams in ours)
    cost, first = (
        [f"{row[key]:.{digits}f}" for row in (router[256], ours[256])]
        for key, digits in (("cpu_us_per_token", 1), ("ttft_p50_ms", 0))
    )
    words = f"{cost[0]} us a token, Penstock {cost[1]}, and first tokens after {first[0]} and {first[1]} ms"
    assert words in " ".join(said.split())


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
