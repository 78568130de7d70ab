"""A forked role is what a new interpreter would be: arguments, environment, folder, output, exit code, signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from forked import Forked, can_fork
from house import House, eventually

pytestmark = pytest.mark.slow


def forked(folder: Path, role: str, *args: str, **environ: str) -> tuple[Forked, Path]:
    log = folder / "said"
    with log.open("wb") as file:
        return Forked(role, args, {**os.environ, **environ}, folder, file.fileno()), log


@pytest.mark.parametrize(("args", "code"), [(["--help"], 0), (["--no-such-word"], 2)])
def test_it_ends_as_a_new_interpreter_does_and_says_the_same(tmp_path: Path, args: list[str], code: int) -> None:
    process, log = forked(tmp_path, "scheduler", *args)
    alone = subprocess.run([sys.executable, "-m", "scheduler", *args], capture_output=True, check=False)
    assert process.wait(60) == process.returncode == alone.returncode == code
    assert log.read_bytes() == alone.stdout + alone.stderr != b""


def test_it_has_its_own_environment_and_folder(tmp_path: Path) -> None:
    """A setting out of the environment that is wrong, and one out of the folder's file."""
    process, log = forked(tmp_path, "workers", PENSTOCK_SIM_STEP_MS="none")
    assert process.wait(60) == 2 and "sim.step_ms" in log.read_text()
    (tmp_path / "penstock.toml").write_text("[sim]\nno_such_thing = 1\n")
    process, log = forked(tmp_path, "workers", PYTHONPATH="/another")
    assert process.wait(60) == 2 and "no_such_thing" in log.read_text()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 0)])
def test_it_is_sent_signals_and_waited_for(empty_house: House, number: int, code: int) -> None:
    process = empty_house.start_api()
    assert isinstance(process, Forked) and process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    process.send_signal(number)
    assert process.wait(60) == code and process.poll() == code
    process.send_signal(number)  # to a process that has ended: nothing
    eventually(lambda: not Path(f"/proc/{process.pid}").exists())


def test_what_is_read_as_an_interpreter_begins_is_not_forked() -> None:
    same = dict(os.environ)
    assert can_fork("api", same) == ("COVERAGE_PROCESS_START" not in same)
    assert not can_fork("cli", same)
    for name in ("PYTHONHASHSEED", "LD_PRELOAD", "OTEL_SDK_DISABLED", "COVERAGE_PROCESS_START"):
        assert not can_fork("api", {**same, name: "another"})
    assert not can_fork("api", {**same, "PYTHONPATH": f"/another:{Path(__file__).parent / 'traced'}"})
