"""The data folder: its lock, its state, and what is left of it."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from unittest.mock import Mock

import pytest
from cli_instance import a_state
from msgspec.structs import replace

from cli.instance import MAX_LOG_BYTES, DataDir, Instance, ProcessEntry
from cli.output import Problem


def instance(home: DataDir) -> Instance:
    api = ProcessEntry(role="api", id="api-1", pid=1, state="ready", since=1.0)
    return a_state(home, "http://127.0.0.1:8000", redis_url="redis://:secret@127.0.0.1:1/0", processes=(api,))


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


def test_why_no_worker_is_ready(tmp_path: Path) -> None:
    """Of one model, or of all: the first that does not start, else what the first one does."""
    first = ProcessEntry(role="worker", id="worker-1", pid=1, state="starting", since=1.0, model="a", detail="weights")
    other = replace(first, id="worker-2", model="b", failed_starts=2, cause="no device")
    state = replace(instance(DataDir(tmp_path)), processes=(first, other))
    assert state.worker_problem("a") == "no worker is ready: weights"
    assert (
        state.worker_problem("b") == state.worker_problem() == "no worker is ready: worker-2 does not start: no device"
    )
    assert state.worker_problem("c") == "", "nothing is known of it here"
    state = replace(state, processes=(replace(first, state="ready"), other))
    assert (state.worker_problem("a"), state.worker_problem()) == ("", "")


def test_second_lock_names_the_first(tmp_path: Path) -> None:
    """Whoever comes second is told where the first one is, or what its start waits for."""
    home = DataDir(tmp_path)
    with home.lock():
        home.prepare()
        home.write(instance(home))
        with pytest.raises(Problem, match=r"already running at http://127\.0\.0\.1:8000") as caught, home.lock():
            pass
        assert caught.value.exit_code == 1
        home.write(replace(instance(home), state="starting", phase="waiting for Redis"))
        with pytest.raises(Problem, match=f"another penstock is starting in {home.path}") as caught, home.lock():
            pass
    assert caught.value.cause == "waiting for Redis"


def test_prepare_removes_what_a_killed_run_left(tmp_path: Path) -> None:
    """Old counters and states are gone; logs stay, and are put aside only when they have grown long."""
    home = DataDir(tmp_path)
    with home.lock():
        home.prepare()
        (home.metrics / "counter_1.db").touch()
        home.log("api-1").write_text("old")
        home.log("worker-1").write_text("long")
        os.truncate(home.log("worker-1"), MAX_LOG_BYTES)
        home.prepare()
        assert list(home.metrics.iterdir()) == []
        assert home.log("api-1").read_text() == "old"
        assert not home.log("worker-1").exists()
        assert (home.logs / "worker-1.log.1").read_text().startswith("long")
        home.clear()
        assert not home.run.exists()


def test_nobody_else_may_enter(tmp_path: Path) -> None:
    """A folder that an earlier version, or a person, left open to others is closed; so is what lies in it, such as the
    state, which holds the Redis password."""
    home = DataDir(tmp_path / "data")
    for folder in (home.path, home.redis, home.logs):
        folder.mkdir(mode=0o755)
    home.api_key.touch()
    for log in (home.log("api-1"), home.logs / "api-1.log.1"):
        log.touch(mode=0o644)
    with home.lock():
        home.prepare()
        assert {stat.S_IMODE(log.stat().st_mode) for log in home.logs.iterdir()} == {0o600}
        home.write(instance(home))
        assert stat.S_IMODE((home.run / "state.json").stat().st_mode) == 0o600
        modes = [stat.S_IMODE(path.stat().st_mode) for path in (home.path, home.redis, home.logs, home.run)]
    assert modes == [0o700] * 4


def test_a_folder_with_other_things_in_it_is_left_open(tmp_path: Path) -> None:
    """Somebody may need to read them: nothing is changed, nor is that advised, for it may be /. Once its owner has
    closed it, it may be used."""
    shared = tmp_path / "project"
    shared.mkdir(mode=0o755)
    (shared / "README.md").touch()
    with pytest.raises(Problem, match="other files in it") as caught, DataDir(shared).lock():
        pass
    assert caught.value.next_step == f"choose another --data-dir, such as {shared / '.penstock'}"
    assert stat.S_IMODE(shared.stat().st_mode) == 0o755 and [path.name for path in shared.iterdir()] == ["README.md"]
    shared.chmod(0o700)
    with DataDir(shared).lock():
        assert (shared / "lock").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_another_users_folder_is_refused(tmp_path: Path) -> None:
    """Its owner could put another server's socket there."""
    theirs = tmp_path / "data"
    theirs.mkdir(mode=0o700)
    os.chown(theirs, 4242, 4242)
    with pytest.raises(Problem, match="belongs to another user") as caught, DataDir(theirs).lock():
        pass
    assert f'sudo chown -R "$(id -un)" {theirs}' in caught.value.next_step


def test_a_folder_that_cannot_be_written_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file in its place, a lock or a log of root's from an earlier start, a file system that is read-only: no
    traceback, and what to do."""
    (tmp_path / "file").touch()
    for folder, says in ((tmp_path / "file", "file is no folder"), (tmp_path / "file" / "data", "cannot write")):
        with pytest.raises(Problem, match=says), DataDir(folder).lock():
            pass
    home = DataDir(tmp_path / "data")
    with home.lock():
        home.prepare()
    home.log("api-1").touch()
    refused = Mock(side_effect=PermissionError(errno.EACCES, "Permission denied"))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", refused)
        with pytest.raises(Problem, match=f"cannot write to {home.logs}") as caught:
            home.prepare()
        assert (caught.value.cause, "chown -R" in caught.value.next_step) == ("Permission denied", True)
    with monkeypatch.context() as patch:
        patch.setattr("cli.instance.file_lock", refused)
        with pytest.raises(Problem, match=f"cannot write to {home.path / 'lock'}") as caught, home.lock():
            pass
        assert "chown -R" in caught.value.next_step
    read_only = OSError(errno.EROFS, "Read-only file system")
    monkeypatch.setattr("tempfile.TemporaryFile", Mock(side_effect=read_only))
    with pytest.raises(Problem, match=f"cannot write to {home.path}") as caught, home.lock():
        pass
    assert (caught.value.cause, caught.value.next_step) == ("Read-only file system", "choose another --data-dir")
