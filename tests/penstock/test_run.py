"""`python -m penstock.run` in a checkout."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.run import USAGE, main

ROOT = Path(__file__).parents[2]


def test_a_module_gets_the_arguments_behind_its_name_and_gives_its_exit_code(tmp_path: Path) -> None:
    (tmp_path / "shown.py").write_text("import sys; print(__name__, sys.argv[1:]); sys.exit(7)")
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    command = [sys.executable, "-P", "-m", "penstock.run", "shown", "--id", "x"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (7, "__main__ ['--id', 'x']\n")


@pytest.mark.parametrize("words", [[], ["--help"], ["nothing_of_this_name"], ["nothing.of_this_name"]])
def test_without_a_module_it_says_how_it_is_called(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["penstock.run", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert (ended.value.code, capsys.readouterr()) == (2, ("", USAGE))
