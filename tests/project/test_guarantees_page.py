"""docs/guarantees.md names tests and chaos rows as proof: they exist."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

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


def test_the_page_counts_the_survivors_that_somebody_judged() -> None:
    """By name, as the files hold them."""
    survivors = json.loads((ROOT / "bench" / "results" / "mutants.json").read_text(encoding="utf-8"))["survivors"]
    judged = tomllib.loads((ROOT / "bench" / "mutants" / "judged.toml").read_text(encoding="utf-8"))["survivor"]
    equivalent = {_as_tried(each): each.get("equivalent", False) for each in judged}
    found = [equivalent[each["mutant"]] for each in survivors if each["mutant"] in equivalent]
    page = " ".join(PAGE.split())
    assert f"{len(found)} of the {len(survivors)}, by name. Of these, {sum(found)} change no behaviour" in page
    assert f"and {len(found) - sum(found)} remain with a reason" in page
    assert f"Of the other {len(survivors) - len(found)}," in page


def _as_tried(judged: dict[str, Any]) -> str:
    """The mutant's name in the results: its line may have moved to another file since."""
    file, _, change = judged["mutant"].partition(": ")
    return f"{judged.get('moved_from', file)}: {change}"
