"""Checkpoint policy: when a worker rewrites a long job's deltas at the end of its log, so that old frames can go.

A worker's log holds the steps of all its jobs and is trimmed up to the first frame that a running job still needs. One
long job would therefore keep the frames of every other job. The worker writes such a job's deltas once more, in one
piece, and needs only what follows. It does so whenever the log has grown by a quarter of the job's length: all copies
of a job together are about five times its length, and the log holds at most a quarter of it beside them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

MAX_ROWS_PER_FRAME = 1000
"""Deltas of a checkpoint in one frame: a reader decodes it in a few milliseconds."""


def is_due(frames: int, deltas: int, at_least: int) -> bool:
    """Whether to write a checkpoint of a job with `deltas` deltas, for which the log keeps `frames` frames."""
    return frames >= max(at_least, deltas // 4)


def in_frames(rows: Sequence[bytes], max_rows: int = MAX_ROWS_PER_FRAME) -> Iterator[Sequence[bytes]]:
    """Split the rows into frames."""
    for first in range(0, len(rows), max_rows):
        yield rows[first : first + max_rows]
