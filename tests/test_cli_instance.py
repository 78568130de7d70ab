"""The data folder: its lock, its state, and what is left of it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from cli.errors import Problem
from cli.instance import DataDir, Entry, Instance


def instance(home: DataDir) -> Instance:
    return Instance(
        version="1",
        pid=os.getpid(),
        state="ready",
        phase="",
        url="http://127.0.0.1:8000",
        redis_url="redis://:secret@127.0.0.1:1/0",
        data_dir=str(home.path),
        engine="sim",
        models=("sim",),
        started=1.0,
        processes=(Entry(role="api", id="api-1", pid=1, state="ready", since=1.0),),
    )


def test_state_is_read_while_the_lock_is_held(tmp_path: Path) -> None:
    """What was written comes back; without the lock nobody runs, whatever lies there."""
    home = DataDir(tmp_path / "data")
    assert home.read() is None
    with home.lock():
        home.prepare()
        assert home.read() is None
        home.write(instance(home))
        assert home.read() == instance(home)
        assert home.running() == instance(home)
    assert home.read() is None
    with pytest.raises(Problem, match="nothing is running"):
        home.running()


def test_second_lock_names_the_first(tmp_path: Path) -> None:
    """Whoever comes second is told where the first one is."""
    home = DataDir(tmp_path)
    with home.lock():
        home.prepare()
        home.write(instance(home))
        with pytest.raises(Problem, match=r"already running at http://127\.0\.0\.1:8000") as caught, home.lock():
            pass
    assert caught.value.exit_code == 1


def test_secrets_are_for_the_owner_alone(tmp_path: Path) -> None:
    """The state holds the Redis password."""
    home = DataDir(tmp_path / "data")
    with home.lock():
        home.prepare()
        home.write(instance(home))
        modes = [stat.S_IMODE(path.stat().st_mode) for path in (home.run, home.run / "state.json", home.redis)]
    assert modes == [0o700, 0o600, 0o700]


def test_prepare_removes_what_a_killed_run_left(tmp_path: Path) -> None:
    """Old counters and states are gone, old logs are put aside."""
    home = DataDir(tmp_path)
    with home.lock():
        home.prepare()
        (home.metrics / "counter_1.db").touch()
        home.log("api-1").write_text("old")
        home.prepare()
        assert list(home.metrics.iterdir()) == []
        assert not home.log("api-1").exists()
        assert (home.logs / "api-1.log.1").read_text() == "old"
        home.clear()
        assert not home.run.exists()


def test_unusable_folder_is_a_problem(tmp_path: Path) -> None:
    """A file where the folder should be is told, not thrown."""
    (tmp_path / "file").touch()
    with pytest.raises(Problem, match="cannot write"), DataDir(tmp_path / "file" / "data").lock():
        pass
