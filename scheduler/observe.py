"""Load observer: builds the snapshot of each model's lanes and workers from which the policy decides."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from scheduler.policy import snapshot
from scheduler.policy.snapshot import Snapshot
from streaming.fleet.process import Process
from streaming.jobs.backlog import Backlog, LaneDepth, WaitingDeadline


async def observe(models: Iterable[str], workers: Sequence[Process], backlog: Backlog) -> list[Snapshot]:
    """One snapshot per model, in the order given. Raises Unavailable."""
    models = tuple(models)
    seen = await backlog.look(models)
    return [look(model, seen.lanes, workers, seen.due) for model in models]


def look(
    model: str, lanes: Iterable[LaneDepth], workers: Iterable[Process], due: Iterable[WaitingDeadline] = ()
) -> Snapshot:
    """The snapshot of one model, from lanes, workers and deadlines of all models."""
    deadlines = [each for each in due if each.model == model]
    return Snapshot(
        model,
        tuple(_lane(lane, deadlines) for lane in lanes if lane.model == model),
        tuple(worker for worker in workers if worker.model == model),
    )


def _lane(lane: LaneDepth, deadlines: Iterable[WaitingDeadline]) -> snapshot.LaneLoad:
    due = tuple(
        snapshot.DueJob(each.in_ms / 1000, _before(each, lane)) for each in deadlines if each.priority is lane.priority
    )
    return snapshot.LaneLoad(lane.priority.value, lane.waiting, lane.running, lane.oldest_ms / 1000, lane.added, due)


def _before(due: WaitingDeadline, lane: LaneDepth) -> int:
    """Estimated number of earlier jobs in its lane, if jobs arrived evenly since the oldest."""
    younger = min(1.0, due.age_ms / lane.oldest_ms) if lane.oldest_ms else 1.0
    return int(lane.waiting * (1 - younger))
