"""`python -m penstock.run` in a checkout."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.run import USAGE

ROOT = Path(__file__).parents[2]


def run(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "penstock.run", *words]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)


def test_a_module_gets_the_arguments_behind_its_name(tmp_path: Path) -> None:
    (tmp_path / "shown.py").write_text("import sys; print(__name__, sys.argv[1:])")
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    command = [sys.executable, "-P", "-m", "penstock.run", "shown", "--id", "x"]
    assert subprocess.check_output(command, env=environ, text=True) == "__main__ ['--id', 'x']\n"


@pytest.mark.parametrize("words", [[], ["--help"], ["nothing_of_this_name"], ["nothing.of_this_name"]])
def test_without_a_module_it_says_how_it_is_called(words: list[str], tmp_path: Path) -> None:
    done = run(*words, folder=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", USAGE)


def test_the_exit_code_is_the_modules(tmp_path: Path) -> None:
    done = run("workers", "--nope", folder=tmp_path)
    assert done.returncode == 2 and "unrecognized arguments: --nope" in done.stderr
