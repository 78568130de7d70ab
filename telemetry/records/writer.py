"""Record writer: keeps a process's records on the local disk, without ever holding up its event loop.

`write` encodes a record and puts it into a buffer. A thread appends the buffer to the process's file twice a second, so
a killed process loses what came since, and the file ends in a torn line at worst. If the buffer is full, or the disk
is, records are dropped and counted: they are never worth more than the requests.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias

from penstock.loops import ExpectedErrors
from telemetry.records.reader import create, trim
from telemetry.records.schema import ENCODER, Record, RecordSettings

log = logging.getLogger(__name__)

WRITE_INTERVAL_S = 0.5
MAX_BUFFERED_BYTES = 8 * 1024**2
"""About 20,000 requests that end within WRITE_INTERVAL_S."""
TRIM_INTERVAL_S = 60.0
CLOSE_TIMEOUT_S = 5.0

Loss: TypeAlias = Literal["full", "disk"]
"""Why records were lost: the buffer was full, or the disk refused them."""


class RecordSink:
    """Takes records; by itself it keeps none."""

    written = dropped = 0

    def write(self, record: Record) -> None:
        """Keep a record. Never blocks and never raises."""


NO_RECORDS = RecordSink()


class RecordWriter(RecordSink):
    """Writes the records of one process. `write` is for one thread, that of the event loop."""

    def __init__(
        self,
        settings: RecordSettings,
        role: str,
        *,
        on_written: Callable[[int], object] = lambda _: None,
        on_dropped: Callable[[Loss, int], object] = lambda *_: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`on_written` and `on_dropped` are told numbers of records, in the writer's thread."""
        self._settings, self._role, self._clock = settings, role, clock
        self._folder = Path(settings.dir)
        self._on_written, self._on_dropped = on_written, on_dropped
        self._lock = threading.Lock()
        self._lines: list[bytes] = []
        self._bytes = self._overflow = 0
        self._file: int | None = None
        self._path: Path | None = None
        self._began, self._size = 0.0, 0
        self._torn = False
        """Whether the file ends inside a line, because the disk took only a part."""
        self._trimmed = 0.0
        warn, on_end = partial(log.warning, extra={"folder": settings.dir}), partial(log.info, "records are kept again")
        message = "records are lost, their disk refuses them: %s"
        self._outage = ExpectedErrors(OSError, warn, message, once=True, on_end=on_end)
        self.written = self.dropped = 0
        self._stop, self._some = threading.Event(), threading.Event()
        """`_some`: something was buffered since the last write began, or `close` was called: an idle thread sleeps."""
        self._thread = threading.Thread(target=self._run, name="records", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def write(self, record: Record) -> None:
        """Buffer a record; drop it if the buffer is full."""
        line = ENCODER.encode(record)
        with self._lock:
            if not self._lines:
                self._some.set()
            if self._bytes + len(line) > MAX_BUFFERED_BYTES:
                self._overflow += 1
            else:
                self._lines.append(line)
                self._bytes += len(line) + 1

    def close(self) -> None:
        """Write what is left, and close the file. Waits for at most CLOSE_TIMEOUT_S: a disk may not answer."""
        self._stop.set()
        self._some.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        while not self._stop.wait(WRITE_INTERVAL_S):
            self.flush()
            self._some.wait()
            self._some.clear()
        self.flush()
        self._leave_file()

    def flush(self) -> None:
        """Append the buffer to the file; only for the writer's thread, or where it does not run."""
        with self._lock:
            lines, self._lines, self._bytes = self._lines, [], 0
            overflow, self._overflow = self._overflow, 0
        if overflow:
            self._drop("full", overflow)
        if not lines:
            return
        data = left = b"\n".join(lines) + b"\n"
        with self._outage:
            for rest in self._append(data):
                left = rest
        if lost := left.count(b"\n"):
            self._drop("disk", lost)
        kept = len(lines) - lost
        self.written += kept
        self._on_written(kept)

    def _append(self, data: bytes) -> Iterator[bytes]:
        """Append to the file; yields what is left each time that the disk takes only a part, as a full one does, whose
        next answer is the reason. Raises OSError."""
        now = self._clock()
        file = self._open_file(now)
        if self._torn:
            os.write(file, b"\n")
        while data:
            taken = os.write(file, data)
            self._size += taken
            self._torn = not data[:taken].endswith(b"\n")
            data = data[taken:]
            yield data
        if now - self._trimmed > TRIM_INTERVAL_S:
            self._trim(now)

    def _open_file(self, now: float) -> int:
        """The file to append to: a new one if the present one is large or old, or was removed. Raises OSError."""
        if self._file is not None:
            settings = self._settings
            old = self._size >= settings.file_bytes or now - self._began >= settings.file_s
            if not old and os.fstat(self._file).st_nlink:
                return self._file
            self._leave_file()
        self._trim(now)
        self._path, self._file = create(self._folder, now, self._role, os.getpid())
        self._began, self._size, self._torn = now, 0, False
        return self._file

    def _trim(self, now: float) -> None:
        """Remove the files that are too many. If they cannot be removed, records are kept nevertheless."""
        self._trimmed, settings = now, self._settings
        try:
            trim(self._folder, now, keep_s=settings.keep_s, max_bytes=settings.max_bytes, own=self._path)
        except OSError as error:
            log.warning("old records cannot be removed: %s", error)

    def _leave_file(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.close(self._file)
        self._file = self._path = None

    def _drop(self, why: Loss, number: int) -> None:
        self.dropped += number
        self._on_dropped(why, number)
