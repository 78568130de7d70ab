"""Plug-in engines as `up` and `doctor` check them: in a process of its own, before anything is started."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from cli import deployment as engines
from cli.__main__ import main

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "engine"
KILLED = "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, whose modules and those of the example can be imported by processes."""
    for name in [name for name in os.environ if name.startswith("PENSTOCK_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (EXAMPLE, tmp_path))))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def configure(folder: Path, engine: str, options: str = "") -> None:
    (folder / "penstock.toml").write_text(f'[models.m]\nengine = "{engine}"\n{options}\n')


def checks(capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, str]]:
    """What `penstock doctor` finds, by name."""
    main(["doctor", "--json"])
    return {each["name"]: each for each in json.loads(capsys.readouterr().out)["checks"]}


def test_doctor_builds_a_plug_in(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    configure(folder, "echo_engine:Echo", "options.slots = 3")
    found = checks(capsys)["engine echo_engine:Echo"]
    assert (found["status"], found["detail"]) == ("ok", "m: can be built")
    configure(folder, "echo_engine:Echo", "options.slots = 'x'")
    found = checks(capsys)["engine echo_engine:Echo"]
    assert found["status"] == "fail" and found["detail"].startswith("models.m.options.slots: expected a whole number")


@pytest.mark.parametrize(("engine", "problem"), [
    ("no_such:Echo", "no_such:Echo cannot be imported: ModuleNotFoundError"),
    ("killed:Echo", "the process that built the engine was killed by SIGKILL"),
])  # fmt: skip
def test_up_starts_nothing_without_its_engine(engine: str, problem: str, folder: Path, told: Any) -> None:
    """Whatever the plug-in does to its process; no server and no process is left, or was there."""
    (folder / "killed.py").write_text(KILLED)
    configure(folder, engine)
    errors = told("up --port 0", code=2).err
    assert f"error: models.m.engine: {problem}" in errors
    assert "cause: set in penstock.toml" in errors and "next:  " in errors
    assert not list((folder / ".penstock").glob("logs/redis-1.log"))


def test_a_plug_in_that_does_not_come_back_is_not_waited_for(
    folder: Path, told: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "CHECK_TIMEOUT_S", 0.5)
    (folder / "hangs.py").write_text("import time\ntime.sleep(600)")
    configure(folder, "hangs:Echo")
    assert "error: models.m.engine: the engine was not built within" in told("up --port 0", code=2).err


@pytest.mark.parametrize(("engine", "option", "error"), [
    ("sim", "options.slotz = 3", "options.slotz: no such setting"),
    ("sim", "shapes.a.upto = 1\nshapes.b.options.slotz = 3", "shapes.b.options.slotz: no such setting"),
])  # fmt: skip
def test_options_of_a_built_in_engine_are_checked_before_the_start(
    engine: str, option: str, error: str, folder: Path, told: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """No server is started for them and no model is fetched; the doctor sees them, too."""
    configure(folder, engine, option)
    errors = told("up --port 0", code=2).err
    assert f"error: models.m.{error}" in errors and "cause: set in penstock.toml\n" in errors
    assert not (folder / ".penstock").exists()
    assert checks(capsys)["settings"]["detail"].startswith(f"models.m.{error}")


def test_a_flag_at_fault_is_named(folder: Path, told: Any) -> None:
    """Where no model is configured, the setting is that of `up`."""
    errors = told("up --port 0 --engine no_such:Echo", code=2).err
    assert "error: up.engine: no_such:Echo cannot be imported" in errors and "cause: set by the flag --engine" in errors
