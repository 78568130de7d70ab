"""What is told of lanes and deadlines, from a real server."""

from __future__ import annotations

from streaming.backlog import Backlog, Lane
from streaming.lease import Claim, Lease
from streaming.messages import Chat, Job, Priority, Turn
from streaming.queue import Queue
from streaming.wire import Wire


async def put(wire: Wire, priority: Priority, **limits: int) -> str:
    """A waiting job of model m."""
    queue = Queue(wire)
    job = Job(
        id=queue.new_id("t"), model="m", tenant="t", priority=priority, prompt=Chat((Turn("user", "hello"),)), **limits
    )
    await queue.put(job)
    return job.id


async def lane_of(wire: Wire, priority: Priority) -> Lane:
    (lane,) = [lane for lane in await Backlog(wire).lanes(["m"]) if lane.priority is priority]
    return lane


async def test_jobs_ever_put_are_counted(wire: Wire) -> None:
    """By lane; a claim changes what waits, not what came; nor does a job that is handed back come again."""
    for _ in range(3):
        await put(wire, Priority.STANDARD)
    await put(wire, Priority.BATCH)
    lease = Lease(wire, "m")
    await lease.register()
    claimed = await lease.claim(0, 2)
    lane = await lane_of(wire, Priority.STANDARD)
    assert (lane.added, lane.waiting, lane.running) == (3, 1, 2)
    job = claimed.jobs[0]
    assert isinstance(job, Claim)
    await lease.release(job.job.id, job.attempt)
    lane = await lane_of(wire, Priority.STANDARD)
    assert (lane.added, lane.waiting, lane.running) == (3, 2, 1)
    assert (await lane_of(wire, Priority.BATCH)).added == 1
    assert (await lane_of(wire, Priority.INTERACTIVE)).added == 0


async def test_the_nearest_deadlines_are_told(wire: Wire) -> None:
    """With their lane and age, nearest first; claimed jobs and jobs without one are left out."""
    assert await Backlog(wire).due() == []
    await put(wire, Priority.INTERACTIVE, deadline_ms=30_000)
    lease = Lease(wire, "m")
    await lease.register()
    await lease.claim(0, 1)
    await put(wire, Priority.STANDARD)
    await put(wire, Priority.BATCH, deadline_ms=60_000)
    await put(wire, Priority.STANDARD, max_queue_ms=20_000, deadline_ms=90_000)
    due = await Backlog(wire).due()
    assert [(each.model, each.priority) for each in due] == [("m", Priority.STANDARD), ("m", Priority.BATCH)]
    assert 0 < due[0].in_ms <= 20_000 < due[1].in_ms <= 60_000
    assert all(0 <= each.age_ms < 20_000 for each in due)
