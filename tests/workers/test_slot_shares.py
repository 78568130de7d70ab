"""Slot shares: which tenants crowd a worker, how many slots it keeps from them, and which batch jobs give up theirs."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streaming.jobs.settings import NO_WEIGHTS
from streaming.order import Priority
from workers.slot_shares import (
    ACTIVE_S,
    MAX_PARKED_DELTAS,
    MIN_RUN_S,
    RunningJob,
    SlotShares,
    choose_victims,
    preemptible,
    reserved_slots,
    room_for_batch,
    tenant_slots,
)


def shares(weights: Mapping[str, float] = NO_WEIGHTS, **texts: int) -> SlotShares:
    found = SlotShares(weights)
    for tenant, count in texts.items():
        for _ in range(count):
            found.begin(tenant)
    return found


def test_a_tenant_that_has_an_equal_share_crowds_the_others() -> None:
    """With another text it would have more; but anybody may have one."""
    assert shares(a=4, b=3).crowding(8, 0.0) == ("a",)
    assert shares(a=3, b=3).crowding(8, 0.0) == ()
    assert shares(a=4, b=4, c=1).crowding(9, 0.0) == ("a", "b")
    assert shares(a=1, b=1, c=1).crowding(2, 0.0) == ("a", "b", "c")
    assert shares(a=8).crowding(8, 0.0) == (), "there is no other"


def test_a_share_is_by_weight() -> None:
    """Of those that use the worker, also of one whose last text has just ended."""
    weights = {"heavy": 3.0, "light": 0.5, "absent": 50.0}
    assert shares(weights, heavy=5, other=1).crowding(8, 0.0) == ()
    assert shares(weights, heavy=6, other=1).crowding(8, 0.0) == ("heavy",)
    assert shares(weights, heavy=5, other=3).crowding(8, 0.0) == ("other",)
    assert shares(weights, light=3, other=5).crowding(8, 0.0) == ("light",)
    found = shares(weights, other=3, heavy=1)
    found.end("heavy", 0.0)
    assert found.crowding(8, 1.0) == ("other",)


def test_a_tenant_counts_for_a_while_after_its_last_text() -> None:
    found = shares(a=8, b=2)
    found.end("b", 10.0)
    found.end("b", 20.0)
    assert found.crowding(8, 20.0 + ACTIVE_S) == ("a",)
    assert found.crowding(8, 20.1 + ACTIVE_S) == ()


@pytest.mark.parametrize(
    ("slots", "wanted", "kept"),
    [(256, None, 4), (4, None, 1), (2, None, 1), (1, None, 0), (8, 0, 0), (8, 3, 3), (8, 99, 7)],
)
def test_how_many_slots_are_kept(slots: int, wanted: int | None, kept: int) -> None:
    """One in sixty-four, at least one, never all."""
    assert reserved_slots(slots, wanted) == kept


@pytest.mark.parametrize(
    ("slots", "wanted", "kept"),
    [(256, None, 2), (64, None, 1), (16, None, 1), (2, None, 1), (1, None, 0), (16, 0, 0), (16, 3, 3), (16, 99, 15)],
)
def test_how_many_slots_are_kept_from_tenants_with_their_share(slots: int, wanted: int | None, kept: int) -> None:
    """One in 128, at least one, never all."""
    assert tenant_slots(slots, wanted) == kept


NOW = 1_000.0


def batch_job(name: str, age_s: float = 100.0, texts: int = 1, **changes: object) -> RunningJob:
    fields: dict[str, object] = {
        "id": name, "lane": Priority.BATCH, "began_s": NOW - age_s, "texts": texts,
        "is_continued": False, "is_resumable": True,
    }  # fmt: skip
    return RunningJob(**{**fields, **changes})  # type: ignore[arg-type]


def test_the_youngest_go_first_and_no_more_than_needed() -> None:
    jobs = [batch_job("old", 300), batch_job("young", 1), batch_job("middle", 20)]
    assert choose_victims(jobs, 1, NOW) == ["young"]
    assert choose_victims(jobs, 2, NOW) == ["young", "middle"]
    assert choose_victims(jobs, 5, NOW) == ["young", "middle", "old"]
    assert choose_victims(jobs, 0, NOW) == []


@pytest.mark.parametrize(
    ("job", "gives_way"),
    [
        (batch_job("a", lane=Priority.STANDARD), False),
        (batch_job("a", lane=Priority.INTERACTIVE), False),
        (batch_job("a", is_resumable=False), False),
        (batch_job("a", deltas=MAX_PARKED_DELTAS + 1), False),
        (batch_job("a", MIN_RUN_S - 0.001, is_continued=True), False),
        (batch_job("a", MIN_RUN_S, is_continued=True), True),
        (batch_job("a", 0), True),
    ],
)
def test_who_is_left_alone(job: RunningJob, gives_way: bool) -> None:
    assert bool(preemptible([job], NOW)) == gives_way


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
    victims = [by_id[each] for each in choose_victims(jobs, texts, NOW)]
    assert all(preemptible([job], NOW) for job in victims)
    assert sum(job.texts for job in victims[:-1]) < max(texts, 1)
    if sum(job.texts for job in victims) < texts:
        allowed = preemptible(jobs, NOW)
        assert len(victims) == len(allowed)


@pytest.mark.parametrize(("batch_texts", "more"), [(0, 6), (6, 0), (7, 0)])
def test_how_many_lines_of_a_batch_fit(batch_texts: int, more: int) -> None:
    """The slots kept for others stay empty; with none kept there is no limit."""
    assert room_for_batch(8, 2, batch_texts) == more
    assert room_for_batch(8, 0, batch_texts) is None
