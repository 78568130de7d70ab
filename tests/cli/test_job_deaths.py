"""Which job is suspected of the deaths of a worker, and from which death on."""

from __future__ import annotations

from cli.job_deaths import JobDeaths, Suspicion


def test_the_job_of_every_death_is_named_from_the_third_on() -> None:
    """Not the jobs that ran beside it at some of them; each worker has its own count."""
    deaths = JobDeaths()
    assert deaths.died("worker-1", ["job_x", "job_a", "job_b"]) is None
    assert deaths.died("worker-2", ["job_x"]) is None
    assert deaths.died("worker-1", ["job_x", "job_a"]) is None and deaths.suspected("worker-1") is None
    third = deaths.died("worker-1", ["job_x", "job_c"])
    assert third == deaths.suspected("worker-1") == Suspicion(3, ("job_x",))
    assert third.sentence("worker-1") == "worker-1 died 3 times running job job_x"
    fourth = deaths.died("worker-1", ["job_x"])
    assert fourth is not None and fourth.times == 4


def test_a_completed_job_begins_the_count_anew() -> None:
    """And a death without the job."""
    deaths = JobDeaths()
    for begin_anew in (lambda: deaths.begin_anew("worker-1"), lambda: deaths.died("worker-1", ["job_y"])):
        deaths.died("worker-1", ["job_x"])
        assert deaths.died("worker-1", ["job_x"]) is None
        begin_anew()
        assert deaths.died("worker-1", ["job_x"]) is None
        deaths.begin_anew("worker-1")


def test_a_job_that_is_given_up_is_named_last_and_alone() -> None:
    """It is no longer counted: no worker runs it again."""
    deaths = JobDeaths()
    for _ in range(2):
        deaths.died("worker-1", ["job_x", "job_y"])
    assert deaths.died("worker-1", ["job_x", "job_y"], ["job_x"]) == Suspicion(3, ("job_x",), given_up=True)
    assert deaths.suspected("worker-1") == Suspicion(3, ("job_y",))


def test_jobs_that_ran_together_each_time_are_named_together() -> None:
    deaths = JobDeaths()
    found = [deaths.died("worker-1", ["job_x", "job_y"]) for _ in range(3)][-1]
    assert found is not None
    assert found.sentence("worker-1") == "worker-1 died 3 times running jobs job_x, job_y"
