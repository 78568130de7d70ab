"""A run with a test that hangs: it ends, and its last words lead there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent

CONFTEST = """
import os
from watchdog import Watchdog

def pytest_configure(config):
    config.pluginmanager.register(Watchdog(os.dup(2), 0.5))
"""
HANGS = """
import asyncio, contextlib, pytest

async def deaf():
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()

@pytest.fixture
async def stubborn():
    task = asyncio.create_task(deaf(), name="stubborn")
    yield
    task.cancel()
    await task

async def test_quick():
    pass

async def test_slow(stubborn):
    pass
"""


@pytest.mark.slow
def test_its_last_words_name_the_test_and_what_it_waits_for(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(HANGS)
    scope = "asyncio_default_fixture_loop_scope = function"
    (tmp_path / "pytest.ini").write_text(f"[pytest]\nasyncio_mode = auto\n{scope}\npythonpath = {HERE}\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 1
    *before, last = run.stderr.strip().splitlines()
    assert last == "test_it.py::test_slow took longer than 0.5 s, its fixtures included"
    assert any(line.startswith("task stubborn: deaf:7 > Event.wait:") for line in before[-4:])
    assert "main thread, the innermost call last:" in before


@pytest.mark.slow
def test_a_test_that_lets_no_thread_run_is_ended_too(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("import watchdog\nwatchdog.LATER_S = 0.5\n" + CONFTEST)
    (tmp_path / "test_it.py").write_text("import ctypes\n\ndef test_holds():\n    ctypes.PyDLL(None).sleep(60)\n")
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {HERE}\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=50, check=False)
    assert run.returncode == 1 and "Timeout (" in run.stderr and "in test_holds" in run.stderr
