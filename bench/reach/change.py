"""The tests that would see a change of some files: those that run a line it touches."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path

from bench.reach.reach import Reach
from bench.reach.scripts import FOLDER, callers, changed_scripts


def tests_of(tree: Path, reach: Reach, texts: Mapping[str, str]) -> list[str]:
    """The order in which to try them. `texts` are the changed files whole, by name; of a Lua script, the tests that run
    it."""
    scripts = {file: text for file, text in texts.items() if file.startswith(FOLDER)}
    found = frozenset[str]()
    for file, lines in callers(tree, changed_scripts(tree, scripts)).items() if scripts else ():
        found |= reach.of(file, lines)
    for file in texts.keys() - scripts.keys():
        found |= reach.of(file, touched((tree / file).read_text(encoding="utf-8"), texts[file]))
    return reach.quickest(found, next(iter(texts)))


def touched(before: str, after: str) -> set[int]:
    """The lines of a text, from 1, that a change replaces or takes away; where it only adds, those around it."""
    lines: set[int] = set()
    matcher = difflib.SequenceMatcher(None, before.splitlines(), after.splitlines(), autojunk=False)
    for kind, first, last, _, _ in matcher.get_opcodes():
        if kind == "insert":
            lines |= {first, first + 1}
        elif kind != "equal":
            lines |= set(range(first + 1, last + 1))
    return lines
