"""Tests marked `alone` run while no other test does, in whichever process of the run: they count what a loaded machine
changes."""

from __future__ import annotations

import fcntl
from collections.abc import Generator, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
DOOR, ROOM = TESTS / "conftest.py", TESTS.parent / "pyproject.toml"
"""Files that every process of a run has, to lock. Who waits for the room to be empty keeps its door shut."""


class Alone:
    """A plugin."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        if item.get_closest_marker("alone") is None:
            with locked(ROOM, fcntl.LOCK_SH, behind=DOOR):
                return (yield)
        with locked(DOOR, fcntl.LOCK_EX), locked(ROOM, fcntl.LOCK_EX):
            return (yield)


@contextmanager
def locked(file: Path, kind: int, behind: Path | None = None) -> Iterator[None]:
    """`behind` must be open, and is left open. Unlocked by a call: processes that a test forked hold the file too."""
    with file.open() as held:
        with nullcontext() if behind is None else locked(behind, kind):
            fcntl.flock(held, kind)
        try:
            yield
        finally:
            fcntl.flock(held, fcntl.LOCK_UN)
