"""What the wire tells about a model, as the snapshot a decision is made from."""

from __future__ import annotations

from scheduler.observe import look
from scheduler.policy.snapshot import Due
from streaming.jobs import backlog
from streaming.jobs.backlog import Lane
from streaming.priority import Priority


def test_a_deadline_belongs_to_the_jobs_own_lane_and_model() -> None:
    """With the jobs before it: half of a lane, for a job half as old as the oldest."""
    lanes = [
        Lane("m", Priority.INTERACTIVE, 4, 1, 10_000),
        Lane("m", Priority.STANDARD, 40, 2, 60_000),
        Lane("other", Priority.STANDARD, 8, 0, 60_000),
    ]
    due = [
        backlog.Due("m", Priority.STANDARD, 20_000, 30_000),
        backlog.Due("m", Priority.INTERACTIVE, 5_000, 10_000),
        backlog.Due("other", Priority.STANDARD, 1_000, 0),
    ]
    interactive, standard = look("m", lanes, (), due).lanes
    assert (interactive.name, interactive.due) == ("interactive", (Due(5.0, 0),))
    assert (standard.name, standard.due) == ("standard", (Due(20.0, 20),))
    assert (standard.waiting, standard.running, standard.oldest_s) == (40, 2, 60.0)
