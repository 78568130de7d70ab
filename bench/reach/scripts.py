"""The Lua scripts that a change is in, and the lines of the product that run them: coverage sees nothing of Lua."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path

from streaming.redis.scripts import assemble

FOLDER = "streaming/lua"
NO_CALLERS = ("scripts.py", "acl.py", "keys.py")
"""Files that name scripts and run none."""


def changed_scripts(tree: Path, texts: Mapping[str, str]) -> dict[str, str]:
    """What the server would be given of each script that these texts change, by file; a shared function is in many."""
    before, sound = _unchanged(tree)
    changed = assemble(before | {Path(file).name: text for file, text in texts.items()})
    return {name: script.source for name, script in changed.items() if script.source != sound[name]}


@cache
def _unchanged(tree: Path) -> tuple[dict[str, str], dict[str, str]]:
    """The files of a tree that holds still, and what the server is given of each."""
    files = {path.name: path.read_text(encoding="utf-8") for path in (tree / FOLDER).glob("*.lua")}
    return files, {name: script.source for name, script in assemble(files).items()}


def callers(tree: Path, names: Collection[str]) -> dict[str, list[int]]:
    """The lines of `streaming` that name one of these scripts as they run it, by file."""
    word = re.compile("|".join(rf'"{re.escape(name)}"' for name in names)) if names else None
    found: dict[str, list[int]] = {}
    for path in sorted((tree / "streaming").rglob("*.py")):
        if word is None or path.name in NO_CALLERS:
            continue
        lines = [number for number, line in enumerate(path.read_text("utf-8").splitlines(), 1) if word.search(line)]
        if lines:
            found[path.relative_to(tree).as_posix()] = lines
    return found
