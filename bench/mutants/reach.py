"""Which tests run which lines: the tests that take no seconds, once under coverage, each in a context of its own.

Also the pytest plugin of that run. Lines that only another process runs belong to no test.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Generator, Sequence
from pathlib import Path

import coverage
import pytest

from bench.trials import environment


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Name the context of all that runs for this test, whatever its thread or task."""
    measured = coverage.Coverage.current()
    assert measured is not None, "this plugin is for `coverage run`"
    measured.switch_context(item.nodeid)
    try:
        return (yield)
    finally:
        measured.switch_context("")


def measure(tree: Path, rooms: Sequence[str], data: Path) -> None:
    """Run the tests of the tree, and write which lines they run into this file; a test that fails ends nothing."""
    tests = [f"tests/{room}" for room in rooms]
    run = ["run", f"--source={','.join(rooms)}", f"--data-file={data}", "-m", "pytest", "-q", "--tb=no"]
    run += ["-p", "no:cacheprovider", "-p", __name__, "-m", "not slow", *tests]
    for words in (run, ["combine", "-q", f"--data-file={data}", str(data.parent)]):
        command = [sys.executable, "-m", "coverage", *words]
        subprocess.run(command, cwd=tree, env=environment(tree), stdout=subprocess.DEVNULL, check=words is not run)


class Reach:
    """What was measured."""

    def __init__(self, tree: Path, data: Path) -> None:
        self._tree = tree
        self._data = coverage.CoverageData(str(data))
        self._data.read()

    def tests(self, file: str, number: int) -> list[str]:
        """The tests that run the statement at this line, the nearest folders first. What runs at import (a constant, a
        field) belongs to every test that runs any line of its file: one that only imports it is not among them."""
        by_line = self._data.contexts_by_lineno(str(self._tree / file))
        lines, is_import = _statement((self._tree / file).read_text(encoding="utf-8"), number)
        found = {test for line in (by_line if is_import else lines) for test in by_line.get(line, ())} - {""}
        near = Path("tests", file).parent.parts
        return sorted((test for test in found if "\n" not in test), key=lambda test: (-_shared(near, test), test))


def _shared(near: Sequence[str], test: str) -> int:
    """How many folders the test has in common with the nearest ones."""
    folders = test.split("::", 1)[0].split("/")
    return next((depth for depth, (a, b) in enumerate(zip(near, folders, strict=False)) if a != b), len(near))


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def _statement(text: str, number: int) -> tuple[range, bool]:
    """The lines of the innermost statement at this line; of one with a body, its head; of a function's head, all of it,
    for its defaults act inside. And whether it runs at import."""
    around = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, (ast.stmt, ast.ExceptHandler, ast.match_case)) and _start(node) <= number <= _end(node)
    ]
    if not around:
        return range(number, number + 1), True
    inner = min(around, key=lambda node: _end(node) - _start(node))
    body = None if isinstance(inner, FUNCTIONS) else getattr(inner, "body", None)
    end = max(body[0].lineno - 1, _start(inner)) if body else _end(inner)
    return range(_start(inner), end + 1), not any(isinstance(node, FUNCTIONS) for node in around)


def _start(node: ast.stmt | ast.ExceptHandler | ast.match_case) -> int:
    return node.pattern.lineno if isinstance(node, ast.match_case) else node.lineno


def _end(node: ast.stmt | ast.ExceptHandler | ast.match_case) -> int:
    last = node.body[-1] if isinstance(node, ast.match_case) else node
    return last.end_lineno or last.lineno
