"""Texts and files: UTF-8 that may begin with a byte order mark, atomic writes, counts in words."""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

MARK = codecs.BOM_UTF8
_FORMS = {
    "UTF-32": re.compile(rb"\xff\xfe\0\0|\0\0\xfe\xff|\0\0\0[^\0]|[^\0]\0\0\0", re.DOTALL),
    "UTF-16": re.compile(rb"\xff\xfe|\xfe\xff|\0[^\0]\0[^\0]|[^\0]\0[^\0]\0", re.DOTALL),
    "gzip": re.compile(rb"\x1f\x8b"),
    "zstd": re.compile(rb"\x28\xb5\x2f\xfd"),
}
"""The first bytes of what is often sent by mistake. The first characters of text are ASCII in nearly all formats."""


B = TypeVar("B", bytes, bytearray)


def without_mark(data: B) -> B:
    """Return the data without a UTF-8 byte order mark at its start."""
    return data[len(MARK) :] if data.startswith(MARK) else data


def form_of(data: bytes) -> str:
    """Return the name of another encoding or of a compression in which the data seems to be; "" for none."""
    return next((name for name, form in _FORMS.items() if form.match(data)), "")


def fault_of(data: bytes) -> str:
    """Return why the data is not UTF-8 text, as the end of a sentence that begins with "it is"; "" if it is."""
    if form := form_of(data):
        return f"{form} data, and must be UTF-8 text"
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return f"not UTF-8 text: byte {error.start + 1} is 0x{data[error.start]:02x}"
    return ""


def read_text(path: Path) -> str:
    """Read a text file without its byte order mark, with newlines as its line ends. Raises OSError; ValueError, which
    says why it is not UTF-8 text."""
    return decoded(path.read_bytes()).replace("\r\n", "\n").replace("\r", "\n")


def decoded(data: bytes) -> str:
    """Return text without its byte order mark. Raises ValueError, which says why it is not UTF-8 text."""
    try:
        return without_mark(data).decode()
    except UnicodeDecodeError:
        raise ValueError(f"it is {fault_of(data)}") from None


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
    timeout_s: float | None = None,
    on_wait: Callable[[], object] = lambda: None,
) -> Iterator[None]:
    """Hold a lock between processes and between threads. The kernel releases it when its holder dies.

    Args:
        shared: whether other shared holders are let in.
        create: whether a missing lock file is created, for its owner only.
        timeout_s: how long to wait for the lock; None: as long as it takes.
        on_wait: called once if another process holds the lock.

    Raises TimeoutError, OSError.
    """
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    handle = os.open(path, os.O_RDWR | (os.O_CREAT if create else 0), 0o600)
    try:
        if not _try_lock(handle, kind):
            on_wait()
            _wait_for_lock(handle, kind, timeout_s)
        yield
    finally:
        os.close(handle)


def _try_lock(handle: int, kind: int) -> bool:
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _wait_for_lock(handle: int, kind: int, timeout_s: float | None) -> None:
    if timeout_s is None:
        fcntl.flock(handle, kind)
        return
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        time.sleep(LOCK_RETRY_DELAY_S)
        if _try_lock(handle, kind):
            return
    raise TimeoutError("another process holds the lock")


def counted(number: int, noun: str, plural: str = "") -> str:
    """A number with its noun: "1 job", "2 jobs"; `plural` if it is not the noun with an s."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"
