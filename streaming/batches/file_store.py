"""File store on disk: the bytes of uploaded files and of batches, in a folder that all API and offline processes share.

File names are ids of Penstock, never a client's text. A file appears atomically, complete and fsynced, or not at all. A
batch has a folder of its own for its work, with a hard link to its input, so that deleting the file does not affect it.
This module knows no Redis: file records are in `store.py`. All of it blocks: call it from a thread. The settings
[files] and [batch] are here too.
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
from typing import Annotated, BinaryIO

import msgspec

from penstock.config import Positive
from penstock.files import flush, rename_durably, write_file

log = logging.getLogger(__name__)

DAY_S = 86_400
ORPHAN_AGE_S = 3600
"""A file without a record is left alone until this age: its record may not be written yet."""
OWNER = "deployment"
"""Name of the file that holds the id of the owning deployment."""


class FileStore:
    """The files folder; `folder` is created when it is first needed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files, self._incoming, self._work = folder / "files", folder / "incoming", folder / "batches"
        self._notes = folder / "ended"
        self._quarantine, self._owner = folder / "quarantine", folder / OWNER

    def prepare(self) -> None:
        """Create the folders, accessible to this user only. Raises OSError."""
        for folder in (self.folder, self._files, self._incoming, self._work, self._notes):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    # --- the owning deployment ---------------------------------------------------------------------------------------

    @property
    def owner(self) -> str:
        """The id of the owning deployment; "" if there is none yet. Raises OSError."""
        try:
            return self._owner.read_text("ascii").strip()
        except (FileNotFoundError, UnicodeDecodeError):
            return ""

    @property
    def is_empty(self) -> bool:
        """Whether there are neither files nor batch folders. Raises OSError."""
        return not any(any(folder.iterdir()) for folder in (self._files, self._work) if folder.exists())

    def free_bytes(self) -> int:
        """Bytes that are free on the disk of the folder. Raises OSError."""
        self.prepare()
        return shutil.disk_usage(self.folder).free

    def claim(self, deployment: str) -> str:
        """Make `deployment` the owner of an empty folder without an owner; returns the owner, "" if it is unknown.
        Raises OSError."""
        owner = self.owner
        if owner or not deployment or not self.is_empty:
            return owner
        self.prepare()
        fresh = self.folder / f"{OWNER}.{secrets.token_hex(4)}"
        try:
            fresh.write_text(deployment, "ascii")
            flush(fresh)
            _link(fresh, self._owner)
        finally:
            fresh.unlink(missing_ok=True)
        flush(self.folder)
        return self.owner

    def adopt(self, deployment: str) -> None:
        """Make `deployment` the owner in place of any other; an operator decides that. Raises OSError."""
        self.prepare()
        write_file(self._owner, deployment.encode())

    # --- files -------------------------------------------------------------------------------------------------------

    def path(self, file_id: str) -> Path:
        """Path of a file."""
        return self._files / _safe(file_id)

    def open_incoming(self) -> Incoming:
        """Open a new file for an upload, which is not visible until `keep`. Raises OSError."""
        self.prepare()
        path = self._incoming / secrets.token_hex(16)
        return Incoming(path, path.open("xb"))

    def keep(self, incoming: Incoming, file_id: str) -> None:
        """Make the upload visible under its id. Raises OSError."""
        incoming.close()
        rename_durably(incoming.path, self.path(file_id))

    def remove(self, file_id: str) -> None:
        """Delete a file. Idempotent."""
        self.path(file_id).unlink(missing_ok=True)

    # --- batches -----------------------------------------------------------------------------------------------------

    def work(self, batch_id: str) -> Path:
        """Path of a batch's folder."""
        return self._work / _safe(batch_id)

    def input_of(self, batch_id: str, file_id: str) -> Path:
        """Path of the batch's own link to its input `file_id`. Several attempts to create the batch may each have
        offered a link; this takes the one of `file_id` and removes the others. Idempotent. Blocks."""
        work = self.work(batch_id)
        link = work / "input"
        with contextlib.suppress(FileNotFoundError):  # taken before
            self._offered(batch_id, file_id).replace(link)
        for other in work.glob("input.*"):
            other.unlink(missing_ok=True)
        return link

    def take_back(self, batch_id: str, file_id: str, used: str) -> None:
        """Remove the link that a refused request offered to a batch whose input is `used`. If it is the same file, it
        stays until the batch has taken it. Idempotent."""
        if file_id != used or (self.work(batch_id) / "input").exists():
            self._offered(batch_id, file_id).unlink(missing_ok=True)

    def _offered(self, batch_id: str, file_id: str) -> Path:
        return self.work(batch_id) / f"input.{_safe(file_id)}"

    def begin_work(self, batch_id: str, file_id: str, schedule: str = "", data: bytes = b"") -> None:
        """Create a batch's folder and offer it an input: `data`, the one of `schedule` if a schedule begins it, or the
        file. Idempotent. Raises OSError, FileNotFoundError if the file is gone."""
        work, link = self.work(batch_id), self._offered(batch_id, file_id)
        work.mkdir(mode=0o700, parents=True, exist_ok=True)
        if data:
            write_file(link, data)
        elif not link.exists():
            _link(self.input_of(schedule, file_id) if schedule else self.path(file_id), link)

    def works(self) -> list[str]:
        """List the batches that have a folder."""
        return [path.name for path in self._work.iterdir()] if self._work.exists() else []

    def end_work(self, batch_id: str) -> None:
        """Remove a batch's folder. Idempotent."""
        shutil.rmtree(self.work(batch_id), ignore_errors=True)

    def note(self, batch_id: str, epoch: int, data: bytes) -> None:
        """Store a batch's final state on disk too, beside its record in the store. Raises OSError."""
        self.prepare()
        write_file(self._notes / f"{_safe(batch_id)}.{epoch:08d}", data)

    def notes(self, batch_id: str) -> list[bytes]:
        """Read a batch's notes, the last first. Raises OSError."""
        return [path.read_bytes() for path in sorted(self._notes.glob(f"{_safe(batch_id)}.????????"), reverse=True)]

    # --- orphans of killed processes ---------------------------------------------------------------------------------

    def strays(self, part: str, now: float | None = None, age_s: float = ORPHAN_AGE_S) -> list[str]:
        """List names in a folder, such as `files` or `batches`, that were not modified for `age_s`."""
        folder = self.folder / part
        horizon = (time.time() if now is None else now) - age_s
        found = []
        with contextlib.suppress(FileNotFoundError):
            for path in folder.iterdir():
                with contextlib.suppress(FileNotFoundError):
                    if path.stat().st_mtime < horizon:
                        found.append(path.name)
        return found

    def set_aside(self, part: str, name: str, now: float | None = None) -> Path:
        """Move an entry of `files` or `batches` that has no record into quarantine; returns its new path. Raises
        OSError, FileNotFoundError if it is gone."""
        day = datetime.fromtimestamp(time.time() if now is None else now, UTC).date().isoformat()
        place = self._quarantine / day / part
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        there = place / name
        if there.exists():
            there = place / f"{name}.{secrets.token_hex(4)}"
        (self.folder / part / name).rename(there)
        return there

    def bring_back(self, file_id: str) -> bool:
        """Restore a file from quarantine if it is there; returns whether the file exists now. Raises OSError."""
        path = self.path(file_id)
        for found in sorted(self._quarantine.glob(f"*/files/{_safe(file_id)}")) if not path.exists() else ():
            with contextlib.suppress(FileNotFoundError):  # another process was faster
                found.rename(path)
                os.utime(path)  # restart its age, so that it is not quarantined again before its record is written
        return path.exists()

    def quarantined(self) -> int:
        """Count the entries of all days of quarantine; other folders are ignored. Raises OSError."""
        parts = [part for day in self._days() if _began(day) is not None for part in day.iterdir() if part.is_dir()]
        return sum(1 for part in parts for _ in part.iterdir())

    def _days(self) -> list[Path]:
        """What lies in quarantine. Raises OSError: unlike `glob`, which takes an unreadable folder for an empty one."""
        return sorted(self._quarantine.iterdir()) if self._quarantine.exists() else []

    def end_quarantine(self, keep_s: float, now: float | None = None) -> list[str]:
        """Delete days of quarantine that ended more than `keep_s` ago; returns them. A day that cannot be deleted is
        logged and skipped. Raises OSError."""
        now, ended = time.time() if now is None else now, []
        for day in self._days():
            if (began := _began(day)) is None or began + DAY_S + keep_s >= now:
                continue
            try:
                shutil.rmtree(day)
            except OSError as error:
                log.warning("what was quarantined on %s cannot be removed: %s", day.name, error)
            else:
                ended.append(day.name)
        return ended

    def drop_strays(self, part: str, now: float | None = None, age_s: float = ORPHAN_AGE_S) -> None:
        """Delete what `strays` finds: uploads that were given up, or old notes. Raises OSError."""
        for name in self.strays(part, now, age_s):
            (self.folder / part / name).unlink(missing_ok=True)  # another process may be faster


