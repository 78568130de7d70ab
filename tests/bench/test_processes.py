"""Processes of a measurement: started, counted with all they started, and ended."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from house import eventually

from bench.processes import Died, Processes, memory_mib, tree

pytestmark = pytest.mark.slow

SPIN = """
import time
while time.process_time() < 0.3:
    pass
open("done", "w").close()
time.sleep(600)
"""
PARENT = f"""
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", {SPIN!r}])
time.sleep(600)
"""


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    with Processes(tmp_path) as processes:
        yield processes


def test_a_tree_is_counted_and_ended_as_a_whole(processes: Processes) -> None:
    processes.start("parent", [sys.executable, "-c", PARENT])
    before = processes.cpu_s()["parent"]
    eventually((processes.folder / "done").exists)
    used = processes.cpu_s()["parent"] - before
    pids = tree(processes.pids()["parent"])
    assert len(pids) == 2 and 0.25 < used < 5
    assert 1 < memory_mib(pids[0]) < 500
    processes.close()
    eventually(lambda: not any(Path(f"/proc/{pid}/cmdline").exists() for pid in pids))


def test_one_that_ends_by_itself_is_an_error_with_its_last_words(processes: Processes) -> None:
    processes.start("short", [sys.executable, "-c", "raise SystemExit('out of luck')"])
    with pytest.raises(Died, match=r"short ended with 1: out of luck"):
        processes.until(lambda: False, "nothing")
