"""Victim choice: which running batch jobs give up their places, by plain data."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streaming.order import Priority
from workers.slot_shares import MIN_RUN_S, RunningJob, choose_victims, obstacle

NOW = 1_000.0


def batch_job(name: str, age_s: float = 100.0, texts: int = 1, **changes: object) -> RunningJob:
    fields: dict[str, object] = {
        "id": name, "lane": Priority.BATCH, "began_s": NOW - age_s, "texts": texts,
        "is_continued": False, "is_resumable": True,
    }  # fmt: skip
    return RunningJob(**{**fields, **changes})  # type: ignore[arg-type]


def test_the_youngest_go_first_and_no_more_than_needed() -> None:
    jobs = [batch_job("old", 300), batch_job("young", 1), batch_job("middle", 20)]
    assert choose_victims(jobs, 1, NOW).jobs == ("young",)
    assert choose_victims(jobs, 2, NOW).jobs == ("young", "middle")
    found = choose_victims(jobs, 5, NOW)
    assert found.jobs == ("young", "middle", "old")
    assert found.reason == "5 places are needed for lane interactive: the 3 youngest batch jobs free 3"
    assert choose_victims(jobs, 0, NOW).jobs == ()


def test_choices_count_as_places() -> None:
    jobs = [batch_job("one", 1), batch_job("four", 2, texts=4), batch_job("waits", 0, texts=0)]
    assert choose_victims(jobs, 3, NOW).jobs == ("one", "four")


@pytest.mark.parametrize(
    ("job", "why"),
    [
        (batch_job("a", lane=Priority.STANDARD), "lane standard is not preempted"),
        (batch_job("a", lane=Priority.INTERACTIVE), "lane interactive is not preempted"),
        (batch_job("a", is_resumable=False), "it cannot be continued exactly"),
        (
            batch_job("a", MIN_RUN_S - 0.001, is_continued=True),
            "it was put back before and has run for less than 30 s",
        ),
        (batch_job("a", MIN_RUN_S, is_continued=True), ""),
        (batch_job("a", 0), ""),
    ],
)
def test_who_is_left_alone(job: RunningJob, why: str) -> None:
    assert obstacle(job, NOW) == why
    assert choose_victims([job], 1, NOW).jobs == (() if why else ("a",))


JOBS = st.lists(
    st.builds(
        RunningJob,
        id=st.uuids().map(str),
        lane=st.sampled_from(Priority),
        began_s=st.floats(NOW - 100, NOW),
        texts=st.integers(0, 5),
        is_continued=st.booleans(),
        is_resumable=st.booleans(),
    ),
    max_size=12,
)


@given(JOBS, st.integers(0, 20))
def test_whatever_runs_no_job_is_taken_in_vain(jobs: list[RunningJob], texts: int) -> None:
    """Each victim may be taken, without the last one the places would not do, and none is left while one more would."""
    by_id = {job.id: job for job in jobs}
    victims = [by_id[each] for each in choose_victims(jobs, texts, NOW).jobs]
    assert all(not obstacle(job, NOW) and job.texts for job in victims)
    assert sum(job.texts for job in victims[:-1]) < max(texts, 1)
    if sum(job.texts for job in victims) < texts:
        allowed = [job for job in jobs if job.texts and not obstacle(job, NOW)]
        assert len(victims) == len(allowed)
