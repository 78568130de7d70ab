"""Stream offsets: positions in a job's event log for the Durable Streams protocol, and the cursors of its live reads.

An offset is the cursor of the last message before it (api/openai/cursor.py) with a fixed width, so that offsets of one
stream compare as their positions do: first the epoch, then the number. Opaque to clients.
"""

from __future__ import annotations

import hashlib
import random
import re
import time
from collections.abc import Iterable
from typing import NamedTuple

from api.openai.cursor import NO_RUN, Cursor
from api.openai.errors import invalid_request
from streaming.jobs.codec import Run

BEGINNING, TAIL = "-1", "now"
"""The protocol's own offsets: before the first retained message, and after the last one."""
INTERVAL_S = 20
"""Seconds for which a live read has the same cursor, so that a cache may answer several readers at once."""
FIRST_INTERVAL_S = 1_728_432_000
"""Unix time of cursor 0, 2024-10-09: the protocol counts from there."""
MAX_JITTER_S = 3600

_SYNTAX = re.compile(r"([0-9]{15})_([0-9]{15})_([0-9a-f]{12})")
_NO_RUN_DIGEST = "0" * 12
_UNKNOWN_RUN = "?"
"""Stands for a run that the job's record does not name."""


class StreamOffset(NamedTuple):
    """A position: after the event with this number. `run` is a digest of the run that wrote the event."""

    epoch: int
    number: int
    run: str

    def __str__(self) -> str:
        return f"{self.epoch:015d}_{self.number:015d}_{self.run}"

    @classmethod
    def of(cls, cursor: Cursor) -> StreamOffset:
        """Return the position after the event of this cursor."""
        return cls(cursor.epoch, cursor.number, _digest(cursor.run))

    def cursor(self, runs: Iterable[Run]) -> Cursor:
        """Return the cursor of the event before this position. `runs`: those of the job's record; a cursor whose run is
        not among them has none that the log knows."""
        names = [NO_RUN, *(str(run) for run in runs)]
        run = next((name for name in names if _digest(name) == self.run), _UNKNOWN_RUN)
        return Cursor(self.epoch, self.number, run)


def read(text: str) -> StreamOffset:
    """Parse a client's offset. Raises ApiError (400)."""
    match = _SYNTAX.fullmatch(text)
    if match is None:
        raise invalid_request("offset must be a Stream-Next-Offset as it was received, -1 or now.", "offset")
    return StreamOffset(int(match[1]), int(match[2]), match[3])


def live_cursor(seen: int | None, now_s: float | None = None) -> int:
    """Return the cursor of a live read: the number of the present interval, but always more than the client's last one,
    so that no cache can answer a reader for ever with the same bytes. `now_s`: Unix time."""
    current = int(((time.time() if now_s is None else now_s) - FIRST_INTERVAL_S) // INTERVAL_S)
    if seen is None or seen < current:
        return current
    return seen + max(1, random.randint(1, MAX_JITTER_S) // INTERVAL_S)  # noqa: S311 - jitter


def _digest(run: str) -> str:
    return _NO_RUN_DIGEST if run == NO_RUN else hashlib.sha256(run.encode()).hexdigest()[:12]
