"""Folder of records: names of its files, and the limits of their age and of their total size.

Each process writes files of its own, so no file has two writers. A name tells when its file was begun, by which role
and by which process: `20261124T182259.123-worker-4711.jsonl`.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

_NAME = re.compile(r"([0-9]{8}T[0-9]{6})\.([0-9]{3})-([a-z]+)-([0-9]+)(?:-[0-9]+)?\.jsonl")
MODE = 0o600


@dataclass(frozen=True, slots=True)
class RecordFile:
    """One file of the folder. Times are Unix seconds."""

    path: Path
    began: float
    """When it was begun, by its name."""
    changed: float
    """When it was written last."""
    size: int


def file_name(now: float, role: str, pid: int) -> str:
    """The name of a file that is begun now."""
    at = datetime.fromtimestamp(now, UTC)
    return f"{at:%Y%m%dT%H%M%S}.{at.microsecond // 1000:03d}-{role}-{pid}.jsonl"


def create(folder: Path, now: float, role: str, pid: int) -> tuple[Path, int]:
    """Create the file that a process appends to from now on. Returns its path and a descriptor. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    name = file_name(now, role, pid)
    for number in range(100):
        path = folder / (name if not number else f"{name.removesuffix('.jsonl')}-{number}.jsonl")
        with contextlib.suppress(FileExistsError):
            return path, os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, MODE)
    raise FileExistsError(f"{folder / name} and its numbers are taken")


def files(folder: Path) -> list[RecordFile]:
    """The files of a folder, oldest first; those of other names are left out. Raises OSError."""
    found = list(_files(folder)) if folder.is_dir() else []
    return sorted(found, key=lambda each: (each.began, each.path.name))


def _files(folder: Path) -> Iterator[RecordFile]:
    for path in folder.iterdir():
        if match := _NAME.fullmatch(path.name):
            with contextlib.suppress(FileNotFoundError, ValueError):  # removed meanwhile; no date
                began = datetime.strptime(match[1], "%Y%m%dT%H%M%S").replace(tzinfo=UTC).timestamp()
                stat = path.stat()
                yield RecordFile(path, began + int(match[2]) / 1000, stat.st_mtime, stat.st_size)


def surplus(found: Collection[RecordFile], now: float, *, keep_s: float, max_bytes: int) -> list[RecordFile]:
    """Which files go: those not written for `keep_s`, and the oldest until the others are `max_bytes` or less.

    Pure. `found`: all files, oldest first.
    """
    total, gone = sum(each.size for each in found), list[RecordFile]()
    for each in found:
        if total > max_bytes or now - each.changed > keep_s:
            gone.append(each)
            total -= each.size
    return gone


def trim(folder: Path, now: float, *, keep_s: float, max_bytes: int, own: Path | None = None) -> int:
    """Remove the files that are too many, but for `own`, which the caller writes. Returns how many. Raises OSError.

    Another process may write a file that goes: it notices, and begins a new one.
    """
    gone = [each for each in surplus(files(folder), now, keep_s=keep_s, max_bytes=max_bytes) if each.path != own]
    for each in gone:
        each.path.unlink(missing_ok=True)
    return len(gone)
