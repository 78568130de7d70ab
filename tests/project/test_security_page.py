"""docs/security.md names tests as proof: they exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
NAMED = re.findall(r"`((?:\w+/)+test_\w+)(?: -k ([^`]+))?`", PAGE)


FILES = sorted({name for name, _ in NAMED})


@pytest.fixture(scope="module")
def collected(request: pytest.FixtureRequest) -> dict[str, set[str]]:
    """By file, the names of the tests that pytest finds in it, with the words of their parameters. What this run has
    collected already is not collected again."""
    found: dict[str, set[str]] = {name: set() for name in FILES}
    for item in request.session.items:
        found.get(item.path.relative_to(ROOT / "tests").with_suffix("").as_posix(), set()).add(item.name)
    if absent := [f"tests/{name}.py" for name in FILES if not found[name]]:
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *absent]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        for line in done.stdout.splitlines():
            if match := re.match(r"tests/([\w/]+)\.py::(.+)", line):
                found[match[1]].add(match[2])
    return found


@pytest.mark.slow
def test_a_test_that_the_page_names_is_there(collected: dict[str, set[str]]) -> None:
    """Its file has tests, and each word of a selection selects one by its name, not by that of its file."""
    for name, words in NAMED:
        assert collected[name], name
        if words:
            assert re.fullmatch(r'\w+|"\w+( or \w+)*"', words), "a selection is words with `or` between them"
            for word in words.strip('"').split(" or "):
                assert any(word.lower() in test.lower() for test in collected[name]), (name, word)
