"""Where the bytes of files lie: one folder that every API and offline process of a deployment sees.

Names are ids of ours, never what a client said. A file appears in one step, whole and flushed, or not at all. A batch
has a folder of its own for its work, and its own link to its input, so that a deleted file takes nothing from it.
This module knows no Redis: what is recorded of files stands elsewhere. All of it blocks: call it from a thread.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

from runtime.files import flush, publish, write_file

log = logging.getLogger(__name__)

DAY_S = 86_400
ORPHAN_AGE_S = 3600
"""What nobody has a record of is left alone for so long: its record may be on its way."""
OWNER = "deployment"
"""The file that names the deployment whose files these are."""


class FileStore:
    """`folder` is made when it is first needed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files, self._incoming, self._work = folder / "files", folder / "incoming", folder / "batches"
        self._notes = folder / "ended"
        self._quarantine, self._owner = folder / "quarantine", folder / OWNER

    def prepare(self) -> None:
        """Make the folders; nobody else may look inside. Raises OSError."""
        for folder in (self.folder, self._files, self._incoming, self._work, self._notes):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    # --- whose files these are ----------------------------------------------------------------------------------------

    @property
    def owner(self) -> str:
        """The id of the deployment whose files these are; "" if nobody has said so yet. Raises OSError."""
        try:
            return self._owner.read_text("ascii").strip()
        except (FileNotFoundError, UnicodeDecodeError):
            return ""

    @property
    def is_empty(self) -> bool:
        """Whether there is neither a file nor a batch's work. Raises OSError."""
        return not any(any(folder.iterdir()) for folder in (self._files, self._work) if folder.exists())

    def claim(self, deployment: str) -> str:
        """Note whose files these are if that is not noted yet and there are none; returns whose they are, "" if that
        cannot be known. Raises OSError."""
        owner = self.owner
        if owner or not deployment or not self.is_empty:
            return owner
        self.prepare()
        fresh = self.folder / f"{OWNER}.{secrets.token_hex(4)}"
        try:
            fresh.write_text(deployment, "ascii")
            flush(fresh)
            try:
                os.link(fresh, self._owner)  # fails if another process was faster
            except FileExistsError:
                return self.owner
            except OSError:  # storage that knows no hard links
                fresh.replace(self._owner)
        finally:
            fresh.unlink(missing_ok=True)
        flush(self.folder)
        return self.owner

    def adopt(self, deployment: str) -> None:
        """Note whose files these are from now on, whoever's they were: for a person to decide. Raises OSError."""
        self.prepare()
        write_file(self._owner, deployment.encode())

    # --- files -------------------------------------------------------------------------------------------------------

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
        incoming.close()
        publish(incoming.path, self.path(file_id))

    def remove(self, file_id: str) -> None:
        """Idempotent."""
        self.path(file_id).unlink(missing_ok=True)

    # --- batches -----------------------------------------------------------------------------------------------------

    def work(self, batch_id: str) -> Path:
        """The folder of a batch's work."""
        return self._work / _safe(batch_id)

    def input_of(self, batch_id: str, file_id: str) -> Path:
        """The batch's own link to its input, which is this file: of several that were offered under the batch's id
        (tries to create it, of which one counted) this one is taken, and the others are removed. Idempotent. Blocks."""
        work = self.work(batch_id)
        link = work / "input"
        with contextlib.suppress(FileNotFoundError):  # taken before
            self._offered(batch_id, file_id).replace(link)
        for other in work.glob("input.*"):
            other.unlink(missing_ok=True)
        return link

    def take_back(self, batch_id: str, file_id: str, used: str) -> None:
        """Remove a link to an input that a refused request offered to a batch whose own input is `used`. The same file
        is left until the batch has taken it. Idempotent."""
        if file_id != used or (self.work(batch_id) / "input").exists():
            self._offered(batch_id, file_id).unlink(missing_ok=True)

    def _offered(self, batch_id: str, file_id: str) -> Path:
        return self.work(batch_id) / f"input.{_safe(file_id)}"

    def begin_work(self, batch_id: str, file_id: str) -> None:
        """Give a batch its folder and offer it an input. Idempotent. Raises FileNotFoundError when the file is gone."""
        work, link = self.work(batch_id), self._offered(batch_id, file_id)
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

    def note(self, batch_id: str, epoch: int, data: bytes) -> None:
        """Keep what is to be known of a batch's end beside its record. Raises OSError."""
        self.prepare()
        write_file(self._notes / f"{_safe(batch_id)}.{epoch:08d}", data)

    def notes(self, batch_id: str) -> list[bytes]:
        """The last first. Raises OSError."""
        return [path.read_bytes() for path in sorted(self._notes.glob(f"{_safe(batch_id)}.????????"), reverse=True)]

    def end_notes(self, keep_s: float, now: float | None = None) -> None:
        """Remove those older than `keep_s`. Raises OSError."""
        horizon = (time.time() if now is None else now) - keep_s
        for path in self._notes.iterdir() if self._notes.exists() else ():
            with contextlib.suppress(FileNotFoundError):  # another process was faster
                if path.stat().st_mtime < horizon:
                    path.unlink()

    # --- what a killed process left ----------------------------------------------------------------------------------

    def strays(self, part: str, now: float | None = None) -> list[str]:
        """Names in `files`, `incoming` or `batches` that nobody has touched for ORPHAN_AGE_S."""
        folder = self.folder / part
        horizon = (time.time() if now is None else now) - ORPHAN_AGE_S
        found = []
        with contextlib.suppress(FileNotFoundError):
            for path in folder.iterdir():
                with contextlib.suppress(FileNotFoundError):
                    if path.stat().st_mtime < horizon:
                        found.append(path.name)
        return found

    def set_aside(self, part: str, name: str, now: float | None = None) -> Path:
        """Move something out of `files` or `batches` that nobody has a record of, to where a person finds it; returns
        where it is. Raises OSError, FileNotFoundError when it is gone."""
        day = datetime.fromtimestamp(time.time() if now is None else now, UTC).date().isoformat()
        place = self._quarantine / day / part
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        there = place / name
        if there.exists():
            there = place / f"{name}.{secrets.token_hex(4)}"
        (self.folder / part / name).rename(there)
        return there

    def bring_back(self, file_id: str) -> bool:
        """Whether a file is there, out of quarantine if it was set aside. Raises OSError."""
        path = self.path(file_id)
        for found in sorted(self._quarantine.glob(f"*/files/{_safe(file_id)}")) if not path.exists() else ():
            with contextlib.suppress(FileNotFoundError):  # another process was faster
                found.rename(path)
                os.utime(path)  # young, so that it is not set aside again before its record is there
        return path.exists()

    def quarantined(self) -> list[tuple[str, int]]:
        """The days on which something was set aside, and how much. Raises OSError."""
        return [
            (day.name, sum(1 for part in day.iterdir() if part.is_dir() for _ in part.iterdir()))
            for day, _ in self._quarantined_days()
        ]

    def _quarantined_days(self) -> list[tuple[Path, float]]:
        """The folders of days, and when each day began; what else people have put there is theirs. Raises OSError."""
        found = []
        for path in sorted(self._quarantine.iterdir()) if self._quarantine.exists() else []:
            with contextlib.suppress(ValueError):
                began = datetime.strptime(path.name, "%Y-%m-%d").replace(tzinfo=UTC).timestamp()
                if path.is_dir():
                    found.append((path, began))
        return found

    def end_quarantine(self, keep_s: float, now: float | None = None) -> list[str]:
        """Remove what was set aside on days that ended more than `keep_s` ago; returns these days. A day that
        cannot be removed keeps no other. Raises OSError."""
        now, ended = time.time() if now is None else now, []
        for day, began in self._quarantined_days():
            if began + DAY_S + keep_s >= now:
                continue
            try:
                shutil.rmtree(day)
            except OSError as error:
                log.warning("what was quarantined on %s cannot be removed: %s", day.name, error)
            else:
                ended.append(day.name)
        return ended

    def drop_incoming(self) -> None:
        """Remove uploads that nobody goes on with."""
        for name in self.strays("incoming"):
            (self._incoming / name).unlink(missing_ok=True)


class Incoming:
    """A file on its way in. `write` and `close` raise OSError, e.g. when the disk is full."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path, self._file = path, file
        self.size = 0

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self.size += len(data)

    def close(self) -> None:
        """All of it is written. Idempotent."""
        self._file.close()

    def discard(self) -> None:
        """Nothing of it stays. Idempotent; harmless after it was kept."""
        self._file.close()
        self.path.unlink(missing_ok=True)


def _safe(name: str) -> str:
    """Ids of ours have no separators; whatever else comes here is a fault of ours."""
    if not name.replace("-", "").replace("_", "").isalnum() or not name.isascii():
        raise ValueError("not an id")
    return name
