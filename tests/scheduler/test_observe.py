"""What the wire tells about a model, as the snapshot a decision is made from."""

from __future__ import annotations

from scheduler.loop import look
from scheduler.policy.snapshot import DueJob
from streaming.jobs import places as backlog
from streaming.jobs.places import LaneDepth
from streaming.order import Priority


def test_a_deadline_belongs_to_the_jobs_own_lane_and_model() -> None:
    """With the jobs before it: half of a lane, for a job half as old as the oldest."""
    lanes = [
        LaneDepth("m", Priority.INTERACTIVE, 4, 1, 10_000),
        LaneDepth("m", Priority.STANDARD, 40, 2, 60_000),
        LaneDepth("other", Priority.STANDARD, 8, 0, 60_000),
    ]
    due = [
        backlog.WaitingDeadline("m", Priority.STANDARD, 20_000, 30_000),
        backlog.WaitingDeadline("m", Priority.INTERACTIVE, 5_000, 10_000),
        backlog.WaitingDeadline("other", Priority.STANDARD, 1_000, 0),
    ]
    interactive, standard = look("m", lanes, (), due).lanes
    assert (interactive.name, interactive.due) == ("interactive", (DueJob(5.0, 0),))
    assert (standard.name, standard.due) == ("standard", (DueJob(20.0, 20),))
    assert (standard.waiting, standard.running, standard.oldest_s) == (40, 2, 60.0)
