"""Which lane and how many lines: every reason once."""

from __future__ import annotations

import pytest

from offline.batch.lines import MIN_WINDOW, BatchStanding, lane_of, window_of
from streaming.order import Priority

DAY = 86_400.0


@pytest.mark.parametrize(
    ("standing", "lane", "reason"),
    [
        (BatchStanding(1000, 1.0, None, None), Priority.BATCH, "no deadline"),
        (BatchStanding(1000, 0.0, DAY / 2, DAY), Priority.BATCH, "in time"),
        (BatchStanding(1000, 1.0, DAY / 2, DAY), Priority.BATCH, "in time"),
        (BatchStanding(1000, 1.0, 2001, 3600), Priority.BATCH, "in time"),
        (
            BatchStanding(1000, 1.0, 1999, 3600),
            Priority.STANDARD,
            "1000 s of work at the present pace, 1999 s are left",
        ),
        (BatchStanding(1, 100.0, 90, 900), Priority.STANDARD, "90 s are left of 900 s"),
        (BatchStanding(1, 0.0, -5, 900), Priority.STANDARD, "0 s are left of 900 s"),
    ],
)
def test_lanes(standing: BatchStanding, lane: Priority, reason: str) -> None:
    """Nearer the deadline the lane is higher, and the reason says what was compared."""
    assert lane_of(standing, Priority.INTERACTIVE) == (lane, reason)


def test_the_keys_ceiling_holds() -> None:
    """However late it is."""
    lane, reason = lane_of(BatchStanding(1, 0.0, 1, 900), Priority.BATCH)
    assert lane is Priority.BATCH and "no higher lane than batch" in reason
    assert lane_of(BatchStanding(1, 0.0, 1, 900), Priority.STANDARD)[0] is Priority.STANDARD


@pytest.mark.parametrize(
    ("slots", "most", "lines"),
    [(0, 1024, MIN_WINDOW), (8, 1024, MIN_WINDOW), (256, 1024, 512), (900, 1024, 1024), (4, 3, 3)],
)
def test_the_window_follows_the_slots(slots: int, most: int, lines: int) -> None:
    """Twice what runs, within bounds."""
    assert window_of(slots, most) == lines
