"""Batch pacing policy: how many lines of a batch may be queued at once, and in which lane. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass

from streaming.priority import Priority

LATE_MARGIN = 2.0
"""A batch is late when the time its lines need at the present rate, times this, exceeds the time it has left."""

LATE_FRACTION = 0.1
"""In this last fraction of its window every batch counts as late: the rate may be unknown, or about to change."""

MIN_WINDOW = 64


@dataclass(frozen=True, slots=True)
class BatchStanding:
    """Progress of a batch against its deadline; `left_s` and `window_s` are None for a batch without one."""

    lines_left: int
    per_second: float
    """Lines ended a second, lately; 0 if unknown."""
    left_s: float | None
    window_s: float | None


def lane_of(standing: BatchStanding, ceiling: Priority) -> tuple[Priority, str]:
    """Return the lane for lines queued now, never above `ceiling`, and the reason in words."""
    lane, reason = _wanted(standing)
    if lane.rank < ceiling.rank:
        return ceiling, f"{reason}, but its key may use no higher lane than {ceiling}"
    return lane, reason


def _wanted(standing: BatchStanding) -> tuple[Priority, str]:
    left_s, window_s = standing.left_s, standing.window_s
    if left_s is None or window_s is None:
        return Priority.BATCH, "no deadline"
    if left_s <= window_s * LATE_FRACTION:
        return Priority.STANDARD, f"{max(left_s, 0):.0f} s are left of {window_s:.0f} s"
    if standing.per_second > 0:
        need_s = standing.lines_left / standing.per_second
        if need_s * LATE_MARGIN > left_s:
            return Priority.STANDARD, f"{need_s:.0f} s of work at the present pace, {left_s:.0f} s are left"
    return Priority.BATCH, "in time"


def window_of(slots: int, max_lines: int) -> int:
    """Return how many lines may be in the queue at once, at most `max_lines`: enough that no worker slot idles until
    the next round, and no more, so that they do not delay other batches."""
    return max(1, min(max_lines, max(MIN_WINDOW, 2 * slots)))
