"""CONTRIBUTING.md and pages like it: the files and targets that they name are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DECISIONS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs/decisions").glob("*.md"))


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "SECURITY.md", "docs/engines.md", "docs/walk.md", *DECISIONS])
def test_what_a_page_names_is_there(page: str) -> None:
    """Paths and folders in backticks, linked files, and targets of make."""
    text = (ROOT / page).read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for path in re.findall(r"`((?:[\w.-]+/)+[\w.-]*)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        above = ("", "*/", "*/*/") if page == "docs/walk.md" else ("",)  # its table names files below their folder
        is_there = any(next(ROOT.glob(folder + path.rstrip("/")), None) for folder in above)
        assert is_there or "penstock.toml" in path, path
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert ((ROOT / page).parent / link).exists(), link
    for target in re.findall(r"(?:`|\$ )make ([a-z-]+)", text):
        assert re.search(rf"^{target}: .*## ", makefile, re.MULTILINE), target
