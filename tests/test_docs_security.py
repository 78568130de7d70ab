"""docs/security.md names tests as proof: they exist, and every risk of both lists has its row."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
NAMED = re.findall(r"`(test_\w+)(?: -k ([^`]+))?`", PAGE)
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if line.startswith("| ") and not line.startswith(("| risk ", "| what ", "| who "))
]


@pytest.mark.parametrize(("name", "words"), sorted(set(NAMED)))
def test_a_test_that_the_page_names_is_there(name: str, words: str) -> None:
    """Its file is, and each of its words is in a test's name."""
    names = re.findall(r"def (test_\w+)", (ROOT / "tests" / f"{name}.py").read_text(encoding="utf-8"))
    assert names
    for word in words.strip('"').split(" or ") if words else ():
        assert any(word in each for each in names), word


def test_every_risk_of_both_lists_has_its_row() -> None:
    """Ten each, in order."""
    risks = [match[1] for row in ROWS if (match := re.match(r"((API|LLM)\d+) ", row[0]))]
    assert risks == [*(f"API{number}" for number in range(1, 11)), *(f"LLM{number:02}" for number in range(1, 11))]


def test_every_defence_is_shown_or_said_to_be_none() -> None:
    """The last cell of a row of three names a test or a command, or says that there is nothing to show."""
    shown = [row for row in ROWS if len(row) == 3]
    assert len(shown) >= 27
    for row in shown:
        assert re.search(r"`(test_|make )", row[2]) or row[2] in ("not defended", "not needed"), row[0]


def test_targets_that_the_page_names_are_there() -> None:
    """Each `make` of the page is in the Makefile."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in {"audit", "sbom", "fuzz"} | set(re.findall(r"`make ([a-z-]+)", PAGE)):
        assert re.search(rf"^{target}: .*## ", makefile, re.MULTILINE), target
