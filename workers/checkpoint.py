"""When a long job's deltas are logged anew, so that the log in front of them can be trimmed.

A worker's log holds the steps of all its jobs, and is trimmed behind the first frame that a running job still needs.
So one long job would keep every neighbour's frames. Its deltas are therefore written once more, in one piece, and from
then on only what follows is needed. That is done whenever the log has grown by a quarter of the job's length: all
copies of a job together are about five times its length, and the log holds at most a quarter of it beside them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

ROWS_A_FRAME = 1000
"""Deltas written anew in one frame: a few milliseconds for who reads it."""


def is_due(frames: int, deltas: int, at_least: int) -> bool:
    """Whether a job with so many deltas, for which so many frames are kept, is to be logged anew."""
    return frames >= max(at_least, deltas // 4)


def in_frames(rows: Sequence[bytes], most: int = ROWS_A_FRAME) -> Iterator[Sequence[bytes]]:
    """The rows of each frame."""
    for first in range(0, len(rows), most):
        yield rows[first : first + most]
