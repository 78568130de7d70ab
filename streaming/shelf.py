"""Where the bytes of files lie: one folder that every API and offline process of a deployment sees.

Names are ids of ours, never what a client said. A file appears in one step, whole and flushed, or not at all. A batch
has a folder of its own for its work, and its own link to its input, so that a deleted file takes nothing from it.
This module knows no Redis: what is recorded of files stands elsewhere. All of it blocks: call it from a thread.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

STRAY_S = 3600
"""What nobody has a record of is left alone for so long: its record may be on its way."""


class Shelf:
    """`folder` is made when it is first needed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files, self._incoming, self._work = folder / "files", folder / "incoming", folder / "batches"

    def prepare(self) -> None:
        """Make the folders; nobody else may look inside. Raises OSError."""
        for folder in (self.folder, self._files, self._incoming, self._work):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def path(self, file_id: str) -> Path:
        """Where a file is."""
        return self._files / _safe(file_id)

    def open_incoming(self) -> Incoming:
        """A new file that is not there yet. Raises OSError."""
        self.prepare()
        path = self._incoming / secrets.token_hex(16)
        return Incoming(path, path.open("xb"))

    def keep(self, incoming: Incoming, file_id: str) -> None:
        """Let it be there, under its id. Raises OSError."""
        incoming.finish()
        incoming.path.replace(self.path(file_id))
        _flush_folder(self._files)

    def remove(self, file_id: str) -> None:
        """Idempotent."""
        self.path(file_id).unlink(missing_ok=True)

    # --- batches -----------------------------------------------------------------------------------------------------

    def work(self, batch_id: str) -> Path:
        """The folder of a batch's work."""
        return self._work / _safe(batch_id)

    def input_of(self, batch_id: str) -> Path:
        """The batch's own link to its input."""
        return self.work(batch_id) / "input"

    def begin_work(self, batch_id: str, file_id: str) -> None:
        """Give a batch its folder and its input. Idempotent. Raises FileNotFoundError when the file is gone."""
        work, link = self.work(batch_id), self.input_of(batch_id)
        work.mkdir(mode=0o700, parents=True, exist_ok=True)
        if link.exists():
            return
        try:
            os.link(self.path(file_id), link)
        except FileExistsError:
            return
        except FileNotFoundError:
            raise
        except OSError:  # storage that knows no hard links
            fresh = work / f"input.{secrets.token_hex(4)}"
            shutil.copyfile(self.path(file_id), fresh)
            fresh.replace(link)

    def works(self) -> list[str]:
        """The batches that have a folder."""
        return [path.name for path in self._work.iterdir()] if self._work.exists() else []

    def end_work(self, batch_id: str) -> None:
        """Remove a batch's folder. Idempotent."""
        shutil.rmtree(self.work(batch_id), ignore_errors=True)

    # --- what a killed process left ----------------------------------------------------------------------------------

    def strays(self, part: str, now: float | None = None) -> list[str]:
        """Names in `files`, `incoming` or `batches` that nobody has touched for STRAY_S."""
        folder = self.folder / part
        horizon = (time.time() if now is None else now) - STRAY_S
        found = []
        with contextlib.suppress(FileNotFoundError):
            for path in folder.iterdir():
                with contextlib.suppress(FileNotFoundError):
                    if path.stat().st_mtime < horizon:
                        found.append(path.name)
        return found

    def drop_incoming(self) -> None:
        """Remove uploads that nobody goes on with."""
        for name in self.strays("incoming"):
            (self._incoming / name).unlink(missing_ok=True)


class Incoming:
    """A file on its way in. `write` and `finish` raise OSError, e.g. when the disk is full."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path, self._file = path, file
        self.size = 0

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self.size += len(data)

    def finish(self) -> None:
        """All of it is on the disk. Idempotent."""
        if not self._file.closed:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()

    def discard(self) -> None:
        """Nothing of it stays. Idempotent; harmless after it was kept."""
        self._file.close()
        self.path.unlink(missing_ok=True)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Callable[[bytes], object]]:
    """Write a file anew: whoever reads it sees the old one or the whole new one. Raises OSError."""
    fresh = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        with fresh.open("xb") as file:
            yield file.write
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)
    _flush_folder(path.parent)


def _flush_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _safe(name: str) -> str:
    """Ids of ours have no separators; whatever else comes here is a fault of ours."""
    if not name.replace("-", "").replace("_", "").isalnum() or not name.isascii():
        raise ValueError("not an id")
    return name
