"""Which job is suspected of the deaths of workers, and from which death on."""

from __future__ import annotations

from hand import Hand, lapse

from cli.instance import JobDeaths, Suspicion, fates_of, in_words
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


def test_the_job_of_every_death_is_named_from_the_third_on() -> None:
    """Not the jobs that ran beside it at some of them."""
    deaths = JobDeaths()
    assert deaths.died("worker-1", ["job_x", "job_a", "job_b"]) is None
    assert deaths.died("worker-1", ["job_x", "job_a"]) is None and deaths.suspected is None
    third = deaths.died("worker-1", ["job_x", "job_c"])
    assert third == deaths.suspected == Suspicion(("job_x",), {"worker-1": 3})
    assert third.sentence == "worker-1 died 3 times running job job_x"
    fourth = deaths.died("worker-1", ["job_x"])
    assert fourth is not None and fourth.deaths == {"worker-1": 4}


def test_deaths_of_several_workers_count_together() -> None:
    """The third one may be the first of its worker."""
    deaths = JobDeaths()
    assert deaths.died("worker-2", ["job_x"]) is deaths.died("worker-1", ["job_x"]) is None
    third = deaths.died("worker-2", ["job_x"])
    assert third is not None
    assert third.sentence == "worker-2 died 2 times, worker-1 died 1 time running job job_x"


def test_a_completed_job_begins_the_count_anew() -> None:
    """And a death without the job; of another worker neither does."""
    deaths = JobDeaths()
    for begin_anew in (lambda: deaths.forget("worker-1"), lambda: deaths.died("worker-1", ["job_y"])):
        deaths.died("worker-1", ["job_x"])
        assert deaths.died("worker-1", ["job_x"]) is None
        begin_anew()
        assert deaths.died("worker-1", ["job_x"]) is None
        deaths.forget("worker-2")
        assert deaths.died("worker-1", ["job_x"]) is None
        assert deaths.died("worker-1", ["job_x"]) is not None
        deaths.forget("worker-1")
        assert deaths.suspected is None


def test_a_job_that_is_given_up_is_named_alone_and_once() -> None:
    """However seldom its workers died here: on other machines they may have died, too."""
    deaths = JobDeaths()
    for _ in range(2):
        deaths.died("worker-1", ["job_x", "job_y"])
    found = deaths.died("worker-1", ["job_x", "job_y"], ["job_x"])
    assert found == Suspicion(("job_x",), {"worker-1": 3}, given_up=True)
    assert deaths.suspected == Suspicion(("job_y",), {"worker-1": 3})
    assert deaths.died("worker-2", ["job_z"], ["job_z"]) == Suspicion(("job_z",), {"worker-2": 1}, given_up=True)


def test_jobs_that_ran_together_each_time_are_named_together() -> None:
    deaths = JobDeaths()
    found = [deaths.died("worker-1", ["job_x", "job_y"]) for _ in range(3)][-1]
    assert found is not None
    assert found.sentence == "worker-1 died 3 times running jobs job_x, job_y"
