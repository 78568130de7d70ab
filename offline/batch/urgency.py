"""How much of a batch belongs into the queue, and into which lane. Decides and says why; does nothing."""

from __future__ import annotations

from dataclasses import dataclass

from streaming.priority import Priority

MARGIN = 2.0
"""A batch is late when its lines need more than this part of what is left of its window, at the present pace."""

LAST_PART = 0.1
"""Near its end every batch is late: the pace may be unknown, or about to change."""

FEWEST = 64


@dataclass(frozen=True, slots=True)
class BatchStanding:
    """Where a batch stands. Times in seconds; `left_s` and `window_s` are None for a batch without a deadline."""

    lines_left: int
    per_second: float
    """Lines that ended lately; 0 when nobody knows."""
    left_s: float | None
    window_s: float | None


def lane_of(standing: BatchStanding, ceiling: Priority) -> tuple[Priority, str]:
    """The lane for lines put now, never above `ceiling`, and the reason."""
    lane, reason = _wanted(standing)
    if lane.rank < ceiling.rank:
        return ceiling, f"{reason}, but its key may use no higher lane than {ceiling}"
    return lane, reason


def _wanted(standing: BatchStanding) -> tuple[Priority, str]:
    left_s, window_s = standing.left_s, standing.window_s
    if left_s is None or window_s is None:
        return Priority.BATCH, "no deadline"
    if left_s <= window_s * LAST_PART:
        return Priority.STANDARD, f"{max(left_s, 0):.0f} s are left of {window_s:.0f} s"
    if standing.per_second > 0:
        need_s = standing.lines_left / standing.per_second
        if need_s * MARGIN > left_s:
            return Priority.STANDARD, f"{need_s:.0f} s of work at the present pace, {left_s:.0f} s are left"
    return Priority.BATCH, "in time"


def window_of(slots: int, most: int) -> int:
    """How many lines may be in the queue at once: enough that no slot waits for the next look, and no more, so that
    they do not stand in the way of other batches."""
    return max(1, min(most, max(FEWEST, 2 * slots)))
