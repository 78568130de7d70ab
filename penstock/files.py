"""Files that several processes share: replaced atomically, flushed to the disk, and locked. Every call blocks."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

LOCK_RETRY_DELAY_S = 0.02


@contextlib.contextmanager
def replacing(path: Path, mode: int = 0o666) -> Iterator[Callable[[bytes], object]]:
    """Write a file anew through the function this yields: a reader sees the old file or the whole new one.

    The new file is on the disk when the block ends, and the old one stays if the block raises. Raises OSError.
    """
    fresh = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            yield file.write
        rename_durably(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)


def open_private(path: str | Path, mode: str) -> Any:
    """As `open`; a file that it creates is readable for its owner only. Raises OSError."""
    return open(path, mode, opener=lambda name, flags: os.open(name, flags, 0o600))


def write_file(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Replace a file by one with this content. Raises OSError."""
    with replacing(path, mode) as write:
        write(data)


def rename_durably(part: Path, path: Path) -> None:
    """Rename a complete file: a power cut leaves the old file or the whole new one at `path`. Raises OSError."""
    flush(part)
    part.replace(path)
    flush(path.parent)


def flush(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def file_lock(
    path: Path,
    *,
    shared: bool = False,
    create: bool = True,
    timeout_s: float = math.inf,
    on_wait: Callable[[], object] = lambda: None,
) -> Iterator[None]:
    """Hold a lock between processes and between threads. The kernel releases it when its holder dies.

    Args:
        shared: whether other shared holders are let in.
        create: whether a missing lock file is created, for its owner only.
        timeout_s: how long to wait for the lock.
        on_wait: called once if another process holds the lock.

    Raises TimeoutError, OSError.
    """
    kind, until = fcntl.LOCK_SH if shared else fcntl.LOCK_EX, time.monotonic() + timeout_s
    handle = os.open(path, os.O_RDWR | (os.O_CREAT if create else 0), 0o600)
    try:
        if not _try_lock(handle, kind):
            on_wait()
            while not _try_lock(handle, kind):
                if time.monotonic() >= until:
                    raise TimeoutError("another process holds the lock")
                time.sleep(LOCK_RETRY_DELAY_S)
        yield
    finally:
        os.close(handle)


def _try_lock(handle: int, kind: int) -> bool:
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
