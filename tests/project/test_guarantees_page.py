"""docs/guarantees.md names tests and chaos rows as proof: they exist."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from bench.chaos.rows import ROWS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8")
SOAK = "F29"

COMMANDS = [
    *re.findall(r"`pytest ((?:tests/[\w/]+\.py ?)+)(?:-k ([^`]+))?`", PAGE),
    *((file, words) for words, file in re.findall(r"`-k ([^`]+)` in `(tests/[\w/]+\.py)`", PAGE)),
]


@pytest.mark.parametrize(("files", "words"), COMMANDS)
def test_a_command_of_the_page_selects_tests(files: str, words: str) -> None:
    """Its files are there, and each of its words is in a test's name."""
    names: list[str] = []
    for file in files.split():
        names += re.findall(r"def (test_\w+)", (ROOT / file).read_text(encoding="utf-8"))
    assert names
    for word in words.strip('"').split(" or "):
        assert any(word in name for name in names), word


def test_rows_of_the_page_are_played() -> None:
    """F29 is `make soak`."""
    named = set(re.findall(r"\bF\d\d[a-z]?\b", PAGE))
    assert {"F01", "F05", "F36"} <= named <= {row.id for row in ROWS} | {SOAK}


def test_pauses_of_the_page_about_failures_are_those_of_the_kit() -> None:
    """Each is the median and the 99th percentile of the last full run of the row that it names."""
    page = (ROOT / "docs" / "failures.md").read_text(encoding="utf-8")
    kit = json.loads((ROOT / "bench" / "results" / "chaos.json").read_text(encoding="utf-8"))["faults"]
    rows = {row["id"]: row for row in kit}
    named = re.findall(r"([\d.]+) / ([\d.]+) s [\w ]*\((F\w+)", page)
    assert len(named) > 10 and set(re.findall(r"\bF\d\d[a-z]?\b", page)) <= set(rows)
    for *figures, row in named:
        for figure, name in zip(figures, ("stall_p50_ms", "stall_p99_ms"), strict=True):
            assert float(figure) == round(rows[row][name] / 1000, len(figure.partition(".")[2])), row
    assert f"within {rows['F04']['measured']['all streams went on after s, worst']} s" in page
