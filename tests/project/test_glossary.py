"""docs/glossary.md: each word stands once, and the classes that it names are in the source."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("penstock", "api", "workers", "scheduler", "offline", "planner", "streaming", "telemetry", "runtime", "cli")
PAGE = (ROOT / "docs/glossary.md").read_text(encoding="utf-8")


def test_each_word_stands_once() -> None:
    words = [word for row in re.findall(r"^\| ([a-z][^|]*) \|", PAGE, re.MULTILINE) for word in row.split(", ")]
    words = [word for word in words if word != "word"]  # the head of each table
    assert len(words) > 40 and sorted(set(words)) == sorted(words)


def test_the_classes_that_it_names_are_there() -> None:
    source = "\n".join(path.read_text(encoding="utf-8") for name in FOLDERS for path in (ROOT / name).rglob("*.py"))
    named = {name.rpartition(".")[2] for name in re.findall(r"`((?:[a-z]+\.)*[A-Z][A-Za-z]+)`", PAGE)}
    assert named and {name for name in named if not re.search(rf"^class {name}\b", source, re.MULTILINE)} == set()
