"""docs/security.md names tests as proof: they exist, and every risk of both lists has its row."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
NAMED = re.findall(r"`((?:\w+/)+test_\w+)(?: -k ([^`]+))?`", PAGE)
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.partition("\n## OWASP ")[2].splitlines()
    if line.startswith("| ") and not line.startswith(("| risk ", "| what "))
]


FILES = sorted({name for name, _ in NAMED})
ELSEWHERE = re.compile(r"not in os\.environ, reason=\"[^\"]*(make [a-z-]+)\"")
"""What a test says that is skipped where nobody asked for it: the command that runs it."""


@pytest.mark.parametrize(("name", "words"), sorted(set(NAMED)))
def test_a_test_that_the_page_names_is_there(name: str, words: str) -> None:
    """Its file has tests, and each word of a selection is in the name of one."""
    tests = re.findall(r"def (test_\w+)", (ROOT / "tests" / f"{name}.py").read_text(encoding="utf-8"))
    assert tests
    if words:
        assert re.fullmatch(r'\w+|"\w+( or \w+)*"', words), "a selection is words with `or` between them"
        for word in words.strip('"').split(" or "):
            assert any(word in test for test in tests), word


def test_a_test_that_is_not_always_run_is_said_to_be_so() -> None:
    """The row that names it names the command that runs it."""
    found = 0
    for name in FILES:
        if match := ELSEWHERE.search((ROOT / "tests" / f"{name}.py").read_text(encoding="utf-8")):
            found += 1
            for line in PAGE.splitlines():
                if f"`{name}`" in line or f"`{name} -k" in line:
                    assert f"`{name}` (only by `{match[1]}`)" in line, line
    assert found == 1, "of the files named, test_browser"


def test_every_risk_of_both_lists_has_its_row() -> None:
    """Ten each, in order."""
    risks = [match[1] for row in ROWS if (match := re.match(r"((API|LLM)\d+) ", row[0]))]
    assert risks == [*(f"API{number}" for number in range(1, 11)), *(f"LLM{number:02}" for number in range(1, 11))]


def test_every_defence_is_shown_or_said_to_be_none() -> None:
    """The last cell of a row of three names a test or a command, or says that there is nothing to show."""
    shown = [row for row in ROWS if len(row) == 3]
    assert len(shown) >= 27
    for row in shown:
        assert re.search(r"`((\w+/)+test_|make )", row[2]) or row[2] in ("not defended", "not needed"), row[0]


def test_targets_that_the_page_names_are_there() -> None:
    """Each `make` of the page is in the Makefile."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in {"audit", "sbom", "fuzz"} | set(re.findall(r"`make ([a-z-]+)", PAGE)):
        assert re.search(rf"^{target}: .*## ", makefile, re.MULTILINE), target