class Incoming:
    """An upload in progress. `write` and `close` raise OSError, e.g. when the disk is full."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path, self._file = path, file
        self.size = 0

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self.size += len(data)

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()

    def discard(self) -> None:
        """Delete the upload. Idempotent; does nothing after `keep`."""
        self._file.close()
        self.path.unlink(missing_ok=True)


def _began(day: Path) -> float | None:
    """When a day of quarantine began; None for another entry."""
    try:
        began = datetime.strptime(day.name, "%Y-%m-%d").replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None
    return began if day.is_dir() else None


def _link(source: Path, target: Path) -> None:
    """Make a file appear under another name, too; on a file system without hard links as a copy. Does nothing if the
    name is there: another process was faster. Raises FileNotFoundError, OSError."""
    try:
        with contextlib.suppress(FileExistsError):
            os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        fresh = target.with_name(f"{target.name}.{secrets.token_hex(4)}")
        shutil.copyfile(source, fresh)
        flush(fresh)
        fresh.replace(target)


def _safe(name: str) -> str:
    """Check that an id has no path separators. Raises ValueError, which would be a bug of the caller."""
    if not name.replace("-", "").replace("_", "").isalnum() or not name.isascii():
        raise ValueError("not an id")
    return name


class FilesSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Section [files]."""

    dir: Path = Path(".penstock/files")
    """The files folder. API and offline processes need the same folder, on shared storage if they run on several
    machines; `penstock up` keeps it in its data folder."""
    size_limit: Annotated[int, msgspec.Meta(ge=1024)] = 200 * 1024 * 1024
    """The most bytes of one uploaded file."""
    min_free_bytes: Annotated[int, msgspec.Meta(ge=0)] = 256 * 1024 * 1024
    """Bytes of the disk that uploads leave free, for the outputs of batches and for whatever else uses the disk."""
    retention_s: Annotated[int, msgspec.Meta(ge=60)] = 30 * 86_400
    """How long files, and batches that have ended, are kept by default."""
    quarantine_s: Annotated[int, msgspec.Meta(ge=86_400)] = 90 * 86_400
    """How long files without a record in the store are kept in the folder `quarantine` before they are deleted."""


class BatchSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Section [batch]."""

    max_lines: Positive = 50_000
    """The most lines of one batch."""
    window: Positive = 1024
    """The most lines of one batch that are in the queue at the same time; the others wait in the file."""
    retries: Annotated[int, msgspec.Meta(ge=0, le=100)] = 2
    """How often a line is retried after an engine error."""
    enqueued_tokens: Positive | None = None
    """The most tokens of one tenant's unfinished batches together: for each choice of a line (n times prompts) its
    prompt, at about four characters a token, and max_tokens, or without it the engine's default. A key may have its own
    (`batch_tokens` in its [keys] row). None: no limit."""
