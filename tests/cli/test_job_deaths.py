"""Which job is suspected of the deaths of workers, and from which death on."""

from __future__ import annotations

from cli.job_deaths import JobDeaths, Suspicion


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
    for begin_anew in (lambda: deaths.begin_anew("worker-1"), lambda: deaths.died("worker-1", ["job_y"])):
        deaths.died("worker-1", ["job_x"])
        assert deaths.died("worker-1", ["job_x"]) is None
        begin_anew()
        assert deaths.died("worker-1", ["job_x"]) is None
        deaths.begin_anew("worker-2")
        assert deaths.died("worker-1", ["job_x"]) is None
        assert deaths.died("worker-1", ["job_x"]) is not None
        deaths.begin_anew("worker-1")
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
