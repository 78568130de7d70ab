"""docs/guarantees.md names tests and chaos rows as proof: they exist."""

from __future__ import annotations

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
