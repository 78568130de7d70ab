"""What the wire tells about each model, as the snapshots a decision is made from."""

from __future__ import annotations

from collections.abc import Iterable

from scheduler.policy import Snapshot
from streaming.backlog import Backlog, Lane
from streaming.fleet import Fleet
from streaming.messages import Process


async def observe(models: Iterable[str], fleet: Fleet, backlog: Backlog) -> list[Snapshot]:
    """One snapshot per model, in the order given. Raises Unavailable."""
    models = tuple(models)
    lanes = await backlog.lanes(models)
    workers = await fleet.processes("worker")
    return [snapshot(model, lanes, workers) for model in models]


def snapshot(model: str, lanes: Iterable[Lane], workers: Iterable[Process]) -> Snapshot:
    """One model's part of what was read. Workers that drain count no more: they take nothing."""
    own = [lane for lane in lanes if lane.model == model]
    ready = [worker for worker in workers if worker.model == model and worker.state == "ready"]
    return Snapshot(
        model=model,
        waiting={lane.priority.value: lane.waiting for lane in own},
        oldest_ms={lane.priority.value: lane.oldest_ms for lane in own},
        running=sum(lane.running for lane in own),
        workers_ready=len(ready),
        workers_starting=sum(worker.model == model and worker.state == "starting" for worker in workers),
        slots=sum(worker.slots for worker in ready),
    )
