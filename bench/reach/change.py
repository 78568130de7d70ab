"""The tests that would see a change of some files: those that run a line it touches, the likeliest to fail first."""

from __future__ import annotations

import ast
import difflib
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

from bench.reach.reach import Reach
from bench.reach.scripts import FOLDER, callers, changed_scripts

WORD = re.compile(r"[A-Za-z][A-Za-z0-9]{2,}")


def tests_of(tree: Path, reach: Reach, texts: Mapping[str, str]) -> list[str]:
    """The order in which to try them. `texts` are the changed files whole, by name; of a Lua script, the tests that run
    it."""
    scripts = {file: text for file, text in texts.items() if file.startswith(FOLDER)}
    found = frozenset[str]()
    words: set[str] = set()
    for file, calls in callers(tree, changed_scripts(tree, scripts)).items() if scripts else ():
        found |= reach.of(file, calls)
    for file, text in texts.items():
        before = (tree / file).read_text(encoding="utf-8")
        lines = touched(before, text)
        words |= words_of(file, *(before.splitlines()[line - 1] for line in lines))
        if file not in scripts:
            inside = lines & run_by_calls(before)
            found |= reach.of(file, inside) | (reach.of_file(file) if inside != lines else frozenset())
    return likeliest(found, words, said_by(tree), reach.seconds)


def likeliest(
    tests: Iterable[str], words: Iterable[str], said: Mapping[str, frozenset[str]], seconds: Mapping[str, float]
) -> list[str]:
    """Those that speak of what was changed come first, and the quick before the slow: a word counts for more the fewer
    tests have it."""
    known = Counter(word for each in said.values() for word in each)
    weights = {word: math.log(1 + len(said) / known[word]) for word in words if known[word]}

    def rank(test: str) -> tuple[float, str]:
        about = sum(weights[word] for word in said.get(test.partition("[")[0], frozenset()) & weights.keys())
        return (0.1 + seconds.get(test, 0.0)) / (1 + about) ** 2, test

    return sorted(tests, key=rank)


@cache
def said_by(tree: Path) -> Mapping[str, frozenset[str]]:
    """The words of each test, without its parameters, and of the name of its file."""
    said: dict[str, frozenset[str]] = {}
    for path in sorted((tree / "tests").rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        lines = text.splitlines()
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
                place = path.relative_to(tree)
                said[f"{place.as_posix()}::{node.name}"] = words_of(
                    *place.with_suffix("").parts[1:], *lines[first - 1 : node.end_lineno]
                )
    return said


def run_by_calls(text: str) -> set[int]:
    """The lines of a module's functions. All others run as it is imported, which coverage notes of one test alone."""
    lines: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            lines |= set(range(node.body[0].lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def words_of(*texts: str) -> frozenset[str]:
    """In lower case, the parts of a name each by themselves."""
    return frozenset(word.lower() for text in texts for word in WORD.findall(text))


def touched(before: str, after: str) -> set[int]:
    """The lines of a text, from 1, that a change replaces or takes away; where it only adds, those around it."""
    lines: set[int] = set()
    old = before.splitlines()
    matcher = difflib.SequenceMatcher(None, old, after.splitlines(), autojunk=False)
    for kind, first, last, _, _ in matcher.get_opcodes():
        if kind == "insert":
            lines |= {first, first + 1} & set(range(1, len(old) + 1))
        elif kind != "equal":
            lines |= set(range(first + 1, last + 1))
    return lines
