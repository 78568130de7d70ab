"""Copies of the tree in which tests run: complete enough for them, and surely not the tree that is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

PACKAGES = (
    "penstock",
    "api",
    "workers",
    "scheduler",
    "offline",
    "planner",
    "streaming",
    "telemetry",
    "runtime",
    "cli",
    "bench",
)
ORIGINS = "import importlib; print(*(importlib.import_module(name).__file__ for name in {!r}), sep='\\n')"


class Strayed(Exception):
    """Raised when a copy's processes would import another tree."""


def copy_tree(source: Path, target: Path) -> None:
    """Packages, tests and their settings, and the docs and the deployment files that tests hold against the code."""
    ignore = shutil.ignore_patterns("__pycache__", "results")
    for name in (*PACKAGES, "tests", "docs", "docker", "examples"):
        shutil.copytree(source / name, target / name, ignore=ignore)
    for path in source.iterdir():
        if path.is_file() and not path.name.startswith("."):
            shutil.copy2(path, target)


def environment(tree: Path) -> dict[str, str]:
    """For processes that are to import from this tree, and for the processes they start."""
    return {**os.environ, "PYTHONPATH": str(tree), "COLUMNS": "250"}


def check_origins(tree: Path, packages: Sequence[str] = PACKAGES) -> None:
    """These packages come from this tree. Raises Strayed, CalledProcessError if one cannot be imported."""
    command = [sys.executable, "-c", ORIGINS.format(tuple(packages))]
    ran = subprocess.run(command, cwd=tree, env=environment(tree), capture_output=True, text=True, check=True)
    strays = [origin for origin in ran.stdout.split() if tree.resolve() not in Path(origin).resolve().parents]
    if strays:
        raise Strayed(f"imported from outside the copy: {', '.join(strays)}")
