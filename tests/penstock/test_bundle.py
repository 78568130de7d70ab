"""The import path of processes, in a checkout. tests/project/test_install.py looks at that of an installation."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock import bundle
from penstock.run import USAGE, main

ROOT = str(Path(__file__).parents[2])


def test_in_a_checkout_the_packages_lie_beside_penstock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    before = list(sys.path)
    bundle.add_to_path()
    assert str(bundle.PACKAGES_DIR) == ROOT
    assert sys.path == before and "PYTHONPATH" not in os.environ


def test_the_packages_come_first_in_pythonpath_and_once() -> None:
    others = os.pathsep.join(["/one", ROOT, "/two"])
    assert bundle.python_path({}) == ROOT
    assert bundle.python_path({"PYTHONPATH": ""}) == ROOT
    assert bundle.python_path({"PYTHONPATH": others}) == os.pathsep.join([ROOT, "/one", "/two"])


# --- the module runner -----------------------------------------------------------------------------------------------


def test_a_module_gets_the_arguments_behind_its_name_and_gives_its_exit_code(tmp_path: Path) -> None:
    (tmp_path / "shown.py").write_text("import sys; print(__name__, sys.argv[1:]); sys.exit(7)")
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([ROOT, str(tmp_path)])}
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
