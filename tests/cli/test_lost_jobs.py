"""What `penstock up` says of the jobs of a worker that was lost."""

from __future__ import annotations

from hand import Hand, lapse

from cli.up import fates_of, in_words
from streaming.ids import new_job_id
from streaming.jobs.job import Job, Text
from streaming.jobs.queue import Queue
from streaming.jobs.reader import JobReader
from streaming.order import Priority
from streaming.redis.client import RedisClient


async def test_what_became_of_the_jobs_of_a_lost_worker(wire: RedisClient) -> None:
    """One went on where it was, one began again, one still waits, one was cancelled."""
    jobs, hands = [new_job_id(0) for _ in range(4)], list[Hand]()
    for job_id in jobs:
        await Queue(wire).put(Job(id=job_id, model="sim", tenant="t", priority=Priority.BATCH, prompt=Text(("x",))))
        hands.append(await Hand.claiming(wire, "worker-1@here"))
        await hands[-1].write("abc")
    for hand in hands:
        await lapse(wire, hand.lease)
    await Queue(wire).cancel(jobs[3])
    continuing, beginning = await Hand.claiming(wire, "worker-1@there"), await Hand.claiming(wire, "worker-1@here")
    await beginning.lease.restart(jobs[1], beginning.claim.number)
    assert (continuing.claim.job.id, beginning.claim.job.id) == (jobs[0], jobs[1])
    fates = fates_of(await JobReader(wire).records(jobs, bodies=False), "worker-1@here")
    assert fates == {"continued": 1, "begun again": 1, "waiting": 1, "cancelled": 1}
    assert in_words(fates) == "1 job continued, 1 begun again, 1 waiting, 1 cancelled" and in_words({}) == ""
