"""Limits of the code's structure: sizes of files and functions, unique class names, import contracts that name all."""

from __future__ import annotations

import ast
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PRODUCT = ("penstock", "api", "workers", "scheduler", "offline", "planner", "streaming", "telemetry", "runtime", "cli")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
WITHOUT_LAYERS = {"penstock", "cli", "runtime", "telemetry"}
"""Tops whose modules are independent commands or tools; the contract between packages places them."""


def sources(*tops: str) -> Iterator[Path]:
    return (path for top in tops for path in sorted((ROOT / top).rglob("*.py")))


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def long_files(root: Path, *tops: str) -> list[str]:
    paths = [path for top in tops for kind in ("*.py", "*.lua") for path in sorted((root / top).rglob(kind))]
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in paths}
    return [f"{path.relative_to(root)}: {lines}" for path, lines in lengths.items() if lines > MAX_FILE_LINES]


def long_functions(tree: ast.Module) -> list[str]:
    return [
        f"{node.name}: {lines}"
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := (node.end_lineno or 0) - node.lineno + 1) > MAX_FUNCTION_LINES
    ]


def test_no_file_is_long() -> None:
    """A file holds one noun; a longer one holds two."""
    assert long_files(ROOT, *PRODUCT) == []


@pytest.mark.slow
def test_no_function_is_long() -> None:
    found = {path: long_functions(parsed(path)) for path in sources(*PRODUCT, "bench")}
    assert len(found) > 300 and {str(path): functions for path, functions in found.items() if functions} == {}


@pytest.mark.parametrize("longer", [0, 1])
def test_what_is_one_line_too_long_is_found(tmp_path: Path, longer: int) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b.lua").write_text("\n" * (MAX_FILE_LINES + longer))
    assert len(long_files(tmp_path, "a")) == longer
    body = "    x = 1\n" * (MAX_FUNCTION_LINES - 1 + longer)
    assert len(long_functions(ast.parse(f"class A:\n  async def f():\n{body}"))) == longer


@pytest.mark.slow
def test_no_two_classes_have_one_name() -> None:
    """A reader who meets a name knows what it means, wherever it is."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for path in sources(*PRODUCT, "bench"):
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef):
                found[node.name].append(str(path.relative_to(ROOT)))
    assert len(found) > 500 and {name: files for name, files in found.items() if len(files) > 1} == {}


def test_the_layers_of_a_package_name_each_of_its_modules() -> None:
    """A contract of layers that is not exhaustive says nothing about a module that it does not name."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    inside = [each for each in settings["contracts"] if "containers" in each]
    assert all(each.get("exhaustive") and "exhaustive_ignores" not in each for each in inside)
    assert set(PRODUCT) - WITHOUT_LAYERS <= {name for each in inside for name in each["containers"]}
