"""Pages of the docs name tests, fault rows, files and targets, as proof or as places to look: they exist."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from bench.chaos.rows import ROWS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
GUARANTEES, SECURITY = ((DOCS / name).read_text(encoding="utf-8") for name in ("guarantees.md", "security.md"))
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
DECISIONS = sorted(path.relative_to(ROOT).as_posix() for path in (DOCS / "decisions").glob("*.md"))
NAMED = re.findall(r"`((?:\w+/)+test_\w+)(?: -k ([^`]+))?`", SECURITY)
SELECTIONS = {
    *re.findall(r"`pytest ((?:tests/[\w/]+\.py ?)+)(?:-k ([^`]+))?`", GUARANTEES),
    *((file, words) for words, file in re.findall(r"`-k ([^`]+)` in `(tests/[\w/]+\.py)`", GUARANTEES)),
    *((f"tests/{name}.py", words) for name, words in NAMED),
}
ELSEWHERE = re.compile(r"not in os\.environ, reason=\"[^\"]*(make [a-z-]+)\"")
"""What a test says that is skipped where nobody asked for it: the command that runs it."""


def has_target(name: str) -> bool:
    return re.search(rf"^{name}: .*## ", MAKEFILE, re.MULTILINE) is not None


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "SECURITY.md", "docs/engines.md", "docs/walk.md", *DECISIONS])
def test_what_a_page_names_is_there(page: str) -> None:
    """Paths and folders in backticks, linked files, and targets of make."""
    text = (ROOT / page).read_text(encoding="utf-8")
    paths = re.findall(r"`((?:[\w.-]+/)+[\w.-]*)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    assert len(paths) > 20 or page not in ("CONTRIBUTING.md", "docs/walk.md")
    for path in paths:
        above = ("", "*/", "*/*/") if page == "docs/walk.md" else ("",)  # its table names files below their folder
        is_there = any(next(ROOT.glob(folder + path.rstrip("/")), None) for folder in above)
        assert is_there or "penstock.toml" in path, path
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert ((ROOT / page).parent / link).exists(), link
    assert all(map(has_target, re.findall(r"(?:`|\$ )make ([a-z-]+)", text)))


@pytest.mark.parametrize(("files", "words"), sorted(SELECTIONS))
def test_a_selection_of_a_page_selects_tests(files: str, words: str) -> None:
    """Its files are there, and each of its words is in a test's name."""
    texts = [(ROOT / file).read_text(encoding="utf-8") for file in files.split()]
    names = [name for text in texts for name in re.findall(r"def (test_\w+)", text)]
    assert names and re.fullmatch(r'|\w+|"\w+( or \w+)*"', words), "a selection is words with `or` between them"
    for word in words.strip('"').split(" or "):
        assert any(word in name for name in names), word


def test_rows_of_the_guarantees_are_played() -> None:
    """F29 is `make soak`."""
    named = set(re.findall(r"\bF\d\d[a-z]?\b", GUARANTEES))
    assert {"F01", "F05", "F36"} <= named <= {row.id for row in ROWS} | {"F29"}


def test_pauses_of_the_page_about_failures_are_those_of_the_kit() -> None:
    """Each is the median and the 99th percentile of the last full run of the row that it names."""
    page = (DOCS / "failures.md").read_text(encoding="utf-8")
    kit = json.loads((ROOT / "bench" / "results" / "chaos.json").read_text(encoding="utf-8"))["faults"]
    rows = {row["id"]: row for row in kit}
    named = re.findall(r"([\d.]+) / ([\d.]+) s [\w ]*\((F\w+)", page)
    assert len(named) > 10 and set(re.findall(r"\bF\d\d[a-z]?\b", page)) <= set(rows)
    for *figures, row in named:
        for figure, name in zip(figures, ("stall_p50_ms", "stall_p99_ms"), strict=True):
            assert float(figure) == round(rows[row][name] / 1000, len(figure.partition(".")[2])), row
    assert f"within {rows['F04']['measured']['all streams went on after s, worst']} s" in page


def test_every_defence_is_shown_or_said_to_be_none() -> None:
    """Each risk of both lists has its row, in order. The last cell of a row of three names a test or a command, or says
    that there is nothing to show. A test that is not always run is said to be so, by the command that runs it."""
    lines = [line for line in SECURITY.partition("\n## OWASP ")[2].splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    risks = [match[1] for row in rows if (match := re.match(r"((API|LLM)\d+) ", row[0]))]
    assert risks == [*(f"API{number}" for number in range(1, 11)), *(f"LLM{number:02}" for number in range(1, 11))]
    shown = [row for row in rows if len(row) == 3 and row[0] not in ("risk", "what")]
    assert len(shown) >= 27 and all(map(has_target, {"audit", *re.findall(r"`make ([a-z-]+)", SECURITY)}))
    for row in shown:
        assert re.search(r"`((\w+/)+test_|make )", row[2]) or row[2] in ("not defended", "not needed"), row[0]
    texts = {name: (ROOT / "tests" / f"{name}.py").read_text(encoding="utf-8") for name, _ in NAMED}
    asked = {name: match[1] for name, text in texts.items() if (match := ELSEWHERE.search(text))}
    assert len(asked) == 1, "of the files named, test_browser"
    for name, command in asked.items():
        for line in SECURITY.splitlines():
            if f"`{name}`" in line or f"`{name} -k" in line:
                assert f"`{name}` (only by `{command}`)" in line, line
