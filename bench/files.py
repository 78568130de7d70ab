"""Tables of source files for the docs: each file of a folder beside the first sentence of its own description."""

from __future__ import annotations

import ast
import re
from pathlib import Path

SENTENCE = re.compile(r"(.+?[.!?])(?=\s|$)", re.DOTALL)
LUA_BEHIND = re.compile(r"\s*(?:ARGV|KEYS|Returns):.*", re.DOTALL)


def as_markdown(folder: Path) -> str:
    """The files directly in a folder; without `__init__.py`, whose only use is to make a package of it."""
    files = [path for path in sorted(folder.iterdir()) if path.suffix in (".py", ".lua") and path.name != "__init__.py"]
    return "\n".join(["| file | |", "| --- | --- |", *(f"| `{path.name}` | {summary(path)} |" for path in files)])


def summary(path: Path) -> str:
    """First sentence of a module's docstring, or of the comment at the head of a Lua script. Raises ValueError if the
    file has none."""
    text = path.read_text(encoding="utf-8")
    said = _comment(text) if path.suffix == ".lua" else ast.get_docstring(ast.parse(text))
    if not said:
        raise ValueError(f"{path} does not say what it is: begin it with a sentence")
    paragraph = " ".join(said.partition("\n\n")[0].split())
    found = SENTENCE.match(paragraph)
    return (found[1] if found else paragraph).replace("|", r"\|")


def _comment(text: str) -> str:
    lines = [line for line in text.splitlines() if not line.startswith("#!")]
    head: list[str] = []
    for line in lines:
        if not line.startswith("--"):
            break
        head.append(line.removeprefix("--").strip())
    return LUA_BEHIND.sub("", " ".join(head))
