"""Copies of a tree in which changes of it are tried, one after the other."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from bench.planted.tree import copy_tree

FIRST_TIME_S = 1_000_000_000
"""The time of the first changed file. Python compiles a file anew if its time or its size is another: each changed file
has a time that no other has, whatever the clock says."""


class TreeCopies:
    """Copies of `tree` in `folder`: as many as are in use at a time. Each is put right after a change and kept for the
    next, with all that was compiled in it: to copy and compile the whole tree takes longer than most tests."""

    def __init__(self, tree: Path, folder: Path, copy: Callable[[Path, Path], object] = copy_tree) -> None:
        self.tree = tree
        self._folder, self._copy = folder, copy
        self._free: list[Path] = []
        self._numbers, self._times = itertools.count(), itertools.count(FIRST_TIME_S)

    @contextmanager
    def changed(self, texts: Mapping[str, str]) -> Iterator[Path]:
        """A copy with these files, whole, in place of its own; nobody else uses it meanwhile."""
        copy = self._take()
        try:
            for file, text in texts.items():
                self._write(copy / file, text)
            yield copy
        finally:
            for file in texts:
                self._put_right(copy, file)
            self._free.append(copy)

    def _take(self) -> Path:
        try:
            return self._free.pop()
        except IndexError:
            copy = self._folder / f"copy-{next(self._numbers)}"
            self._copy(self.tree, copy)
            return copy

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text, encoding="utf-8")
        time = next(self._times)
        os.utime(path, (time, time))

    def _put_right(self, copy: Path, file: str) -> None:
        if (self.tree / file).exists():
            shutil.copy2(self.tree / file, copy / file)
        else:
            (copy / file).unlink(missing_ok=True)
