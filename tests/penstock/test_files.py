"""Atomic replacement and locks of files."""

from __future__ import annotations

import math
import threading
from pathlib import Path

import pytest

from penstock import files
from penstock.files import file_lock, rename_durably, replacing, write_file


def test_a_reader_sees_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    """Nothing is seen of what is half written, and nothing else is left in the folder."""
    path = tmp_path / "state"
    path.write_bytes(b"old")
    with replacing(path) as write:
        write(b"ne")
        assert path.read_bytes() == b"old"
        write(b"w")
    assert path.read_bytes() == b"new"
    assert [each.name for each in tmp_path.iterdir()] == ["state"]


def test_an_error_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.write_bytes(b"old")
    with pytest.raises(ZeroDivisionError), replacing(path) as write:
        write(b"new")
        raise ZeroDivisionError
    assert path.read_bytes() == b"old"
    assert [each.name for each in tmp_path.iterdir()] == ["state"]


def test_a_private_file_is_never_open_to_others(tmp_path: Path) -> None:
    """Also where an open one was before."""
    path = tmp_path / "secret"
    path.write_bytes(b"old")
    path.chmod(0o644)
    write_file(path, b"new", 0o600)
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"new", 0o600)


def test_it_is_flushed_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """First the content, then the name."""
    flushed: list[tuple[str, bool]] = []
    part, path = tmp_path / "part", tmp_path / "whole"
    part.write_bytes(b"data")
    monkeypatch.setattr(files, "flush", lambda what: flushed.append((what.name, path.exists())))
    rename_durably(part, path)
    assert flushed == [("part", False), (tmp_path.name, True)]
    assert path.read_bytes() == b"data" and not part.exists()


def test_one_holder_at_a_time(tmp_path: Path) -> None:
    """Any number of shared ones; whoever may not wait is told so, and a lock that was let go is free."""
    path = tmp_path / "lock"
    with file_lock(path), pytest.raises(TimeoutError), file_lock(path, shared=True, timeout_s=0):
        pass
    one, other = file_lock(path, shared=True), file_lock(path, shared=True, timeout_s=0)
    with one, other, pytest.raises(TimeoutError), file_lock(path, timeout_s=0.05):
        pass
    with file_lock(path, timeout_s=0):
        pass
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("timeout_s", [math.inf, 30.0])
def test_who_waits_gets_it(tmp_path: Path, timeout_s: float) -> None:
    """And is told once that it waits."""
    path, held, told = tmp_path / "lock", threading.Event(), threading.Event()

    def hold() -> None:
        with file_lock(path):
            held.set()
            told.wait(30)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait(30)
    with file_lock(path, timeout_s=timeout_s, on_wait=told.set):
        assert told.is_set()
    holder.join()


def test_a_lock_that_must_be_there_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), file_lock(tmp_path / "lock", create=False):
        pass
